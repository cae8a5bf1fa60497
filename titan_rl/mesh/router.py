"""Which replica a group goes to: the one with the fewest groups, and never one that is out."""

from collections.abc import Iterator
from contextlib import contextmanager


class NoReplicaLeft(RuntimeError):
    """Every replica was taken out."""


class Router:
    """Owns what is known of the replicas. A group's samples stay together, since they share their prompt's cache."""

    def __init__(self, num_replicas: int):
        self._groups_at = [0] * num_replicas
        self._out: dict[int, str] = {}

    @property
    def healthy(self) -> list[int]:
        return [replica for replica in range(len(self._groups_at)) if replica not in self._out]

    def take_out(self, replica: int, reason: str) -> None:
        """No group goes there any more. Errors: NoReplicaLeft, with every replica's reason, if it was the last."""
        self._out.setdefault(replica, reason)
        self._require_one()

    def _require_one(self) -> None:
        if not self.healthy:
            raise NoReplicaLeft(
                "no generator is left: " + "; ".join(f"replica {r}: {why}" for r, why in sorted(self._out.items()))
            )

    @contextmanager
    def choose(self) -> Iterator[int]:
        """The replica for a group that is sampled inside the block. Errors: NoReplicaLeft."""
        self._require_one()
        replica = min(self.healthy, key=lambda index: self._groups_at[index])
        self._groups_at[replica] += 1
        try:
            yield replica
        finally:
            self._groups_at[replica] -= 1

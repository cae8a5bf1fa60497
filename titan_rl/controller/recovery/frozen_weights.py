"""The proof that roles which never learn did not: digests of their weights when training begins and when it ends."""

from titan_rl.algorithms.base import Needs
from titan_rl.data.callbacks import RecordEvent
from titan_rl.mesh.members.endpoints import TrainerEndpoints
from titan_rl.mesh.meshes import Meshes
from titan_rl.trainer.roles.names import needed_roles

Digests = dict[str, list[str]]
"""Role, or each of several teachers by its tasks, to the digests of its ranks' weights."""


class FrozenWeights:
    """Check of frozen roles. Owns their first digests."""

    def __init__(self, needs: Needs, meshes: Meshes, record_event: RecordEvent, *, has_adapters: bool = False):
        """``has_adapters``: the policy's own weights stay as they are, too."""
        self._is_on, self.meshes = bool(needed_roles(needs)) or has_adapters, meshes
        self.record_event = record_event
        self._digests: Digests = {}

    async def begin(self) -> None:
        """Record digests once all roles have their weights."""
        if self._is_on:
            self._digests = await self._ask()
            self.record_event("frozen_weights", digests=self._digests)

    async def check(self) -> None:
        """Errors: RuntimeError that names the role whose weights are others."""
        if not self._is_on:
            return
        now = await self._ask()
        if changed := [role for role, digests in self._digests.items() if now[role] != digests]:
            raise RuntimeError(f"the weights of the {changed[0]} have changed, which must never happen")
        self.record_event("frozen_weights_unchanged", digests=now)

    async def _ask(self) -> Digests:
        shared, own = await self.meshes.trainer.call(TrainerEndpoints.digests()), await self.meshes.roles.digests()
        return {role: [rank[role] for rank in shared if role in rank] for role in shared[0]} | own

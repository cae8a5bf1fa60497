"""Which of several equal actors a group goes to: the one with the fewest groups, and never one that is out."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from titan_rl.mesh.supervision.deadlines import DeadlineError

_MAX_FAULTS = 12
"""After so many faults without a finished group between them, no further one is tried."""


class NoneLeft(RuntimeError):
    """All are out, and none will come back."""


class Router:
    """Owns which actors may get work. A group's samples stay together, since they share their prompt's cache."""

    def __init__(self, kind: str, numbers: Iterable[int]):
        self.kind = kind
        self._groups_at = dict.fromkeys(numbers, 0)
        self._out: dict[int, str] = {}
        self._given_up: dict[int, str] = {}
        self._faults_in_a_row: list[str] = []
        self._changed = asyncio.Event()

    @property
    def members(self) -> list[int]:
        """Also those that are out for now."""
        return sorted(self._groups_at)

    @property
    def healthy(self) -> list[int]:
        return [number for number in self._groups_at if number not in self._out]

    def take_out(self, number: int, reason: str) -> None:
        """It failed: no group goes there until it is put in again."""
        if number not in self._out:
            self._out[number] = reason
            self._faults_in_a_row.append(f"{self.kind} {number}: {reason}")

    def put_in(self, number: int) -> None:
        self._out.pop(number, None)
        self._groups_at[number] = 0
        self._changed.set()

    def add(self, number: int) -> None:
        """One more, which is out until it is put in."""
        self._groups_at[number] = 0
        self._out[number] = "it is being started"

    def remove(self, number: int) -> None:
        """One less. What it has been given may end."""
        del self._groups_at[number]
        self._out.pop(number, None)

    def give_up(self, number: int, reason: str) -> None:
        """It will not come back."""
        self.take_out(number, reason)
        self._given_up[number] = reason
        self._changed.set()

    def worked(self) -> None:
        """A group was done."""
        self._faults_in_a_row.clear()

    @asynccontextmanager
    async def choose(self, seconds: float) -> AsyncIterator[int]:
        """The one that gets the group which the block works on; waits while all are out.

        Errors: NoneLeft, with every one's reason; DeadlineError.
        """
        number = await self._wait_for_one(seconds)
        self._groups_at[number] += 1
        try:
            yield number
        finally:
            if number in self._groups_at:
                self._groups_at[number] = max(self._groups_at[number] - 1, 0)

    async def _wait_for_one(self, seconds: float) -> int:
        deadline = asyncio.get_running_loop().time() + seconds
        while True:
            if len(self._faults_in_a_row) >= _MAX_FAULTS:
                raise NoneLeft(f"{_MAX_FAULTS} faults without a group between them: {self._faults_in_a_row[-1]}")
            if healthy := self.healthy:
                return min(healthy, key=self._groups_at.__getitem__)
            if set(self._groups_at) <= set(self._given_up):
                raise NoneLeft(f"no {self.kind} is left: {self._reasons(self._given_up)}")
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), deadline - asyncio.get_running_loop().time())
            except TimeoutError:
                raise DeadlineError(
                    f"no {self.kind} came back within {seconds:g} s: {self._reasons(self._out)}"
                ) from None

    def _reasons(self, out: dict[int, str]) -> str:
        return "; ".join(f"{self.kind} {number}: {why}" for number, why in sorted(out.items()))

"""Which of several equals a group goes to: the one with the fewest groups, and never one that is out."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from titan_rl.mesh.waiting import DeadlineError


class NoneLeft(RuntimeError):
    """Every one is out, and none will come back."""


class Router:
    """Owns who may get work. A group's samples stay together, since they share their prompt's cache."""

    def __init__(self, kind: str, count: int):
        self.kind = kind
        self._groups_at = dict.fromkeys(range(count), 0)
        self._out: dict[int, str] = {}
        self._given_up: dict[int, str] = {}
        self._changed = asyncio.Event()

    @property
    def healthy(self) -> list[int]:
        return [number for number in self._groups_at if number not in self._out]

    def take_out(self, number: int, reason: str) -> None:
        """No group goes there until it is put in again."""
        self._out.setdefault(number, reason)

    def put_in(self, number: int) -> None:
        self._out.pop(number, None)
        self._groups_at[number] = 0
        self._changed.set()

    def give_up(self, number: int, reason: str) -> None:
        """It will not come back."""
        self.take_out(number, reason)
        self._given_up[number] = reason
        self._changed.set()

    @asynccontextmanager
    async def choose(self, seconds: float) -> AsyncIterator[int]:
        """Who gets the group that is worked on inside the block; waits while all are out.

        Errors: NoneLeft, with every one's reason; DeadlineError.
        """
        number = await self._wait_for_one(seconds)
        self._groups_at[number] += 1
        try:
            yield number
        finally:
            self._groups_at[number] = max(self._groups_at[number] - 1, 0)

    async def _wait_for_one(self, seconds: float) -> int:
        deadline = asyncio.get_running_loop().time() + seconds
        while not (healthy := self.healthy):
            if set(self._groups_at) <= set(self._given_up):
                raise NoneLeft(f"no {self.kind} is left: {self._reasons(self._given_up)}")
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), deadline - asyncio.get_running_loop().time())
            except TimeoutError:
                raise DeadlineError(
                    f"no {self.kind} came back within {seconds:g} s: {self._reasons(self._out)}"
                ) from None
        return min(healthy, key=self._groups_at.__getitem__)

    def _reasons(self, out: dict[int, str]) -> str:
        return "; ".join(f"{self.kind} {number}: {why}" for number, why in sorted(out.items()))

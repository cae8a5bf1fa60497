"""Router of groups to equal actors: the least loaded one that is in service.

One that is out is replaced in the background: a few tries, then it is given up, and whoever waits for it is told.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager

from titan_rl.mesh.processes.background import BackgroundTasks
from titan_rl.mesh.processes.deadlines import DeadlineError
from titan_rl.mesh.supervision.actor_process import last_line

_MAX_FAULTS = 12
"""After so many faults without a finished group between them, no further one is tried."""


class NoneLeft(RuntimeError):
    """No actor of a kind is left."""


class Router:
    """Router of groups to healthy actors. A group's samples stay together, since they share their prompt's cache."""

    def __init__(self, kind: str, numbers: Iterable[int], most_samples: Callable[[int], int] | None = None):
        """``most_samples``: of a number, at once, after which groups wait for whichever has room; a larger group has
        one for itself. None: no limit."""
        self.kind = kind
        self._most_samples = most_samples
        self._samples_at = dict.fromkeys(numbers, 0)
        self._resting: set[int] = set()
        self._num_waiting = 0
        self._out: dict[int, str] = {}
        self._given_up: dict[int, str] = {}
        self._faults_in_a_row: list[str] = []
        self._reserved: set[int] = set()
        """For a group that is to be alone there; others may still end."""
        self._alone: set[int] = set()
        """Where such a group is at work."""
        self._next_change = asyncio.Event()
        """Set once, and then another takes its place, so that nobody who waits can miss it."""

    @property
    def members(self) -> list[int]:
        """All numbers, those out of rotation included."""
        return sorted(self._samples_at)

    @property
    def healthy(self) -> list[int]:
        """Those that take groups now."""
        return [number for number in self._samples_at if number not in self._out and number not in self._resting]

    @property
    def is_crowded(self) -> bool:
        """Whether a group waits for room, for one that rests, or for any at all."""
        return self._num_waiting > 0

    def runs_at_once(self, samples: int, most: int) -> bool:
        """Whether no group waits, and one has room for so many samples more of ``most`` that it runs at once."""
        held = [self._samples_at[number] for number in self._able(0)]
        return not self._num_waiting and any(not count or count + samples <= most for count in held)

    def rest(self, number: int) -> None:
        """Take an actor out of rotation with its groups, which wait, until ``resume``; no fault is counted."""
        self._resting.add(number)
        self._notify()

    def is_resting(self, number: int) -> bool:
        return number in self._resting

    def is_given_up(self, number: int) -> bool:
        return number in self._given_up

    def resume(self, number: int) -> None:
        self._resting.discard(number)
        self._notify()

    def take_out(self, number: int, reason: str) -> None:
        """Take a failed actor out of rotation until ``put_in``."""
        if number not in self._out:
            self._out[number] = reason
            self._notify()
            if number not in self._alone:  # or else it is the group's fault, until that is ``blamed``
                self.blame(f"{self.kind} {number}: {reason}")

    def blame(self, fault: str) -> None:
        """Count a fault without a finished group in between."""
        self._faults_in_a_row.append(fault)

    def put_in(self, number: int) -> None:
        self._out.pop(number, None)
        self._resting.discard(number)
        self._samples_at.setdefault(number, 0)
        self._notify()

    def add(self, number: int) -> None:
        """Add an actor, out of rotation until ``put_in``."""
        self._samples_at[number] = 0
        self._out[number] = "it is being started"

    def remove(self, number: int) -> None:
        """Remove an actor; its groups may finish."""
        del self._samples_at[number]
        self._out.pop(number, None)
        self._notify()

    def give_up(self, number: int, reason: str) -> None:
        """Give an actor up for good, with the reason."""
        self.take_out(number, reason)
        first = self._out[number]
        self._given_up[number] = reason if first == reason else f"{first}; {reason}"
        self._notify()

    def worked(self) -> None:
        """Reset the fault count after a finished group."""
        self._faults_in_a_row.clear()

    @asynccontextmanager
    async def choose(
        self, seconds: float, *, alone: bool = False, samples: int = 1, is_under_way: bool = False
    ) -> AsyncIterator[int]:
        """The one that gets the group which the block works on; waits while all are out, full or resting.

        ``alone``: no other group is there meanwhile. ``samples``: of the group. ``is_under_way``: it waits for no room.
        Errors: NoneLeft, with every one's reason; DeadlineError after ``seconds`` in which all were out. One
        that rests, is full, or is kept for a group that is alone, is waited for without a limit: those have their own.
        """
        needed = 0 if is_under_way else samples
        number = await (self._wait_for_idle(seconds) if alone else self._wait_for_one(seconds, needed))
        self._samples_at[number] += samples
        try:
            yield number
        finally:
            if number in self._samples_at:
                self._samples_at[number] = max(self._samples_at[number] - samples, 0)
            if alone:
                self._free(number)
            self._notify()

    async def _wait_for_idle(self, seconds: float) -> int:
        """One that is kept for the caller alone, until ``_free``."""
        while True:
            number = await self._wait_for_one(seconds)
            self._reserved.add(number)
            try:
                while number in self.healthy and self._samples_at[number]:
                    await self._next_change.wait()
            except BaseException:  # cancelled: nobody else would free it
                self._free(number)
                raise
            if number in self.healthy:
                self._alone.add(number)
                return number
            self._free(number)

    def _free(self, number: int) -> None:
        self._reserved.discard(number)
        self._alone.discard(number)
        self._notify()

    def _has_room(self, number: int, samples: int) -> bool:
        held, most = self._samples_at[number], self._most_samples
        return most is None or not held or not samples or held + samples <= most(number)

    def _able(self, samples: int) -> list[int]:
        """Those that take a group of so many samples now; 0: they may be full."""
        free = (number for number in self.healthy if number not in self._reserved)
        return [number for number in free if self._has_room(number, samples)]

    async def _wait_for_one(self, seconds: float, samples: int = 0) -> int:
        """``samples``: for which it must have room; 0: it may be full."""
        now, deadline = asyncio.get_running_loop().time, None
        while True:
            if len(self._faults_in_a_row) >= _MAX_FAULTS:
                first, last = self._faults_in_a_row[0], self._faults_in_a_row[-1]
                faults = last if first == last else f"first {first}; at last {last}"
                raise NoneLeft(f"{_MAX_FAULTS} faults without a group between them: {faults}")
            if able := self._able(samples):
                return min(able, key=self._samples_at.__getitem__)
            if set(self._samples_at) <= set(self._given_up):
                raise NoneLeft(f"no {self.kind} is left: {self._reasons(self._given_up)}")
            some_rest = bool(self._resting - self._out.keys())
            deadline = None if self.healthy or some_rest else deadline or now() + seconds
            waits_for_room = bool(self._able(0)) or not self.healthy
            self._num_waiting += waits_for_room
            try:
                await asyncio.wait_for(self._next_change.wait(), None if deadline is None else deadline - now())
            except TimeoutError:
                raise DeadlineError(
                    f"no {self.kind} came back within {seconds:g} s: {self._reasons(self._out)}"
                ) from None
            finally:
                self._num_waiting -= waits_for_room

    def _notify(self) -> None:
        """Somebody came, went or is done."""
        self._next_change.set()
        self._next_change = asyncio.Event()

    def _reasons(self, out: dict[int, str]) -> str:
        return "; ".join(f"{self.kind} {number}: {why}" for number, why in sorted(out.items()))


_MAX_ATTEMPTS = 5


class Replacements:
    """Replacements in progress of one kind of actor."""

    def __init__(self, router: Router, log: Callable[[str], None]):
        self.router, self.log = router, log
        self._background = BackgroundTasks()

    def begin(self, number: int, replace: Callable[[], Awaitable[None]]) -> None:
        """Begin to replace an actor by ``replace``."""
        self._background.start(self._try(number, replace))

    async def _try(self, number: int, replace: Callable[[], Awaitable[None]]) -> None:
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            if number not in self.router.members:  # it was taken away meanwhile
                return
            try:
                return await replace()
            except Exception as error:  # it is tried again, and in the end those who wait are told
                self.log(f"{self.router.kind} {number} could not be started: {last_line(error)}")
                if attempt == _MAX_ATTEMPTS:
                    self.router.give_up(number, f"its replacements failed, the last with {last_line(error)}")

    def stop(self) -> None:
        self._background.cancel()

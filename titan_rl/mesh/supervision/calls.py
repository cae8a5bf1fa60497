"""Calls to actors, each with a deadline: who dies, hangs or raises is known by name."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Generic, TypeVar, cast

from titan_rl.compat.monarch.actors import SupervisionError
from titan_rl.mesh.processes.background import retrieve_exception
from titan_rl.mesh.processes.blame import Ending, Outcome, to_blame
from titan_rl.mesh.supervision.actor_process import ActorDied, ActorProcess
from titan_rl.mesh.supervision.remote_call import RemoteCall

R = TypeVar("R")

_SETTLE_SECONDS = 10.0
"""How long the others of a group may take to end their call once one of them died."""
_BLAME_SECONDS = 0.3
"""How long a death is waited for that would explain why others raise."""
_GONE_SECONDS, _KILLED_SECONDS = 1.0, 5.0
"""How long the death of a process is waited for: when Monarch says that its actor is gone, and after it was killed."""
_FIRST = asyncio.FIRST_COMPLETED


class Deadline:
    """Deadline of a call that may begin anew while the call is under way."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.restart()

    def restart(self) -> None:
        """Allow all of the seconds again, from now on."""
        self.at = time.monotonic() + self.seconds


async def call(process: ActorProcess, request: RemoteCall[R], *, seconds: float | Deadline, what: str) -> R:
    """Answer of one actor. Errors: ActorDied; whatever the actor raises."""
    [answer] = await call_each([(process, request)], seconds=seconds, what=what)
    return answer


async def call_all(processes: Iterable[ActorProcess], request: RemoteCall[R], *, seconds: float, what: str) -> list[R]:
    """Answers of all actors, in order. Errors: ActorDied; whatever an actor raises."""
    return await call_each([(process, request) for process in processes], seconds=seconds, what=what)


async def call_each(
    calls: Sequence[tuple[ActorProcess, RemoteCall[R]]],
    *,
    seconds: float | Deadline,
    what: str,
    one_fails_all: bool = False,
) -> list[R]:
    """Answers, each actor being called with arguments of its own, once every one has answered, failed or died.

    ``what`` completes the sentence "... died while" of an error. ``one_fails_all``: the first that raises is ended
    (blame.py says why). Errors: ActorDied if anybody is dead by then; else what was raised, by the first in order.
    """
    group = _GroupCall(calls, one_fails_all)
    try:
        await group.wait(seconds if isinstance(seconds, Deadline) else Deadline(seconds))
    finally:
        group.cancel()
    return group.answers(what)


class _GroupCall(Generic[R]):
    """One call to each of several processes. It ends those that are to blame if the call goes wrong."""

    def __init__(self, calls: Sequence[tuple[ActorProcess, RemoteCall[R]]], one_fails_all: bool):
        self._processes = [process for process, _ in calls]
        self._tasks = [asyncio.ensure_future(_answer(process, request)) for process, request in calls]
        self._one_fails_all = one_fails_all
        self._raised: list[int] = []
        """Places of the calls that raised, in the order in which they did."""
        self._error: BaseException | None = None
        """For which a process was ended."""
        for place, task in enumerate(self._tasks):
            task.add_done_callback(partial(self._note, place))

    def _note(self, place: int, task: asyncio.Task) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._raised.append(place)

    def _outcome(self, place: int, is_late: bool = False) -> Outcome | None:
        process, task = self._processes[place], self._tasks[place]
        if process.is_dead:
            return Outcome(Ending.DIED)
        if not task.done():
            return Outcome(Ending.HUNG, is_stopped=process.is_stopped) if is_late else None
        if task.cancelled() or task.exception() is None:
            return Outcome(Ending.ANSWERED, None if task.cancelled() else task.result())
        order = self._raised.index(place) if place in self._raised else len(self._raised)  # its callback comes next
        return Outcome(Ending.RAISED, task.exception(), order)

    def _outcomes(self, is_late: bool = False) -> list[Outcome | None]:
        return [self._outcome(place, is_late) for place in range(len(self._tasks))]

    async def wait(self, allowed: Deadline) -> None:
        """Until every call has an outcome; those that hang are ended at the deadline."""
        settled = math.inf
        """When those are ended that have not, although one has died or was ended."""
        while pending := [task for task in self._tasks if not task.done()]:
            left = min(allowed.at, settled) - time.monotonic()
            await asyncio.wait(pending, timeout=max(left, 0), return_when=_FIRST)
            await self._end_the_first_that_raised()
            if any(process.is_dead for process in self._processes):
                settled = min(settled, time.monotonic() + _SETTLE_SECONDS)
            if time.monotonic() >= min(allowed.at, settled):
                await self._end_the_hung(f"no answer in {allowed.seconds:g} s")
                settled, allowed = time.monotonic() + _SETTLE_SECONDS, Deadline(math.inf)
        await self._end_the_first_that_raised()

    async def _end_the_hung(self, known_by: str) -> None:
        outcomes = self._outcomes(is_late=True)
        blamed = to_blame(outcomes, one_fails_all=self._one_fails_all)
        hung = [self._processes[place] for place in blamed if _ended(outcomes[place], Ending.HUNG)]
        await asyncio.gather(*(process.kill_hung(known_by) for process in hung))

    async def _end_the_first_that_raised(self) -> None:
        """Unless somebody died by himself, which may become known a moment later than what the others raise."""
        if not (self._one_fails_all and self._raised):
            return
        deaths = [process.died for process in self._processes]
        await asyncio.wait(deaths, timeout=_BLAME_SECONDS, return_when=_FIRST)
        outcomes = self._outcomes()
        for place in to_blame(outcomes, one_fails_all=True):
            outcome = outcomes[place]
            if outcome is not None and outcome.ending is Ending.RAISED:
                self._error = error = outcome.value
                self._processes[place].fail(error)
                await asyncio.wait(deaths, timeout=_SETTLE_SECONDS, return_when=_FIRST)

    def cancel(self) -> None:
        """What nobody waits for any more."""
        for task in self._tasks:
            task.cancel()

    def answers(self, what: str) -> list[R]:
        """Errors: ActorDied; what was raised, by the first in order."""
        if dead := [process for process in self._processes if process.is_dead]:
            raise ActorDied(dead, what) from self._error
        return [cast(R, task.result()) for task in self._tasks]  # None, too, only where the endpoint answers that


def _ended(outcome: Outcome | None, ending: Ending) -> bool:
    return outcome is not None and outcome.ending is ending


async def started(start: Callable[[], Awaitable[R]], log: Callable[[str], None]) -> R:
    """Result of a start that leaves nothing behind; it begins once again if an actor dies of nothing that it raised."""
    try:
        return await start()
    except ActorDied as death:
        if death.__cause__ is not None:
            raise
        log(f"{death}: begun again")
    return await start()


async def done_or_dead(work: asyncio.Future, processes: Iterable[ActorProcess], *others: asyncio.Future) -> None:
    """Wait until the work, or one of the others, is done, or one of the processes is dead."""
    over, processes = asyncio.get_running_loop().create_future(), list(processes)

    def wake(_: asyncio.Future | None = None) -> None:
        if not over.done():
            over.set_result(None)

    for future in (work, *others):
        future.add_done_callback(wake)
    for process in processes:
        process.wakes.add(wake)
    try:
        if not any(process.is_dead for process in processes):
            await over
    finally:
        for future in (work, *others):
            future.remove_done_callback(wake)
        for process in processes:
            process.wakes.discard(wake)


async def _answer(process: ActorProcess, request: RemoteCall[R]) -> R | None:
    """None if the process dies meanwhile."""

    async def wait() -> R:
        return await request.at(process.actor, process.host.here)

    if process.is_dead:
        return None
    work = asyncio.ensure_future(wait())
    try:
        await done_or_dead(work, [process])
        if work.done() and isinstance(work.exception(), SupervisionError):
            await _end_without_actor(process)
        return work.result() if work.done() and not process.is_dead else None
    finally:
        if not work.done():
            work.add_done_callback(retrieve_exception)
            work.cancel()


async def _end_without_actor(process: ActorProcess) -> None:
    """Monarch says that its actor is gone: the process soon will be too, or it is stopped or stuck, and is killed."""
    await asyncio.wait({process.died}, timeout=_GONE_SECONDS)
    if not process.is_dead:
        await process.kill_hung("Monarch had not heard of its actor")
        await asyncio.wait({process.died}, timeout=_KILLED_SECONDS)

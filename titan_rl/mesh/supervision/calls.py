"""Calls to actors, each with a deadline: whoever dies, hangs or raises is known by name."""

import asyncio
import time
from collections.abc import Iterable

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError

from titan_rl.mesh.supervision import processes
from titan_rl.mesh.supervision.actor_process import Cell, CellDied

_SETTLE_SECONDS = 10.0
"""How long the others of a group may take to end their call once one of them died."""


_BLAME_SECONDS = 0.3
"""How long a death is waited for that would explain why others raise."""


_FIRST = asyncio.FIRST_COMPLETED


async def call(cell: Cell, endpoint: str, *arguments, seconds: float, what: str):
    """One cell's answer. Errors: CellDied; whatever the actor raises."""
    [answer] = await call_each([(cell, arguments)], endpoint, seconds=seconds, what=what)
    return answer


async def call_all(cells: Iterable[Cell], endpoint: str, *arguments, seconds: float, what: str) -> list:
    """Every cell's answer, in order. Errors: CellDied; whatever an actor raises."""
    return await call_each([(cell, arguments) for cell in cells], endpoint, seconds=seconds, what=what)


async def call_each(
    calls: list[tuple[Cell, tuple]], endpoint: str, *, seconds: float, what: str, one_fails_all: bool = False
) -> list:
    """Answers to one endpoint with each cell's own arguments, once every cell has answered, failed or died.

    The dead count more than the failed, since a death makes its peers fail. ``one_fails_all``: whoever raises first is
    ended, as its state is anybody's guess and its peers wait for it.
    """
    tasks = [asyncio.ensure_future(_answer(cell, endpoint, arguments)) for cell, arguments in calls]
    deadline = time.monotonic() + seconds
    blame = _Blame([cell for cell, _ in calls], tasks) if one_fails_all else None
    try:
        while pending := [task for task in tasks if not task.done()]:
            await asyncio.wait(pending, timeout=max(deadline - time.monotonic(), 0), return_when=_FIRST)
            if blame is not None and blame.failed:
                await blame.settle()
            if any(cell.is_dead for cell, _ in calls):
                deadline = min(deadline, time.monotonic() + _SETTLE_SECONDS)
            if time.monotonic() >= deadline:
                hung = [cell for (cell, _), task in zip(calls, tasks, strict=True) if not task.done()]
                # if somebody is stopped, the others only wait for it
                hung = [cell for cell in hung if processes.is_stopped(cell.pid)] or hung
                await asyncio.gather(*(cell.kill_hung() for cell in hung))
                deadline = time.monotonic() + _SETTLE_SECONDS
        if blame is not None and blame.failed:
            await blame.settle()
    finally:
        for task in tasks:
            task.cancel()
    if dead := [cell for cell, _ in calls if cell.is_dead]:
        raise CellDied(dead, what) from (blame and blame.error)
    return [task.result() for task in tasks]


class _Blame:
    """Whoever raises first is ended, unless somebody is dead: then what the others raise is only how they noticed."""

    def __init__(self, cells: list[Cell], tasks: list[asyncio.Task]):
        self.cells, self.error = cells, None
        self.failed: list[tuple[Cell, BaseException]] = []
        """In the order in which they raised."""
        for cell, task in zip(cells, tasks, strict=True):
            task.add_done_callback(lambda task, cell=cell: self._note(cell, task))

    def _note(self, cell: Cell, task: asyncio.Task) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failed.append((cell, error))

    async def settle(self) -> None:
        """Until somebody is dead: who died by itself, which may be told a moment later, or the first to raise."""
        deaths = [cell.died for cell in self.cells]
        await asyncio.wait(deaths, timeout=_BLAME_SECONDS, return_when=_FIRST)
        if not any(cell.is_dead for cell in self.cells):
            cell, self.error = self.failed[0]
            cell.fail(self.error)
            await asyncio.wait(deaths, timeout=_SETTLE_SECONDS, return_when=_FIRST)


async def _answer(cell: Cell, endpoint: str, arguments: tuple):
    async def wait():
        return await getattr(cell.actor, endpoint).call_one(*arguments)

    if cell.is_dead:
        return None
    work = asyncio.ensure_future(wait())
    try:
        await asyncio.wait({work, cell.died}, return_when=_FIRST)
        if work.done() and isinstance(work.exception(), SupervisionError):
            # the actor is gone: so will be the process, if it is not already
            await asyncio.wait({cell.died}, timeout=1.0)
            if not cell.is_dead:  # Monarch has given it up: it is stopped, or stuck
                await cell.kill_hung()
                await asyncio.wait({cell.died}, timeout=5.0)
        return work.result() if work.done() and not cell.is_dead else None
    finally:
        if not work.done():
            work.add_done_callback(lambda task: task.cancelled() or task.exception())
            work.cancel()

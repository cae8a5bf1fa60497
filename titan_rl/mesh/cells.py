"""Processes with one actor each, watched: whoever dies, stops or does not answer is known by name, and soon.

A *cell* is a Monarch process mesh of one process. That way one can be replaced while its neighbours keep their
memory. Death is told by the kernel (a pidfd) within milliseconds, whatever its cause, a clean-looking exit too. Every
call has a deadline; a cell that misses it writes its stacks into its log and is killed, so a hang becomes a death.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import default_bootstrap_cmd, this_host

from titan_rl.actors.steward import Steward
from titan_rl.mesh import processes
from titan_rl.mesh.waiting import DeadlineError, within

_SETTLE_SECONDS = 10.0
"""How long the others of a group may take to end their call once one of them died."""
_STACK_SECONDS = 0.5
_PATROL_SECONDS = 0.4
_SPAWN_SECONDS = 120.0
_STEWARD_SECONDS = 30.0


class CellDied(RuntimeError):
    """Processes of ours died, or were killed since they hung; says which, and during what."""

    def __init__(self, cells: "list[Cell]", what: str):
        self.cells = cells
        reasons = ", ".join(f"{cell.name} {cell.why}" for cell in cells)
        super().__init__(f"{reasons} while {what}")


@dataclass(eq=False)
class Cell:
    """One process: ``actor`` does its work, ``steward`` answers for the process meanwhile."""

    name: str
    procs: Any
    actor: Any
    steward: Any
    pid: int = 0
    why: str = "died"
    died: asyncio.Future = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    on_death: list[Callable[["Cell"], None]] = field(default_factory=list)

    @property
    def is_dead(self) -> bool:
        return self.died.done()

    def end(self) -> None:
        """Known to be gone."""
        if not self.is_dead:
            self.died.set_result(time.monotonic())
            for callback in self.on_death:
                callback(self)

    async def ask_steward(self, endpoint: str, *arguments):
        """Errors: CellDied if the process is gone, or does not answer."""
        try:
            calling = getattr(self.steward, endpoint).call_one(*arguments)
            return await within(_STEWARD_SECONDS, f"{endpoint} at {self.name}", calling)
        except (SupervisionError, DeadlineError) as error:
            raise CellDied([self], f"its steward was asked for {endpoint}") from error

    def kill(self) -> None:
        processes.kill([self.pid] if self.pid else [])

    async def kill_hung(self) -> None:
        """Its stacks go to its log first. A stopped process is woken for that."""
        self.why = "hung"
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)
            os.kill(self.pid, signal.SIGCONT)
            await asyncio.wait({self.died}, timeout=_STACK_SECONDS)
        self.kill()

    def is_stopped(self) -> bool:
        """By a signal, such as SIGSTOP."""
        with suppress(OSError), open(f"/proc/{self.pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "Tt"
        return False


@contextmanager
def _interrupts_ignored():
    """What is spawned here never sees Ctrl-C: stopping is the controller's business."""
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


class Cells:
    """Owns all cells of a run."""

    def __init__(self, logs: str | None):
        self.logs, self.mark = logs, processes.new_mark()
        self.all: list[Cell] = []
        self.tell: Callable[..., None] = lambda kind, **fields: None
        """Hears of every start and every death."""
        self._count = 0

    async def spawn(self, name: str, environment: dict[str, str], actor: type, *arguments) -> Cell:
        """A process with an actor of that class; it is watched as soon as its id is known."""
        self._count += 1
        tag = f"{name.replace(' ', '_')}_{self._count}"
        with _interrupts_ignored():
            command = default_bootstrap_cmd().with_env(environment | self.mark)
            procs = this_host().spawn_procs(name=tag, bootstrap_command=command)
        cell = Cell(name, procs, procs.spawn(tag, actor, *arguments), procs.spawn(f"{tag}_steward", Steward))
        self.all.append(cell)
        starting = cell.steward.start.call_one(self.logs, tag)
        cell.pid = await within(_SPAWN_SECONDS, f"spawning {name}", starting)
        cell.on_death.append(lambda cell: self.tell("died", name=cell.name, pid=cell.pid, why=cell.why))
        self._watch(cell)
        self.tell("started", name=cell.name, pid=cell.pid)
        return cell

    def _watch(self, cell: Cell) -> None:
        try:
            descriptor = os.pidfd_open(cell.pid)
        except ProcessLookupError:
            cell.end()
            return
        loop = asyncio.get_running_loop()

        def ended() -> None:
            loop.remove_reader(descriptor)
            os.close(descriptor)
            cell.end()

        loop.add_reader(descriptor, ended)

    async def patrol(self) -> None:
        """For as long as the run lasts: a process that stays stopped is as good as dead, and is made so."""
        suspects: set[Cell] = set()
        while True:
            await asyncio.sleep(_PATROL_SECONDS)
            stopped = {cell for cell in self.all if not cell.is_dead and cell.is_stopped()}
            for cell in stopped & suspects:
                await cell.kill_hung()
            suspects = stopped

    def forget(self, cell: Cell) -> None:
        """It is dead, and its place taken."""
        self.all.remove(cell)

    def names(self) -> dict[int, str]:
        return {cell.pid: cell.name for cell in self.all if not cell.is_dead}


async def call(cell: Cell, endpoint: str, *arguments, seconds: float, what: str):
    """One cell's answer. Errors: CellDied; whatever the actor raises."""
    [answer] = await call_each([(cell, arguments)], endpoint, seconds=seconds, what=what)
    return answer


async def call_all(cells: Iterable[Cell], endpoint: str, *arguments, seconds: float, what: str) -> list:
    """Every cell's answer, in order. Errors: CellDied; whatever an actor raises."""
    return await call_each([(cell, arguments) for cell in cells], endpoint, seconds=seconds, what=what)


async def call_each(calls: list[tuple[Cell, tuple]], endpoint: str, *, seconds: float, what: str) -> list:
    """Answers to one endpoint with each cell's own arguments, once every cell has answered, failed or died.

    The dead count more than the failed, since a death makes its peers fail.
    """
    tasks = [asyncio.ensure_future(_answer(cell, endpoint, arguments)) for cell, arguments in calls]
    deadline = time.monotonic() + seconds
    try:
        while pending := [task for task in tasks if not task.done()]:
            await asyncio.wait(
                pending, timeout=max(deadline - time.monotonic(), 0), return_when=asyncio.FIRST_COMPLETED
            )
            if any(cell.is_dead for cell, _ in calls):
                deadline = min(deadline, time.monotonic() + _SETTLE_SECONDS)
            if time.monotonic() >= deadline:
                hung = [cell for (cell, _), task in zip(calls, tasks, strict=True) if not task.done()]
                # if somebody is stopped, the others only wait for it
                hung = [cell for cell in hung if cell.is_stopped()] or hung
                await asyncio.gather(*(cell.kill_hung() for cell in hung))
                deadline = time.monotonic() + _SETTLE_SECONDS
    finally:
        for task in tasks:
            task.cancel()
    if dead := [cell for cell, _ in calls if cell.is_dead]:
        raise CellDied(dead, what)
    return [task.result() for task in tasks]


async def _answer(cell: Cell, endpoint: str, arguments: tuple):
    async def wait():
        return await getattr(cell.actor, endpoint).call_one(*arguments)

    if cell.is_dead:
        return None
    work = asyncio.ensure_future(wait())
    try:
        await asyncio.wait({work, cell.died}, return_when=asyncio.FIRST_COMPLETED)
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

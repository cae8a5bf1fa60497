"""Processes with one actor each, watched: whoever dies, stops or does not answer is known by name, and soon.

A *cell* is a Monarch process mesh of one process. That way one can be replaced while its neighbours keep their
memory. Death is told by the kernel (a pidfd) within milliseconds, whatever its cause, a clean-looking exit too. Every
call has a deadline; a cell that misses it writes its stacks into its log and is killed, so a hang becomes a death.
"""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from monarch._rust_bindings.monarch_hyperactor.host_mesh import BootstrapCommand
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch._src.actor.proc_mesh import _get_bootstrap_args

from titan_rl.mesh.supervision import processes
from titan_rl.mesh.supervision.deadlines import DeadlineError, within
from titan_rl.mesh.supervision.hosts import Host, Hosts
from titan_rl.mesh.supervision.sidecar import Steward

_STACK_SECONDS = 0.5
_PATROL_SECONDS = 0.4
_SPAWN_SECONDS = 120.0
_FIRST = asyncio.FIRST_COMPLETED
_STEWARD_SECONDS = 30.0


class CellDied(RuntimeError):
    """Processes of ours died, or were killed since they hung; says which, and during what."""

    def __init__(self, cells: "list[Cell]", what: str):
        self.cells = cells
        reasons = ", ".join(f"{cell.name} {cell.why}" for cell in cells)
        super().__init__(f"{reasons} while {what}")


def last_line(error: BaseException) -> str:
    """What an error comes down to; a traceback ends in it."""
    return str(error).strip().splitlines()[-1][:300] if str(error).strip() else type(error).__name__


def _kind(name: str) -> str:
    """``trainer`` of ``trainer rank 0`` and of ``standby trainer``."""
    return name.removeprefix("standby ").split()[0]


@dataclass(eq=False)
class Cell:
    """One process: ``actor`` does its work, ``steward`` answers for the process meanwhile."""

    name: str
    procs: Any
    actor: Any
    steward: Any
    host: Host
    pid: int = 0
    why: str = "died"
    died: asyncio.Future = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    on_death: list[Callable[["Cell"], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.kind = _kind(self.name)

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

    def fail(self, error: BaseException) -> None:
        """It raised what it should not have: it is ended, and whoever mends it knows why."""
        self.why = f"raised {last_line(error)}"
        self.kill()

    async def kill_hung(self) -> None:
        """Its stacks go to its log first. A stopped process is woken for that."""
        self.why = "hung"
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1)
            os.kill(self.pid, signal.SIGCONT)
            await asyncio.wait({self.died}, timeout=_STACK_SECONDS)
        self.kill()


def _command(environment: dict[str, str]) -> BootstrapCommand:
    """Monarch's own, deaf to Ctrl-C: stopping is the controller's business.

    A shell ignores it and becomes the process. (If the controller ignores it while it spawns, one that comes just then
    is lost.)
    """
    program, arguments, monarchs = _get_bootstrap_args()
    deaf = ["-c", 'trap "" INT; exec "$0" "$@"', program, *(arguments or [])]
    return BootstrapCommand("/bin/sh", None, deaf, monarchs | environment)


class Cells:
    """Owns all cells of a run."""

    def __init__(self, logs: str | None, scratch: Path, num_hosts: int = 0):
        """``scratch``: a folder that is nobody else's. ``num_hosts``: worker loops to spread the processes over."""
        self.logs, self.mark = logs, processes.new_mark()
        self.hosts = Hosts(num_hosts, self.mark, scratch, logs)
        self.hosts.started = lambda host: self.tell("started", name=host.name, pid=host.pid)
        self.hosts.on_death = self._on_host_death
        self.all: list[Cell] = []
        self.preparing = asyncio.Lock()
        """Held by the one standby that is being prepared."""
        self.tell: Callable[..., None] = lambda kind, **fields: None
        """Hears of every start and every death."""
        self._count = 0

    async def spawn(self, name: str, environment: dict[str, str], actor: type, *arguments) -> Cell:
        """A process with an actor of that class; it is watched as soon as its id is known. Errors: CellDied."""
        self._count += 1
        tag = f"{name.replace(' ', '_')}_{self._count}"
        host = self.hosts.choose(_kind(name))
        procs = host.mesh.spawn_procs(name=tag, bootstrap_command=_command(environment | self.mark))
        cell = Cell(name, procs, procs.spawn(tag, actor, *arguments), procs.spawn(f"{tag}_steward", Steward), host)
        self.all.append(cell)
        cell.pid = await self._start(cell, tag)
        cell.on_death.append(self._on_death)
        processes.watch(cell.pid, cell.end)
        self.tell("started", name=cell.name, pid=cell.pid)
        return cell

    async def _start(self, cell: Cell, tag: str) -> int:
        calling = cell.steward.start.call_one(self.logs, tag)
        starting = asyncio.ensure_future(within(_SPAWN_SECONDS, f"spawning {cell.name}", calling))
        await asyncio.wait({starting, cell.host.died}, return_when=_FIRST)
        if not starting.done():
            starting.cancel()
            cell.why = f"lost {cell.host.name}"
            self.forget(cell)
            raise CellDied([cell], "it was spawned")
        return starting.result()

    def _on_death(self, cell: Cell) -> None:
        cell.host.kinds.remove(cell.kind)
        self.tell("died", name=cell.name, pid=cell.pid, why=cell.why)

    def _on_host_death(self, host: Host) -> None:
        """Its processes are about to end by themselves; they are not waited for."""
        self.tell("died", name=host.name, pid=host.pid, why="died")
        for cell in self.all:
            if cell.host is host and not cell.is_dead:
                cell.why = f"lost {host.name}"
                cell.kill()

    async def patrol(self) -> None:
        """For as long as the run lasts: a process that stays stopped is as good as dead, and is made so."""
        suspects: set[Cell] = set()
        while True:
            await asyncio.sleep(_PATROL_SECONDS)
            processes.kill([host.pid for host in self.hosts.all if processes.is_stopped(host.pid)])
            stopped = {cell for cell in self.all if not cell.is_dead and processes.is_stopped(cell.pid)}
            for cell in stopped & suspects:
                await cell.kill_hung()
            suspects = stopped

    def forget(self, cell: Cell) -> None:
        """It is dead, or as good as dead, and its place taken."""
        if cell in self.all:
            self.all.remove(cell)

    def names(self) -> dict[int, str]:
        hosts = {host.pid: host.name for host in self.hosts.all if not host.died.done()}
        return hosts | {cell.pid: cell.name for cell in self.all if not cell.is_dead}

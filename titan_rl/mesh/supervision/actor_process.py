"""Processes with one actor each, watched: one that dies, stops or does not answer is known by name, and soon.

An *actor process* is a Monarch process mesh of one process, so that it can be replaced while its neighbours keep their
memory. The kernel tells of a death (through a pidfd) within milliseconds, whatever its cause, a clean exit included.
Every call has a deadline; a process that misses it writes its stacks into its log and is killed: a hang becomes a
death.
"""

import asyncio
import shlex
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from titan_rl.compat.monarch.actors import BootstrapCommand, SupervisionError, bootstrap_command, know_faults_of
from titan_rl.mesh.forking.forking import ForkServers
from titan_rl.mesh.hosts.hosts import Host, Hosts
from titan_rl.mesh.hosts.remote_hosts import RemoteHosts
from titan_rl.mesh.launch.base import Launcher
from titan_rl.mesh.launch.torchrun import OtherRanks
from titan_rl.mesh.processes.background import retrieve_exception
from titan_rl.mesh.processes.deadlines import DeadlineError, within
from titan_rl.mesh.processes.processes import is_stopped, kill, new_mark
from titan_rl.mesh.resources.cores import fork_environment
from titan_rl.mesh.supervision.deaths import DeathHandlers
from titan_rl.mesh.supervision.remote_call import RemoteCall, SidecarEndpoints
from titan_rl.mesh.supervision.sidecar import Sidecar

R = TypeVar("R")
_STACK_SECONDS = 0.5
_PATROL_SECONDS = 0.4
_SPAWN_SECONDS = 120.0
_SIDECAR_SECONDS = 30.0
_FIRST = asyncio.FIRST_COMPLETED


class ActorFault(RuntimeError):
    """Fault of actors that ends the run, with their names."""


class ActorDied(RuntimeError):
    """Death of actor processes, also by a kill after a hang or failure."""

    def __init__(self, processes: "list[ActorProcess]", what: str):
        self.processes = processes
        reasons = ", ".join(f"{process.name} {process.why}" for process in processes)
        super().__init__(f"{reasons} while {what}")


def last_line(error: BaseException) -> str:
    """Last line of an error's text, without its traceback."""
    return str(error).strip().splitlines()[-1][:300] if str(error).strip() else type(error).__name__


def _kind(name: str) -> str:
    """``trainer`` of ``trainer rank 0`` and of ``standby trainer``."""
    return name.removeprefix("standby ").split()[0]


DIED = "died"
"""Why a process is dead that nobody knows more about."""


@dataclass(eq=False)
class ActorProcess:
    """Process with its ``actor`` and a ``sidecar`` that answers while the actor is busy."""

    name: str
    procs: Any
    """Monarch's mesh of this one process."""
    actor: Any
    sidecar: Sidecar
    host: Host
    pid: int = 0
    """0 until the process has answered for the first time."""
    why: str = DIED
    """Why it is dead, or will be: ``died``, ``hung``, ``raised ...``."""
    why_hung: str = ""
    """What a hang was known by."""
    is_stopping: bool = False
    """Whether it was told to go, and its end is no fault."""
    died: asyncio.Future = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Done when the process is gone; its result is the time (``time.monotonic``)."""
    deaths: "DeathHandlers[ActorProcess]" = field(default_factory=lambda: DeathHandlers())
    """Who hears of it when the process is gone."""
    wakes: set[Callable[[], None]] = field(default_factory=set)
    """Of those who wait for an answer, or for this death (calls.py): a future takes longer to let go of one of them the
    more there are."""

    def __post_init__(self) -> None:
        self.kind = _kind(self.name)

    @property
    def is_dead(self) -> bool:
        return self.died.done()

    def end(self) -> None:
        """Mark the process as dead and run its death handlers."""
        if not self.is_dead:
            self.died.set_result(time.monotonic())
            self.deaths.run(self)
            for wake in list(self.wakes):
                wake()

    async def ask_sidecar(self, request: RemoteCall[R]) -> R:
        """Make a call of ``SidecarEndpoints``. Errors: ActorDied if the process is gone, or does not answer."""
        what = f"its sidecar was asked for {request.endpoint}"

        async def answer() -> R:
            return await within(
                _SIDECAR_SECONDS, f"{request.endpoint} at {self.name}", request.at(self.sidecar, self.host.here)
            )

        asking = asyncio.ensure_future(answer())
        asking.add_done_callback(retrieve_exception)
        try:
            await asyncio.wait({asking, self.died}, return_when=_FIRST)  # Monarch may hear of a death much later
            if not asking.done():
                raise ActorDied([self], what)
            return asking.result()
        except (SupervisionError, DeadlineError) as error:
            raise ActorDied([self], what) from error
        finally:
            asking.cancel()

    @property
    def is_stopped(self) -> bool:
        """By a signal, such as SIGSTOP."""
        return self.host.processes.is_stopped(self.pid)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        self.host.processes.signal([self.pid] if self.pid else [], number)

    def fail(self, error: BaseException) -> None:
        """End the process after an unexpected error."""
        self.why = f"raised {last_line(error)}"
        self.kill()

    @property
    def how_it_ended(self) -> str:
        """As ``why``, with what a hang was known by."""
        return f"{self.why} ({self.why_hung})" if self.why_hung else self.why

    async def kill_hung(self, known_by: str) -> None:
        """Kill a hung process, with its stacks written to its log."""
        self.why, self.why_hung = "hung", known_by
        self._signal(signal.SIGUSR1)
        self._signal(signal.SIGCONT)
        await asyncio.wait({self.died}, timeout=_STACK_SECONDS)
        self.kill()


def _forget_on_host(process: ActorProcess) -> None:
    process.host.kinds.remove(process.kind)


async def _unless_lost(host: Host, asking: Awaitable[bool]) -> bool:
    """The answer; false if the host is lost before."""

    async def wait() -> bool:
        return await asking

    work = asyncio.ensure_future(wait())
    work.add_done_callback(retrieve_exception)
    try:
        await asyncio.wait({work, host.died}, return_when=_FIRST)
        return work.done() and work.exception() is None and work.result()
    finally:
        work.cancel()


def _command(
    environment: dict[str, str], start: Callable[[str, list[str]], tuple[str, list[str]]], logs: str | None, name: str
) -> BootstrapCommand:
    """Monarch's own command, as ``start`` wants it (by a fork, or another Python), behind a shell that becomes it.

    It ignores Ctrl-C, a closed terminal, and what else is sent to all of a group (torchrun and ``timeout`` send SIGTERM
    so): the controller stops processes. (The controller cannot ignore them itself while it spawns: one that comes just
    then would be lost.) What it writes is nobody else's to read; what it prints goes to its log from the first line.
    """
    program, arguments, monarchs = bootstrap_command()
    program, arguments = start(program, arguments)
    output = f" >> {shlex.quote(str(Path(logs) / name))}.txt 2>&1" if logs else ""
    ignoring = ["-c", f'trap "" INT HUP TERM; umask 077; exec "$0" "$@"{output}', program, *arguments]
    return BootstrapCommand("/bin/sh", None, ignoring, monarchs | environment)


class ActorProcesses:
    """Actor processes of a run, and their hosts."""

    def __init__(
        self,
        logs: str | None,
        scratch: Path,
        num_hosts: int,
        *,
        launcher: Launcher,
        record_event: Callable[..., None],
        ranks: OtherRanks | None = None,
        on_lost: Callable[[str], None] = lambda why: None,
        remote: RemoteHosts | None = None,
    ):
        """``scratch``: a folder that nobody else uses. ``num_hosts``: worker loops to spread the processes over; 0 for
        none. ``record_event(kind, **fields)`` is called for every start and every death. ``ranks``: torchrun's other
        processes as hosts; ``on_lost(why)`` is called when one of them dies, after which torchrun ends all.
        ``remote``: hosts of other machines, and then nothing is spawned on this one."""
        self.logs, self.mark, self.record_event, self._on_lost = logs, new_mark(), record_event, on_lost
        self._environment = self.mark | {"TMPDIR": str(scratch)}
        self.hosts = Hosts(
            num_hosts,
            self._environment,
            scratch,
            logs,
            launcher,
            on_start=self._on_host_start,
            on_death=self._on_host_death,
            ranks=ranks,
        )
        self.remote = remote
        if remote is not None:
            remote.register(self._on_host_start, self._on_host_death)
        self.forks = ForkServers(scratch, fork_environment() | self._environment, logs)
        self.all: list[ActorProcess] = []
        self.are_stopping = False
        """Whether the run ends, and with it all of them."""
        self.preparing = asyncio.Lock()
        """Held by the one standby that is being prepared."""
        self._count = 0

    def is_there(self, number: int) -> bool:
        """Whether the host of that number, in [hosts], is not lost; without any, this machine is."""
        return self.remote is None or number in self.remote.alive

    async def spawn(
        self, name: str, environment: dict[str, str], actor: type, *arguments: Any, on: int | None = None
    ) -> ActorProcess:
        """A process with an actor of that class; it is watched as soon as its id is known. ``on``: the number of the
        host, in [hosts], that it must be on. Errors: ActorDied; NoHosts."""
        self._count += 1
        kind, tag = _kind(name), f"{name.replace(' ', '_')}_{self._count}"
        host = self.hosts.choose(kind) if self.remote is None else await self.remote.choose(kind, on)
        command = await self._command_on(host, kind, getattr(actor, "IMPORTS", None), environment, tag)
        know_faults_of(tag, f"{tag}_sidecar")
        procs = host.mesh.spawn_procs(name=tag, bootstrap_command=command)
        sidecar = procs.spawn(f"{tag}_sidecar", Sidecar)
        working = procs.spawn(tag, actor, *map(host.here, arguments))
        process = ActorProcess(name, procs, working, sidecar, host)
        self.all.append(process)
        process.pid = await self._start(process, tag)
        process.deaths.register("host", _forget_on_host)
        process.deaths.register("record", self._record_death)
        host.processes.watch(process.pid, process.end)
        self.record_event("started", name=process.name, pid=process.pid, **host.event_fields)
        return process

    async def _command_on(
        self, host: Host, kind: str, imports: str | None, environment: dict[str, str], tag: str
    ) -> BootstrapCommand:
        """To start a process of that kind there."""
        if self.remote is not None:
            here, facts = environment | self.remote.environment(host, kind), host.remote_facts
            if self.remote.can_fork and imports is not None:
                is_done = await _unless_lost(host, host.remote_agent.imports_done.call_one(imports))
                imports = imports if is_done else None
            start = facts.command if self.remote.can_fork else facts.fresh_command
            return _command(here, partial(start, imports), facts.logs, tag)
        if not await self.forks.ready(imports):  # Monarch gives a process 30 seconds, imports included
            imports = None
        return _command(environment | self._environment, partial(self.forks.command, imports), self.logs, tag)

    async def _start(self, process: ActorProcess, tag: str) -> int:
        facts = process.host.facts
        calling = SidecarEndpoints.start(self.logs if facts is None else facts.logs, tag).at(process.sidecar)
        starting = asyncio.ensure_future(within(_SPAWN_SECONDS, f"spawning {process.name}", calling))
        starting.add_done_callback(retrieve_exception)  # it may fail after a cancelled spawn has stopped waiting
        try:
            await asyncio.wait({starting, process.host.died}, return_when=_FIRST)
        finally:
            is_up = starting.done()
            starting.cancel()
        if not is_up:
            process.why = f"lost {process.host.name}"
            self.forget(process)
            raise ActorDied([process], "it was spawned")
        return starting.result()

    def _record_death(self, process: ActorProcess) -> None:
        if process.why == DIED and process.host.processes.is_gone(process.host.pid):  # which may be told of only later
            process.why = f"lost {process.host.name}"
        if self.are_stopping or process.is_stopping:
            self.record_event("stopped", name=process.name, pid=process.pid, **process.host.event_fields)
        else:
            known = {"known_by": process.why_hung} if process.why_hung else {}
            fields = {"pid": process.pid, "why": process.why, **known, **process.host.event_fields}
            self.record_event("died", name=process.name, **fields)

    def _on_host_start(self, host: Host) -> None:
        self.record_event("started", name=host.name, pid=host.pid)

    def _on_host_death(self, host: Host) -> None:
        """Its processes are about to end by themselves; nobody waits for that."""
        if self.are_stopping:
            return self.record_event("stopped", name=host.name, pid=host.pid)
        self.record_event("died", name=host.name, pid=host.pid, why=host.why or "died")
        if host.is_torchruns:
            self._on_lost(f"{host.name} (process {host.pid}) died")
        for process in list(self.all):  # its owner may forget it at once
            if process.host is host and not process.is_dead:
                process.why = f"lost {host.name}"
                process.kill()

    async def patrol(self) -> None:
        """For as long as the run lasts: a process that stays stopped counts as dead, and is killed."""
        suspects: set[ActorProcess] = set()
        while True:
            await asyncio.sleep(_PATROL_SECONDS)
            kill([host.pid for host in self.hosts.all if is_stopped(host.pid)])
            stopped = {process for process in self.all if not process.is_dead and process.is_stopped}
            for process in stopped & suspects:
                await process.kill_hung("a signal had stopped it")
            suspects = stopped

    def forget(self, process: ActorProcess) -> None:
        """Remove a dead or dying process."""
        if process in self.all:
            self.all.remove(process)

    def names(self) -> dict[int, str]:
        """Names of live processes on this host, by pid; those whose id is not known yet are left out."""
        hosts = {host.pid: host.name for host in self.hosts.all if not host.died.done()}
        here = (process for process in self.all if not process.is_dead and not process.host.is_remote)
        return hosts | {process.pid: process.name for process in here if process.pid}

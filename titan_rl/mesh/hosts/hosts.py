"""What processes are spawned on: the controller itself, worker loops that it starts, or torchrun's processes.

A worker loop takes its processes with it. Their owners then replace them one by one, as if each had died by itself, on
the loops that are left and on the one that is started again. A process of torchrun's cannot be started again.
"""

import asyncio
import itertools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monarch.actor import attach_to_workers, this_host

from titan_rl.compat.monarch.actors import know_faults_of
from titan_rl.mesh.hosts.host_path import HostPath
from titan_rl.mesh.launch.base import Launcher
from titan_rl.mesh.launch.torchrun import OtherRanks
from titan_rl.mesh.processes.logs import log_file
from titan_rl.mesh.processes.processes import LOCAL, ProcessTable, watch

if TYPE_CHECKING:
    from titan_rl.mesh.hosts.agent import HostAgent, HostFacts


@dataclass(eq=False)
class Host:
    """Host for processes. ``pid`` is 0 for the controller's own."""

    name: str
    mesh: Any
    pid: int = 0
    died: asyncio.Future = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    kinds: list[str] = field(default_factory=list)
    """Of the processes that it runs."""
    is_torchruns: bool = False
    """Whether torchrun ends everything when it dies."""
    processes: ProcessTable = LOCAL
    number: int = -1
    """Of a host of another machine, as are these:"""
    facts: "HostFacts | None" = None
    agent: "HostAgent | None" = None
    why: str = ""
    """How it was lost."""
    paths: dict[str, str] = field(default_factory=dict)
    """Where what is below these paths of the controller is on the host."""

    @property
    def is_remote(self) -> bool:
        """Whether it is another machine than the controller's."""
        return self.facts is not None

    @property
    def remote_facts(self) -> "HostFacts":
        """Of a host of another machine."""
        assert self.facts is not None
        return self.facts

    @property
    def remote_agent(self) -> "HostAgent":
        """Of a host of another machine."""
        assert self.agent is not None
        return self.agent

    @property
    def event_fields(self) -> dict[str, str]:
        """Fields for a process's events: its host, on another machine."""
        return {"host": self.name} if self.is_remote else {}

    def folder(self, scratch: Path) -> Path:
        """For what a run leaves lying: ``scratch`` on the controller's host, and that of the host's own elsewhere."""
        return scratch if self.facts is None else Path(self.facts.scratch)

    def here(self, argument: Any) -> Any:
        """An argument of a call as it is meant there: a ``HostPath`` may be another one, and nothing else is."""
        return argument.at(self.paths) if isinstance(argument, HostPath) else argument


class Hosts:
    """Worker loops of a run."""

    def __init__(
        self,
        count: int,
        environment: dict[str, str],
        scratch: Path,
        logs: str | None,
        launcher: Launcher,
        *,
        on_start: Callable[[Host], None],
        on_death: Callable[[Host], None],
        ranks: OtherRanks | None = None,
    ):
        """``count`` 0: everything is spawned by the controller. ``environment``: of all the run's processes. ``ranks``:
        the processes of torchrun that are hosts beside the controller, instead of worker loops."""
        self._environment, self._scratch, self._logs = environment, scratch, logs
        self._count, self._launcher, self._ranks = count, launcher, ranks
        self._on_start, self._on_death = on_start, on_death
        self._hosts: list[Host] = []
        self._numbers = itertools.count()

    @property
    def all(self) -> list[Host]:
        """Those with a process of their own."""
        return [host for host in self._hosts if host.pid]

    def choose(self, kind: str) -> Host:
        """Processes of one kind are spread: the host with the fewest of it. A dead worker loop is started again."""
        self._hosts = self._alive() or self._first()
        host = min(self._hosts, key=lambda host: (host.kinds.count(kind), len(host.kinds)))
        host.kinds.append(kind)
        return host

    def _first(self) -> list[Host]:
        if self._ranks is not None:
            engaged = (self._engage(self._ranks, 1 + i) for i in range(self._ranks.count))
            return [Host("controller", this_host()), *engaged]
        return [self._start(f"host {i}") for i in range(self._count)] or [Host("controller", this_host())]

    def _alive(self) -> list[Host]:
        hosts = (self._start(host.name) if self._can_start(host) else host for host in self._hosts)
        return [host for host in hosts if not host.died.done()]

    @staticmethod
    def _can_start(host: Host) -> bool:
        return host.died.done() and not host.is_torchruns

    def _start(self, name: str) -> Host:
        address = self._address()
        command = [sys.executable, "-m", "titan_rl.mesh.hosts.worker_loop", address]
        with log_file(self._logs, name.replace(" ", "_")) as output:
            process = self._launcher.launch(command, environment=os.environ | self._environment, output=output)
        host = self._attach(name, address, process.pid)
        self._watch(host, process.wait)
        return host

    def _engage(self, ranks: OtherRanks, rank: int) -> Host:
        name, address = f"torchrun rank {rank}", self._address()
        pid = ranks.engage(rank, address, self._environment, (self._logs, name.replace(" ", "_")))
        host = self._attach(name, address, pid)
        host.is_torchruns = True
        self._watch(host)
        return host

    def _address(self) -> str:
        from monarch.job import new_service_proc_id, service_proc_addr  # with its dashboard: a tenth of a second

        return service_proc_addr(f"ipc://{self._scratch}/host{next(self._numbers)}", new_service_proc_id())

    def _attach(self, name: str, address: str, pid: int) -> Host:
        know_faults_of(name)
        host = Host(name, attach_to_workers(ca="trust_all_connections", workers=[address], name=name), pid)
        self._on_start(host)
        return host

    def _watch(self, host: Host, reap: Callable[[], Any] = lambda: None) -> None:
        def ended() -> None:
            reap()
            host.died.set_result(None)
            self._on_death(host)

        watch(host.pid, ended)

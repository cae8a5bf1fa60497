"""What processes are spawned on: the controller itself, or worker loops that it starts, each of which may die alone.

A worker loop takes its processes with it. Their owners then replace them one by one, as if each had died by itself, on
the loops that are left and on the one that is started again.
"""

import asyncio
import itertools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from monarch.actor import attach_to_workers, this_host
from monarch.job import new_service_proc_id, service_proc_addr

from titan_rl.mesh.launch.base import Launcher
from titan_rl.mesh.supervision.logs import log_file
from titan_rl.mesh.supervision.processes import watch


@dataclass(eq=False)
class Host:
    """Where to spawn. ``pid`` is 0 for the controller's own."""

    name: str
    mesh: Any
    pid: int = 0
    died: asyncio.Future = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    kinds: list[str] = field(default_factory=list)
    """Of the processes that it runs."""


class Hosts:
    """Owns the worker loops of a run."""

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
    ):
        """``count`` 0: everything is spawned by the controller. ``environment``: of all the run's processes."""
        self._environment, self._scratch, self._logs = os.environ | environment, scratch, logs
        self._count, self._launcher = count, launcher
        self._on_start, self._on_death = on_start, on_death
        self._hosts: list[Host] = []
        self._numbers = itertools.count()

    @property
    def all(self) -> list[Host]:
        """Those with a process of their own."""
        return [host for host in self._hosts if host.pid]

    def choose(self, kind: str) -> Host:
        """Processes of one kind are spread: the host that runs the fewest of it. A dead host is started again."""
        if not self._hosts:
            self._hosts = [self._start(f"host {i}") for i in range(self._count)] or [Host("controller", this_host())]
        self._hosts = [self._start(host.name) if host.died.done() else host for host in self._hosts]
        host = min(self._hosts, key=lambda host: (host.kinds.count(kind), len(host.kinds)))
        host.kinds.append(kind)
        return host

    def _start(self, name: str) -> Host:
        address = service_proc_addr(f"ipc://{self._scratch}/host{next(self._numbers)}", new_service_proc_id())
        command = [sys.executable, "-m", "titan_rl.mesh.supervision.worker_loop", address]
        with log_file(self._logs, name.replace(" ", "_")) as output:
            process = self._launcher.launch(command, environment=self._environment, output=output)
        host = Host(name, attach_to_workers(ca="trust_all_connections", workers=[address], name=name), process.pid)
        self._on_start(host)

        def ended() -> None:
            process.wait()
            host.died.set_result(None)
            self._on_death(host)

        watch(process.pid, ended)
        return host

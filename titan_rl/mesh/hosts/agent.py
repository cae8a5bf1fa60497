"""Agent of a host: owner of its process ids, logs and files for a remote controller.

It tells of processes and their deaths, hands on what they print, takes and gives files, and ends everything when the
run does. It works under a lease: the controller counts a host as lost that has been silent for long, and before that
time is over the host has ended its processes itself. So who was cut off and comes back has written nothing meanwhile.
"""

import asyncio
import os
import socket
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from monarch.actor import Actor

from titan_rl.data.storage.folders import Manifest, manifest_of, read_part, remove_files, write_part
from titan_rl.mesh.forking import fork_client
from titan_rl.mesh.forking.forking import FORK_SERVERS, client_arguments, imports_done
from titan_rl.mesh.hosts.worker_loop import AGENT_FILE
from titan_rl.mesh.processes import processes
from titan_rl.mesh.processes.concurrent import concurrent_endpoint
from titan_rl.mesh.resources.cores import available_cores
from titan_rl.mesh.resources.host_identity import host_identity
from titan_rl.mesh.resources.network import address_for, interface_of

_LOG_BYTES = 1 << 18
"""Of a log, handed on at once."""
_LEASE_POLL = 0.25
_END_SECONDS = 3.0
_ANSWER_SECONDS = 0.2
"""That an answer has to leave, before this process ends."""


@dataclass(frozen=True)
class HostFacts:
    """Facts about a host for the controller."""

    identity: str
    name: str
    python: str
    cores: int
    address: str
    """At which other hosts reach it."""
    interface: str
    scratch: str
    """A folder for what the run leaves lying there; it goes with the run."""
    mark: dict[str, str]
    """Environment of all the run's processes on this host."""
    forks: str = ""
    """The folder of the host's fork servers; empty if it has none."""
    fork_client: str = ""

    def fresh_command(self, kind: str | None, program: str, arguments: list[str]) -> tuple[str, list[str]]:
        """To start a process there by: the host's own Python."""
        return self.python, arguments

    def command(self, kind: str | None, program: str, arguments: list[str]) -> tuple[str, list[str]]:
        """The same, with the imports of that kind done: as ``ForkServers.command``."""
        if not self.forks:
            return self.fresh_command(kind, program, arguments)
        return self.python, client_arguments(self.fork_client, self.forks, kind, self.python, arguments)

    @property
    def logs(self) -> str:
        return f"{self.scratch}/logs"


@dataclass(frozen=True)
class Heartbeat:
    """Heartbeat of a host: changes since the last one."""

    stopped: frozenset[int]
    """Processes that are stopped by a signal."""
    printed: dict[str, bytes] = field(default_factory=dict)
    """By the name of a log."""


class Lease:
    """Time that a host may work without its controller. Times are of ``time.monotonic``, on either side."""

    def __init__(self, seconds: float):
        self.seconds, self._offset = seconds, float("inf")
        self._until = float("inf")

    def renew(self, sent: float, now: float) -> None:
        """Renew the lease by a message sent at ``sent`` (sender's clock); delayed messages count less."""
        self._offset = min(self._offset, now - sent)
        self._until = sent + self._offset + self.seconds

    def is_over(self, now: float) -> bool:
        return now > self._until


class HostAgent(Actor):
    """One on each host; its process is the host's for the controller."""

    def __init__(self) -> None:
        self._scratch = Path(os.environ["TMPDIR"])
        self._mark = {processes.MARK: os.environ[processes.MARK]}
        self._watched: dict[int, asyncio.Event] = {}
        self._read: dict[str, int] = {}
        self._hung: set[str] = set()
        """Kinds of fork servers that have once taken too long."""

    @concurrent_endpoint
    async def begin(self, lease: float, sent: float, towards: str) -> HostFacts:
        """``lease``: seconds. ``towards``: the controller's name, to tell which way leads there."""
        (self._scratch / "logs").mkdir(exist_ok=True)
        (self._scratch / AGENT_FILE).write_text(str(os.getpid()))
        self.lease = Lease(lease)
        self.lease.renew(sent, time.monotonic())
        threading.Thread(target=self._keep_lease, name="lease", daemon=True).start()
        address = address_for([towards])
        where = host_identity(), socket.gethostname(), sys.executable, available_cores()
        forks = os.environ.get(FORK_SERVERS, ""), fork_client.__file__
        return HostFacts(*where, address, interface_of(address), str(self._scratch), self._mark, *forks)

    def _keep_lease(self) -> None:
        while not self.lease.is_over(time.monotonic()):
            time.sleep(_LEASE_POLL)
        self._end()

    def _end(self) -> None:
        """All processes of the host, this one last: then its worker loop ends, too."""
        for _ in processes.ending(self._mark, _END_SECONDS, sparing=self._forebears()):
            time.sleep(0.02)
        os._exit(0)

    def _forebears(self) -> set[int]:
        """The worker loop and what watches it see to the rest themselves."""
        return {os.getppid(), *processes.parents(os.getppid())}

    @concurrent_endpoint
    async def end(self) -> None:
        """End all of the run's processes here."""
        threading.Timer(_ANSWER_SECONDS, self._end).start()

    @concurrent_endpoint
    async def beat(self, sent: float) -> Heartbeat:
        self.lease.renew(sent, time.monotonic())
        stopped = frozenset(pid for pid in self._watched if processes.is_stopped(pid))
        return Heartbeat(stopped, await asyncio.to_thread(self._printed))

    def _printed(self) -> dict[str, bytes]:
        """What is new in the logs."""
        output = {}
        for path in (self._scratch / "logs").iterdir():
            with open(path, "rb") as file:
                file.seek(self._read.get(path.name, 0))
                if text := file.read(_LOG_BYTES):
                    output[path.name] = text
                    self._read[path.name] = file.tell()
        return output

    # processes

    @concurrent_endpoint
    async def imports_done(self, kind: str) -> bool:
        """Wait until the kind's fork server has imported everything; false where it takes too long."""
        forks = os.environ.get(FORK_SERVERS)
        if forks and kind not in self._hung and not await imports_done(Path(forks), kind):
            self._hung.add(kind)
        return kind not in self._hung

    @concurrent_endpoint
    async def gone(self, pid: int) -> None:
        """Wait until a process has ended."""
        ended = self._watched[pid] = asyncio.Event()
        processes.watch(pid, ended.set)
        try:
            await ended.wait()
        finally:
            self._watched.pop(pid, None)

    @concurrent_endpoint
    async def signal(self, pids: list[int], number: int) -> None:
        processes.send(pids, number)

    @concurrent_endpoint
    async def gpus(self) -> tuple[int, int]:
        """Number of GPUs, and the smallest memory in bytes."""
        return await asyncio.to_thread(_gpus)

    # files

    @concurrent_endpoint
    async def manifest(self, folder: str) -> Manifest:
        """Manifest of a folder; empty if it does not exist."""
        return await asyncio.to_thread(manifest_of, Path(folder))

    @concurrent_endpoint
    async def read(self, path: str, offset: int, nbytes: int) -> bytes:
        return await asyncio.to_thread(read_part, Path(path), offset, nbytes)

    @concurrent_endpoint
    async def write(self, path: str, offset: int, data: bytes) -> None:
        """The folders above it are made."""
        await asyncio.to_thread(write_part, Path(path), offset, data)

    @concurrent_endpoint
    async def remove(self, folder: str, leaving: str) -> None:
        """What a folder holds; but for what begins with ``leaving`` there. Only of what the run left lying here."""
        if self._scratch in Path(folder).parents:
            await asyncio.to_thread(remove_files, Path(folder), leaving)

    @concurrent_endpoint
    async def missing(self, paths: list[str]) -> list[str]:
        """Paths that do not exist here."""
        return [path for path in paths if not Path(path).exists()]


def _gpus() -> tuple[int, int]:
    from titan_rl.models.device import gpu_memory  # whose imports take a second

    sizes = gpu_memory()
    return len(sizes), min(sizes, default=0)

"""The controller's side of fork servers: a run's own, or those that are there for all runs of a machine.

A run's own may be begun ahead of it, as children of this process, which has done most of their imports for itself: the
first run of this process takes them over.
"""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import IO

from titan_rl.config.sections.schema import Config
from titan_rl.mesh.forking import fork_client
from titan_rl.mesh.forking.fork_server import serve_in_child
from titan_rl.mesh.processes.logs import log_file
from titan_rl.mesh.processes.processes import MARK
from titan_rl.mesh.resources.cores import available_cores, fork_environment, import_environment
from titan_rl.mesh.resources.imports import IMPORTS, import_all, import_shared, sees_gpu
from titan_rl.mesh.resources.scratch import make_scratch

FORK_SERVERS = "TITAN_RL_FORK_SERVERS"
"""Environment variable: the folder of servers that others started, and that outlive a run."""
_IMPORT_SECONDS = 60.0
"""How long a server has for its imports; then actors do them by themselves."""
_MOST_WAITING = 64
_OPEN = "/proc/self/fd"


class ForkServers:
    """Owns a run's servers, if it has any; they end with the run's marked processes, or when this process does."""

    def __init__(self, folder: Path, environment: dict[str, str], logs: str | None):
        """``environment``: of all that they fork, as far as libraries read it when they are imported."""
        self._folder, self._environment, self._logs = folder, environment, logs
        self._process: subprocess.Popen | None = None
        """Whose standard input is open for as long as this is held: when it is closed, the servers end."""
        self._are_there = False
        self._hung: set[str] = set()
        """Kinds of servers that have once taken too long."""

    def start(self) -> None:
        """Start the servers, which begin to import."""
        if others := os.environ.get(FORK_SERVERS):
            self._folder = Path(others)
        elif _ahead:
            _ahead.pop().move(self._folder, self._logs)
        else:
            with log_file(self._logs, "fork_servers") as output:
                self._process = start(self._folder, self._environment, output)
        self._are_there = True

    async def ready(self, kind: str | None) -> bool:
        """Wait until the kind's server has imported everything; false where it takes too long to be asked."""
        if kind is None or not self._are_there:
            return True
        if kind not in self._hung and not await imports_done(self._folder, kind):
            self._hung.add(kind)
        return kind not in self._hung

    def command(self, kind: str | None, program: str, arguments: list[str]) -> tuple[str, list[str]]:
        """To start a process by: where there are servers the client, which becomes the program where there is none for
        that kind of actor. It sees to it that the process ends with its parent, which Monarch then does not."""
        if not self._are_there:
            return program, arguments
        return sys.executable, client_arguments(fork_client.__file__, str(self._folder), kind, program, arguments)


def client_arguments(file: str, folder: str, kind: str | None, program: str, arguments: list[str]) -> list[str]:
    """Of a Python that becomes a program of that kind. ``file``, ``folder``: where the client and the servers are."""
    return ["-I", "-S", file, f"{folder}/{kind or 'none'}", program, *arguments]


async def imports_done(folder: Path, kind: str) -> bool:
    """Whether the server for that kind there has done its imports, or there is none, within a time."""
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
        asking.setblocking(False)
        try:
            await loop.sock_connect(asking, str(folder / kind))
            await loop.sock_sendall(asking, b"?")  # which asks for no process: the answer is that the server hangs up
            await asyncio.wait_for(loop.sock_recv(asking, 1), _IMPORT_SECONDS)
        except TimeoutError:
            return False
        except OSError:
            return True
    return True


def start(
    folder: Path, environment: dict[str, str], output: IO | None, at_once: Iterable[str] = IMPORTS
) -> subprocess.Popen:
    """Servers that listen in a folder, from now on, until the process's standard input is closed.

    ``environment`` is added to this process's own, and must hold a run's mark or ``no_mark()``. ``at_once``: kinds of
    actors whose imports begin now; those of others begin when one is asked for.
    """
    with ExitStack() as opened:
        listeners = {kind: opened.enter_context(_listen(folder / kind)).fileno() for kind in IMPORTS}
        kinds = [f"{kind}={descriptor}" for kind, descriptor in listeners.items()]
        return subprocess.Popen(
            [sys.executable, "-m", "titan_rl.mesh.forking.fork_server", ",".join(at_once), *kinds],
            env=os.environ | environment,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            pass_fds=listeners.values(),
            start_new_session=True,
        )


def _listen(path: Path) -> socket.socket:
    """Clients may connect at once, and wait."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen(_MOST_WAITING)
    return listener


class EarlyServers:
    """Fork servers started before their run, as children of this process, which shares its imports with them."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        """Of the sockets, from ``start`` on; a server removes its own if this process is killed."""
        self._listeners: dict[str, socket.socket] = {}
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  (``end`` closes it)
        self._logs: str | None = None
        self._input, self._lifeline = os.pipe()
        """The servers' standard input, and what it ends with."""
        self._others = _descriptors()
        """Of this process, and no server's; what imports will open is everybody's."""
        self.processes: list[int] = []

    def start(self, kinds: list[str]) -> None:
        """Import what actors of these kinds need, and fork the servers.

        What engines need and controllers do not, vLLM above all, their server imports, which begins once what all share
        is there. Servers of other kinds import when they are first asked.
        """
        here = [kind for kind in kinds if kind != "generator"]
        import_module("huggingface_hub.constants")  # it reads whether to be offline, which a server is and this is not
        with _importing(fork_environment()):
            import_shared()
        self._folder = folder = make_scratch()
        self._listeners = {kind: _listen(folder / kind) for kind in IMPORTS}
        self._others += [listener.fileno() for listener in self._listeners.values()]
        for kind in IMPORTS:
            if kind not in here:
                self._fork(kind, is_at_once=kind in kinds)
        for kind in here:
            with _importing(fork_environment() | import_environment(kind, on_cpu=not sees_gpu())):
                import_all(kind)
            self._fork(kind, is_at_once=True)

    def _fork(self, kind: str, is_at_once: bool) -> None:
        with self._listeners.pop(kind) as listener:
            self._others.remove(listener.fileno())
            standard = self._input, self._output.fileno()
            self.processes.append(
                serve_in_child(kind, listener, is_at_once, fork_environment(), standard, self._others)
            )

    def move(self, folder: Path, logs: str | None) -> None:
        """Move the servers' sockets into a run's folder."""
        assert self._folder is not None, "they were started"
        for kind in IMPORTS:
            with suppress(FileNotFoundError):  # of a server that has ended
                (self._folder / kind).rename(folder / kind)
        shutil.rmtree(self._folder, ignore_errors=True)
        self._logs = logs

    def end(self) -> None:
        """End the servers at once."""
        for process in self.processes:
            for kill in (os.killpg, os.kill):  # it may have had no time yet to lead a group
                with suppress(ProcessLookupError):
                    kill(process, signal.SIGKILL)
            with suppress(ChildProcessError):  # where SIGCHLD is ignored, nobody need wait
                os.waitpid(process, 0)
        for listener in self._listeners.values():
            listener.close()
        os.close(self._input)
        os.close(self._lifeline)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._output.seek(0)
        is_there = self._logs is not None and os.path.isdir(self._logs)  # a temporary folder may be gone by now
        with log_file(self._logs if is_there else None, "fork_servers") as log:
            log.write(self._output.read().decode(errors="replace"))
        self._output.close()


def _descriptors() -> list[int]:
    """Open ones, without standard input and output; the one that they were listed by is closed."""
    return [int(name) for name in os.listdir(_OPEN) if int(name) > 2 and os.path.lexists(f"{_OPEN}/{name}")]


@contextmanager
def _importing(environment: dict[str, str]) -> Iterator[None]:
    """With the environment that libraries read when they are imported; a terminal does not stay empty meanwhile."""
    from titan_rl.config.io.terminal import Terminal

    own = dict(os.environ)
    try:
        with Terminal().status("loading libraries"):  # by a thread, which ends before any fork
            os.environ |= environment
            yield
    finally:
        os.environ.clear()
        os.environ.update(own)


_ahead: list[EarlyServers] = []
"""At most one, until it is taken."""


def can_fork_here() -> bool:
    """What is preloaded (allocators, OpenMP) need not survive a fork of ours."""
    return not os.environ.get("LD_PRELOAD")


def is_alone() -> bool:
    """Whether this thread is the only one whose loss would leave a fork of this process unwhole. numpy's own, as many
    as there are cores with this one, are made for that; a check of a model directory may have loaded it."""
    most = available_cores() if "numpy" in sys.modules else 1
    return threading.active_count() == 1 and len(os.listdir("/proc/self/task")) <= most


@contextmanager
def servers_started_early(config: Config, kinds: Iterable[str] = IMPORTS) -> Iterator[None]:
    """Import what actors of these kinds need into this process, and have their servers as its children.

    Who needs some within takes them over; all end here. Nothing is done where a run of this config would take none, or
    a fork of this process would not be whole.
    """
    mesh = config.mesh
    is_taken = mesh.fork_servers and (mesh.launcher == "local" or not mesh.worker_loops)
    is_whole = can_fork_here() and is_alone() and all(os.path.lexists(f"{_OPEN}/{number}") for number in range(3))
    if not is_taken or FORK_SERVERS in os.environ or not is_whole:
        yield
        return
    ahead = EarlyServers()
    _ahead.append(ahead)
    try:
        ahead.start(list(kinds))
        yield
    finally:
        _ahead.clear()
        ahead.end()


def no_mark() -> dict[str, str]:
    """For servers that are no run's: room for the marks of those whose processes they fork."""
    return {MARK: "0" * 32}

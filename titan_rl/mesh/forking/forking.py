"""The controller's side of fork servers: a run's own, or those that are there for all runs of a machine.

A run's own may be begun ahead of it, so that their imports and the controller's go on side by side: the first run of
this process takes them over.
"""

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from titan_rl.config.sections.schema import Config
from titan_rl.mesh.forking import fork_client
from titan_rl.mesh.processes.logs import log_file
from titan_rl.mesh.processes.processes import MARK, new_mark
from titan_rl.mesh.resources.cores import available_cores, fork_environment
from titan_rl.mesh.resources.imports import IMPORTS
from titan_rl.mesh.resources.scratch import make_scratch

FORK_SERVERS = "TITAN_RL_FORK_SERVERS"
"""Environment variable: the folder of servers that others started, and that outlive a run."""
_MOST_WAITING = 64


class ForkServers:
    """Owns a run's servers, if it has any; they end with the run's marked processes, or when this process does."""

    def __init__(self, folder: Path, environment: dict[str, str], logs: str | None):
        """``environment``: of all that they fork, as far as libraries read it when they are imported."""
        self._folder, self._environment, self._logs = folder, environment, logs
        self._process: subprocess.Popen | None = None
        """Whose standard input is open for as long as this is held: when it is closed, the servers end."""
        self._are_there = False

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

    async def ready(self, kind: str | None) -> None:
        """Wait until the kind's server has imported everything, with a limit."""
        if kind is not None and self._are_there:
            await imports_done(self._folder, kind)

    def command(self, kind: str | None, program: str, arguments: list[str]) -> tuple[str, list[str]]:
        """To start a process by: where there are servers the client, which becomes the program where there is none for
        that kind of actor. It sees to it that the process ends with its parent, which Monarch then does not."""
        if not self._are_there:
            return program, arguments
        return sys.executable, client_arguments(fork_client.__file__, str(self._folder), kind, program, arguments)


def client_arguments(file: str, folder: str, kind: str | None, program: str, arguments: list[str]) -> list[str]:
    """Of a Python that becomes a program of that kind. ``file``, ``folder``: where the client and the servers are."""
    return ["-I", "-S", file, f"{folder}/{kind or 'none'}", program, *arguments]


async def imports_done(folder: Path, kind: str) -> None:
    """Until the server for that kind there has done its imports, or does not exist, or takes too long."""
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking, suppress(OSError, TimeoutError):
        asking.setblocking(False)
        await loop.sock_connect(asking, str(folder / kind))
        await loop.sock_sendall(asking, b"?")  # which asks for no process: the answer is that the server hangs up
        await asyncio.wait_for(loop.sock_recv(asking, 1), fork_client.FORK_SECONDS)


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
    """Fork servers started before their run, with a mark of their own."""

    def __init__(self, kinds: Iterable[str]) -> None:
        """``kinds``: those whose imports begin now."""
        self._folder = make_scratch()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  (``end`` closes it)
        self._logs: str | None = None
        self._process = start(self._folder, fork_environment() | new_mark(), self._output, kinds)

    def move(self, folder: Path, logs: str | None) -> None:
        """Move the servers' sockets into a run's folder."""
        for kind in IMPORTS:
            (self._folder / kind).rename(folder / kind)
        self._folder.rmdir()
        self._logs = logs

    def end(self) -> None:
        """End the servers at once."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._output.seek(0)
        with log_file(self._logs, "fork_servers") as log:
            log.write(self._output.read().decode(errors="replace"))
        self._output.close()


_ahead: list[EarlyServers] = []
"""At most one, until it is taken."""


def can_start_early(config: Config) -> bool:
    """Whether a run of this config is likely to use early servers."""
    mesh = config.mesh
    is_free = FORK_SERVERS not in os.environ and can_fork_here()
    return mesh.fork_servers and is_free and (mesh.launcher == "local" or not mesh.worker_loops)


def imported_ahead(kinds: Iterable[str]) -> list[str]:
    """Kinds whose imports begin ahead of a run: where cores are few, the generators' alone, whose take longest."""
    kinds = list(kinds)
    has_cores = available_cores() > len(kinds)  # one is the controller's
    return kinds if has_cores or "generator" not in kinds else ["generator"]


def can_fork_here() -> bool:
    """What is preloaded (allocators, OpenMP) need not survive a fork of ours."""
    return not os.environ.get("LD_PRELOAD")


@contextmanager
def servers_started_early(kinds: Iterable[str] = IMPORTS) -> Iterator[None]:
    """Servers begin with the imports of these kinds; who needs some within takes them over. All end here."""
    ahead = EarlyServers(kinds)
    _ahead.append(ahead)
    try:
        yield
    finally:
        _ahead.clear()
        ahead.end()


def no_mark() -> dict[str, str]:
    """For servers that are no run's: room for the marks of those whose processes they fork."""
    return {MARK: "0" * 32}

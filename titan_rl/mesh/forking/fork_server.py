"""``python -m titan_rl.mesh.forking.fork_server KINDS KIND=DESCRIPTOR...``: actor processes by fork, imports done.

One server for each kind of actor: each is handed the socket that it listens at, imports what that kind needs once (of
KINDS, separated by commas, at once; of others when it is first asked), and forks for whoever connects (fork_client.py).
What was imported is in memory once, too. A process that it forked lives on when the server dies, and dies with its
client. The servers end when their standard input does.

They are children of this program, or of the controller itself (``serve_in_child``), which then shares its imports.
"""

import ctypes
import fcntl
import gc
import json
import os
import runpy
import select
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from titan_rl.compat.python import run_exit_functions
from titan_rl.mesh.processes.processes import MARK
from titan_rl.mesh.resources.cores import import_environment
from titan_rl.mesh.resources.imports import import_all, import_shared, sees_gpu

_REQUEST_BYTES = 1 << 20
_F_SETSIG = 10
_MALLOC_OPTIONS = {
    "MALLOC_TRIM_THRESHOLD_": -1,
    "MALLOC_TOP_PAD_": -2,
    "MALLOC_MMAP_THRESHOLD_": -3,
    "MALLOC_ARENA_MAX": -8,
}
"""Of mallopt, by the variable that glibc reads for each."""
_MALLOC_MOST = (1 << 31) - 1
_NO_LIMIT = -1
_ENVIRONMENT_START = 47
"""Field of /proc/self/stat, counted from the state."""


@dataclass(frozen=True)
class Request:
    """For a process: ``python ARGUMENTS`` in a folder, with an environment of its own, as its client has them."""

    arguments: list[str]
    environment: dict[str, str]
    folder: str
    cores: list[int]
    niceness: int
    descriptors: list[int]
    """Its standard input, output and error, and a pipe whose end is its own."""


class ForkServer:
    """Owns the processes that it forked, until they end. It must run in the main thread, and no other may do anything.

    Errors of ``run``: OSError of a fork, after which there is no server, and clients start processes themselves.
    """

    def __init__(self, listener: socket.socket):
        self.listener = listener
        self.waiting = select.poll()
        self.processes: dict[int, tuple[int, socket.socket]] = {}
        """By a descriptor of each: its id, and the client that waits for it."""

    def run(self) -> Request | None:
        """Serve until standard input ends (None); in each forked process return its request."""
        for source in (0, self.listener.fileno()):
            self.waiting.register(source, select.POLLIN)
        while True:
            for source, _ in self.waiting.poll():
                if source in self.processes:
                    self._bury(source)
                elif source == 0:
                    return None
                elif (request := self._fork()) is not None:
                    return request

    def _fork(self) -> Request | None:
        """None in the server."""
        client, _ = self.listener.accept()
        request, descriptors, *_ = socket.recv_fds(client, _REQUEST_BYTES, 4, socket.MSG_CMSG_CLOEXEC)
        if len(descriptors) != 4:  # it only asks whether the imports are done, or it died
            return client.close()
        pid = os.fork()
        if pid == 0:
            client.close()
            self._forget()
            return Request(**json.loads(request), descriptors=descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        process = os.pidfd_open(pid)
        self.processes[process] = pid, client
        self.waiting.register(process, select.POLLIN)
        with suppress(OSError):  # the client died, and so will the process
            socket.send_fds(client, [b"1"], [process])
        return None

    def _forget(self) -> None:
        """In a process that was forked: what is the server's."""
        self.listener.close()
        for process, (_, client) in self.processes.items():
            os.close(process)
            client.close()

    def _bury(self, process: int) -> None:
        pid, client = self.processes.pop(process)
        self.waiting.unregister(process)
        os.close(process)
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        with suppress(OSError):  # it died, and the process therefore
            client.send(b"%d" % (code if code >= 0 else 128 - code))
        client.close()


def become(request: Request) -> None:
    """Run the requested program as ``exec`` would, with imports done; return at its end."""
    *standard, pipe = request.descriptors
    _die_with(pipe)
    for number, descriptor in enumerate(standard):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(request.environment)
    with suppress(OSError):  # where the kernel forbids it: the client, with which this one ends, has the mark, too
        _write_mark(request.environment.get(MARK, ""))
    os.chdir(request.folder)
    os.sched_setaffinity(0, request.cores)
    with suppress(PermissionError):  # to be less nice than the server
        os.setpriority(os.PRIO_PROCESS, 0, request.niceness)
    _renew()
    option, module, *arguments = request.arguments
    if option != "-m":
        raise ValueError(f"a fork server runs modules, not {request.arguments}")
    sys.argv, sys.path[0] = [module, *arguments], request.folder
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def leave(code: int) -> NoReturn:
    """Run exit functions and exit: as Python takes its modules apart, triton's binding library prints forty lines
    about what is left over. Nothing is collected: vLLM would, twice, all that was imported, which takes a second."""
    gc.collect = lambda generation=2: 0
    run_exit_functions()
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _die_with(pipe: int) -> None:
    """The kernel kills this process when the pipe's other end is closed, whatever this process does then."""
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([pipe], [], [], 0)[0]:  # it was closed before
        os.kill(os.getpid(), signal.SIGKILL)


def _write_mark(mark: str) -> None:
    """/proc shows the environment that a process began with, and there a run's processes are looked for."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = map(int, fields[_ENVIRONMENT_START : _ENVIRONMENT_START + 2])
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(start)
        place = max(memory.read(end - start).find(f"{MARK}=".encode()), 0)  # the first variable's, where it has none
        memory.seek(start + place)
        memory.write(f"{MARK}={mark}\0".encode()[: end - start])


def _renew() -> None:
    """What libraries took from the server's environment or its randomness."""
    tempfile.tempdir = None
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules and (threads := os.environ.get("OMP_NUM_THREADS")):
        sys.modules["torch"].set_num_threads(int(threads))
    if constants := sys.modules.get("huggingface_hub.constants"):
        vars(constants)["HF_HUB_OFFLINE"] = os.environ.get("HF_HUB_OFFLINE") == "1"


def _set_malloc() -> None:
    """glibc's malloc reads its environment when a process begins by exec, and at no fork."""
    for variable, option in _MALLOC_OPTIONS.items():
        if value := os.environ.get(variable):
            ctypes.CDLL(None).mallopt(option, number if (number := int(value)) <= _MALLOC_MOST else _NO_LIMIT)


def _forks_can_use_gpu() -> bool:
    """Whether CUDA works in a child of this process: not if an import has initialized it here."""
    if (pid := os.fork()) == 0:
        os._exit(ctypes.CDLL("libcuda.so.1").cuInit(0))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def _is_asked(listener: socket.socket) -> bool:
    """Wait for the first client, which stays in the queue; false if standard input ends before it comes."""
    return listener in select.select([0, listener], [], [])[0]


def _serve(listeners: dict[str, socket.socket], at_once: list[str]) -> Request | None:
    """As ``ForkServer.run``, for each kind in a process of its own. ``at_once``: kinds that wait for no client."""
    import_shared()
    for kind in listeners:
        if os.fork() == 0:
            for other in set(listeners) - {kind}:
                listeners[other].close()
            return _serve_kind(kind, listeners[kind], kind in at_once)
        listeners[kind].close()  # or clients of a server that has ended would wait
    os.read(0, 1)
    return None


def _serve_kind(kind: str, listener: socket.socket, is_at_once: bool) -> Request | None:
    """As ``ForkServer.run``. ``is_at_once``: import what it needs now, and not when the first client asks."""
    if not is_at_once and not _is_asked(listener):
        return None
    os.environ |= import_environment(kind, on_cpu=not sees_gpu())
    _set_malloc()
    import_all(kind)
    if sees_gpu() and not _forks_can_use_gpu():
        sys.stderr.write(f"{kind}: an import initialized CUDA, so its processes are started, not forked\n")
        return None
    gc.freeze()  # a collection in a process that was forked would copy what it only looks at
    return ForkServer(listener).run()


def _remove(listener: socket.socket) -> None:
    """Remove a socket's file, and its folder with the last one, unless a run has taken them over."""
    path = Path(listener.getsockname())
    with suppress(OSError):
        path.unlink()
        path.parent.rmdir()


def _run(serve: Callable[[], Request | None]) -> NoReturn:
    """The whole life of a server, and of each process that it forks."""
    os.umask(0o077)
    for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    request = serve()
    if request is None:
        os._exit(0)  # exit handlers of libraries are for processes that used them
    try:
        become(request)
    except SystemExit as ended:
        leave(ended.code if isinstance(ended.code, int) else int(ended.code is not None))
    leave(0)


def serve_in_child(
    kind: str,
    listener: socket.socket,
    is_at_once: bool,
    environment: dict[str, str],
    standard: tuple[int, int],
    others: Iterable[int],
) -> int:
    """Fork a server from this process, which must have no other thread; its id.

    ``environment`` is added to this process's own. ``standard``: descriptors of its input, with whose end it ends, and
    of its output. ``others``: descriptors that are not its own.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return pid
    try:
        os.setsid()
        given, output = standard
        for number, descriptor in enumerate((given, output, output)):
            os.dup2(descriptor, number)
        for descriptor in others:
            os.close(descriptor)
        os.environ |= environment
        _run(lambda: _serve_kind(kind, listener, is_at_once) or _remove(listener))
    except BaseException:
        traceback.print_exc()
    leave(1)


if __name__ == "__main__":
    kinds = (argument.split("=") for argument in sys.argv[2:])
    listeners = {kind: socket.socket(fileno=int(number)) for kind, number in kinds}
    _run(lambda: _serve(listeners, sys.argv[1].split(",")))

"""Workspaces in boxes of this machine: one process behind walls makes them, each a process of its own.

    WorkspaceServer ──▶ bubblewrap: inside/workspaces.py ──fork──▶ a workspace ──fork──▶ a command

A workspace's files are inside alone; a fork of one goes on where it is.
"""

import asyncio
import itertools
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

from titan_rl.config.load import ConfigError
from titan_rl.environments.interfaces.server_address import run_in_thread
from titan_rl.environments.sandbox.box_process import BoxProcess
from titan_rl.environments.sandbox.bubblewrap import box_command, mounted, python_folder
from titan_rl.environments.sandbox.groups import Group, new_group
from titan_rl.environments.sandbox.program import SandboxFailed
from titan_rl.environments.sandbox.seccomp import workspace_filter
from titan_rl.environments.sandbox.workspace.command import LIMITS, Command, CommandResult, WorkspaceLimits
from titan_rl.environments.sandbox.workspace.command_run import read_report, run_command
from titan_rl.environments.sandbox.workspace.images import Image, image_of_files, image_store
from titan_rl.mesh.resources.cores import available_cores

T = TypeVar("T")
_START_SECONDS = 20.0
_PROGRAMS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_STANDARD = {"/dev/fd": "", "/dev/stdin": "/0", "/dev/stdout": "/1", "/dev/stderr": "/2"}
_IMAGES, _EMPTY, _FOLDERS = "/images", "/empty", "/w"
_PYTHON = str(python_folder())
_COMMANDS_OF_A_CORE = 4
_MEND = (
    "apt-get install bubblewrap libseccomp2, let users make namespaces (sysctl kernel.unprivileged_userns_clone=1), "
    "and have Linux 6.6 or later, whose overlays users may lay over memory"
)
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class WorkspaceServer:
    """Owner of the process that makes workspaces, started with the first one, and again when it is gone."""

    def __init__(self, shown: Mapping[str, Path] | None = None):
        """``shown``: the host's folders that every workspace of the host's programs has, by where it has them."""
        self._shown = dict(shown or {})
        self._threads = ThreadPoolExecutor(_COMMANDS_OF_A_CORE * available_cores(), "workspaces")
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._process: BoxProcess | None = None

    async def open(self, image: Image, limits: WorkspaceLimits = LIMITS, port: int | None = None) -> "BoxWorkspace":
        """Open a workspace. ``port``: of its loopback, at which it listens for the host. Errors: SandboxFailed."""
        return await self.opened(partial(self._open, image, limits, port, None))

    async def opened(self, begin: Callable[[], "BoxWorkspace"]) -> "BoxWorkspace":
        """What a function opens, in a thread; it is closed again if nobody waits for it any more."""
        opening = asyncio.get_running_loop().run_in_executor(self._threads, begin)
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_unwanted)
            raise

    def begin(self, work: Callable[[], None]) -> None:
        """Begin what blocks, in a thread."""
        with suppress(RuntimeError):  # the server is closed, and all with it
            self._threads.submit(work)

    async def do(self, work: Callable[[], T]) -> T:
        """Result of what blocks, in a thread, where it goes on if the caller is cancelled."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _open(self, image: Image, limits: WorkspaceLimits, port: int | None, above: "_Above | None") -> "BoxWorkspace":
        number = next(self._numbers)
        request = {
            "number": number,
            "parent": above and above.number,
            "above": above and above.place,
            "layers": above.layers if above else [f"{_IMAGES}/{image.digest}"],
            "folder": above and above.folder,
            "folder_layers": above.folder_layers if above else [],
            "programs": [*(_programs() if image.uses_host_programs else []), *self._shown],
            "disk": limits.disk,
            "files": limits.files,
            "processes": limits.processes,
            "port": port,
        }
        with self._lock:
            control, process = self._request(request)
        group: Group | None = None
        try:
            try:
                group = _group_of(process)
            except OSError as error:
                raise SandboxFailed(f"no control group for a workspace: {error}") from error
            control.settimeout(_START_SECONDS)
            listener = _ready(control)
        except BaseException:
            control.close()
            if group is not None:
                group.close()
            raise
        finally:
            os.close(process)
        return BoxWorkspace(self, number, image, limits, control, group, listener)

    def fork_of(self, workspace: "BoxWorkspace", above: "_Above", port: int | None) -> "BoxWorkspace":
        """Workspace above another one's layers. Blocks. Errors: SandboxFailed."""
        return self._open(workspace.image, workspace.limits, port, above)

    def _request(self, request: dict) -> tuple[socket.socket, int]:
        """A new workspace's socket, and a descriptor of its process."""
        if self._process is None or self._process.has_ended:
            if request["parent"] is not None:
                raise SandboxFailed("the server of a workspace has ended")
            self._end()
            self._process = BoxProcess(self._command, workspace_filter())
        try:
            self._process.control.send(json.dumps(request).encode())
            message, numbers, _, _ = socket.recv_fds(self._process.control, 4096, 2)
        except OSError as error:
            self._end()
            raise SandboxFailed(f"the server of workspaces does not answer: {error}") from error
        if message.startswith(b"{"):
            raise SandboxFailed(f"no other workspace: {json.loads(message)['error']}")
        if message != b"forked" or len(numbers) != 2:
            self._end()
            raise SandboxFailed("the server of workspaces died")
        return socket.socket(fileno=numbers[0]), numbers[1]

    def _command(self, control: int, seccomp: int) -> list[str]:
        return box_command("workspaces.py", control, seccomp, self._folders())

    def _folders(self) -> list[str]:
        """Flags for what the process sees. It mounts what shows processes, which takes one that is whole."""
        return [
            *(flag for place in _PROGRAMS for flag in mounted(Path(place))),
            *(flag for place, folder in self._shown.items() for flag in ("--ro-bind", str(folder), place)),
            *("--ro-bind", str(image_store()), _IMAGES),
            *("--perms", "0755", "--dir", _EMPTY, "--bind", "/proc", "/host/proc"),
            *("--perms", "0777", "--tmpfs", _FOLDERS),
            *(flag for place, number in _STANDARD.items() for flag in ("--symlink", f"/proc/self/fd{number}", place)),
        ]

    def _end(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None

    async def close(self) -> None:
        """End all workspaces."""
        if self._process is not None:
            self._process.kill()  # what runs on ends with it, and its thread
        await asyncio.to_thread(self._threads.shutdown)
        self._end()


@dataclass(frozen=True)
class _Above:
    """Where a fork begins."""

    number: int
    place: str | None
    """Where its file system is mounted still."""
    layers: list[str]
    folder: str | None = None
    """That is as it is in other layers."""
    folder_layers: list[str] = field(default_factory=list)


class BoxWorkspace:
    """Workspace of the server. One caller at a time."""

    def __init__(
        self,
        server: WorkspaceServer,
        number: int,
        image: Image,
        limits: WorkspaceLimits,
        control: socket.socket,
        group: Group | None,
        listener: socket.socket | None,
    ):
        self._server, self._number, self._control, self._group = server, number, control, group
        self.image, self.limits = image, limits
        self.listener = listener
        """Of its loopback, closed with it."""
        self._lock = threading.Lock()
        self._is_closed = self._is_over = False

    @property
    def folder(self) -> str:
        return self.image.folder

    async def run(self, command: Command) -> CommandResult:
        """Run a command to its end. Errors: SandboxFailed, by whose fault the workspace is closed; ValueError."""
        return await self._server.do(partial(self._run, command))

    def _run(self, command: Command) -> CommandResult:
        image = self.image
        environment, folder = _environment(image) | command.environment, command.folder or image.folder
        complete = replace(command, environment=environment, folder=folder)
        with self._used():
            return run_command(self._control, image.shell, complete, self.limits, self._group)

    @contextmanager
    def _used(self) -> Iterator[None]:
        """One use of the workspace's process at a time. Errors: SandboxFailed, by which it is closed."""
        with self._lock:
            if self._is_closed or self._is_over:
                raise SandboxFailed("the workspace was closed")
            try:
                yield
            except (OSError, SandboxFailed) as error:
                self._end()
                raise SandboxFailed(str(error)) from error

    async def fork(self, port: int | None = None) -> "BoxWorkspace":
        """Workspace that begins with all that is in this one; which may be closed before it. Errors: SandboxFailed."""
        return await self._server.opened(partial(self._fork, port, only_folder=False))

    async def fork_folder(self) -> "BoxWorkspace":
        """Workspace that begins as this one did, but for the image's folder, which is as it is here now.

        This one takes no command any more. Errors: SandboxFailed."""
        return await self._server.opened(partial(self._fork, None, only_folder=True))

    def _fork(self, port: int | None, *, only_folder: bool) -> "BoxWorkspace":
        with self._used():
            self._control.send(json.dumps({"fork": "last" if only_folder else "one of several"}).encode())
            report = read_report(self._control)
            self._is_over = only_folder
        layers = report["layers"]
        if only_folder:
            above = _Above(self._number, None, report["began_with"], self.image.folder, layers)
        else:
            above = _Above(self._number, report["above"], layers)
        return self._server.fork_of(self, above, port)

    async def close(self) -> None:
        """End it, with all that is in it, also a command that runs."""
        self._hang_up()
        await self._server.do(self._close)

    def end_soon(self) -> None:
        """Close it, without waiting for that."""
        self._hang_up()
        self._server.begin(self._close)

    def _hang_up(self) -> None:
        """What runs in it ends at once, also where all threads wait for others' commands."""
        with suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)

    def _close(self) -> None:
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._control.close()
        if self.listener is not None:
            self.listener.close()
        if self._group is not None:
            self._group.close()


def _close_unwanted(opening: "asyncio.Future[BoxWorkspace]") -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().end_soon()


def _programs() -> list[str]:
    """Folders of the host's programs that are none by a link."""
    folders = [Path(place) for place in _PROGRAMS]
    return sorted({str(folder) for folder in folders if folder.is_dir() and not folder.is_symlink()} | {_PYTHON})


def _environment(image: Image) -> dict[str, str]:
    path = f"{_PYTHON}/bin:{_PATH}" if image.uses_host_programs else _PATH
    own = {"PATH": path, "HOME": "/root", "USER": "root", "LANG": "C.UTF-8", "TAR_OPTIONS": "--no-same-owner"}
    if image.uses_host_programs and _PYTHON != "/usr":
        own["LD_LIBRARY_PATH"] = f"{_PYTHON}/lib"
    return own | image.environment


def _ready(control: socket.socket) -> socket.socket | None:
    """A workspace's listener, once it is ready. Errors: SandboxFailed."""
    try:
        message, numbers, _, _ = socket.recv_fds(control, 4096, 1)
    except OSError as error:
        raise SandboxFailed(f"a workspace did not begin: {error}") from error
    listener = socket.socket(fileno=numbers[0]) if numbers else None
    if message != b"{}":
        why = json.loads(message).get("error", "") if message else "it died"
        raise SandboxFailed(f"a workspace did not begin: {why[:300]}")
    return listener


def _group_of(process: int) -> Group | None:
    """Control group of a workspace's process. Errors: OSError."""
    group = new_group()
    if group is not None:
        with open(f"/proc/self/fdinfo/{process}") as file:
            pid = next(int(line.split()[1]) for line in file if line.startswith("Pid:"))
        group.take(pid)
    return group


@cache
def check_workspaces() -> None:
    """Check that workspaces can be had here. Errors: ConfigError with the mend."""

    async def check() -> None:
        server = WorkspaceServer()
        try:
            workspace = await server.open(image_of_files({"a/b": b"1"}))
            result = await workspace.run(Command("rm -r a && mkdir a && touch a/c && ls a", seconds=_START_SECONDS))
            if result.output != "c\n":
                raise SandboxFailed(result.output.strip()[:300] or result.ending)
        finally:
            await server.close()

    try:
        run_in_thread(check())
    except SandboxFailed as error:
        raise ConfigError(f"an agent's commands cannot be run safely here: {error}; {_MEND}") from None

"""Workspaces as containers of podman or docker, on this machine or at a URL.

    run -i     a container of an image, without network; it ends when its standard input does, as when this process dies
    exec       a command; what it leaves running is killed behind it
    commit     an image of what is in a container, from which forks begin; removed with the last of them
    cp         a folder of one container into another, by the engine and not by what is in either

Walls are the engine's own, which share more of the kernel with a command than a box does (server.py), and disk is not
bounded. Images must be there already: nothing is fetched.
"""

import asyncio
import re
import subprocess
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from time import monotonic
from typing import Literal
from uuid import uuid4

from titan_rl.config.load import ConfigError
from titan_rl.environments.sandbox.program import SandboxFailed
from titan_rl.environments.sandbox.workspace.command import (
    Command,
    CommandResult,
    Ending,
    WorkspaceLimits,
    WorkspaceSpoiled,
)
from titan_rl.environments.sandbox.workspace.command_run import BoundedOutput, check_line

_LABEL = "titan_rl"
"""Of images that forks begin from: ``podman image prune --filter label=titan_rl`` removes those of a killed process."""
_LIVE = "while read -r line; do :; done"
_FIRST = f"if command -v bash; then exec bash -c '{_LIVE}'; fi; command -v sh; {_LIVE}"
"""First process of a container: tells its shell, and lives until its standard input ends. (bash buries orphans.)"""
_ALONE = '"$0" -c "$1"; code=$?; kill -9 -1 2>/dev/null; exit $code'
"""Runs ``$1`` by the shell ``$0``, and ends what it has left."""
_NAME = re.compile(
    r"(?!(docker|docker-archive|docker-daemon|oci|oci-archive|dir|containers-storage):)[A-Za-z0-9][\w./:@-]*"
)
"""Of an image that is in the engine's store: no option, and no archive to be opened on the host."""
_ENGINES_OWN = 32
"""Processes in a container beside those that commands may have."""
_START_SECONDS, _END_SECONDS, _COPY_SECONDS = 60.0, 10.0, 300.0
_KILLED = 137
_OF_ENGINE = (125, 126, 127, 255)
"""Exit codes that the engine has too, where it cannot run a command."""
_PIECE = 1 << 16
_AT_ONCE = 100
"""Images that are looked for by one command."""
_NONE, _PIPE = asyncio.subprocess.DEVNULL, asyncio.subprocess.PIPE
_SECTION = "task.options.container"


@dataclass(kw_only=True)
class ContainerOptions:
    """``[task.options.container]``"""

    program: Literal["podman", "docker"] = "podman"
    url: str = ""
    """Of an engine elsewhere, such as ``ssh://user@host``; empty: this machine's."""

    @property
    def command(self) -> list[str]:
        at = {"podman": ["--remote", "--url", self.url], "docker": ["--host", self.url]}
        return [self.program, *(at[self.program] if self.url else [])]


class ContainerEngine:
    """Owner of the containers and images that it has made."""

    def __init__(self, options: ContainerOptions):
        """Errors: ConfigError for a program that is not there, or whose engine does not answer."""
        self.program, self._command = options.program, options.command
        self._ask_now("info", why="does not answer")
        self._open: set[ContainerWorkspace] = set()
        self._num_users: Counter[str] = Counter()
        """Of images that were made for forks: whose they are, and what began with them."""

    def _ask_now(self, *arguments: str, why: str) -> None:
        """Errors: ConfigError where the engine refuses."""
        try:
            asked = subprocess.run([*self._command, *arguments], capture_output=True, timeout=_START_SECONDS)
        except (FileNotFoundError, PermissionError):
            raise ConfigError(f"{_SECTION}: there is no {self.program} here: install it, or leave it out") from None
        except subprocess.TimeoutExpired:
            raise ConfigError(f"{_SECTION}: {self.program} did not answer in {_START_SECONDS:g} s") from None
        if asked.returncode:
            raise ConfigError(f"{_SECTION}: {self.program} {why}: {_shown(asked.stderr)}")

    def check_images(self, images: Iterable[str]) -> None:
        """Errors: ConfigError for one that is not in the engine's store, or is no name."""
        distinct = sorted(set(images))
        if wrong := next((image for image in distinct if not _NAME.fullmatch(image)), None):
            raise ConfigError(f"{_SECTION}: {wrong!r:.100} is no name of an image that the engine has")
        for start in range(0, len(distinct), _AT_ONCE):
            names = distinct[start : start + _AT_ONCE]
            self._ask_now("image", "inspect", "--format={{.Id}}", *names, why="lacks an image: pull or load it there")

    async def open(self, image: str, folder: str, limits: WorkspaceLimits) -> "ContainerWorkspace":
        """Workspace of an image. ``folder``: in which commands run; empty: the image's own.

        Errors: SandboxFailed; ConfigError for a folder that is not there."""
        name = f"titan_rl-{uuid4().hex}"
        process = await asyncio.create_subprocess_exec(
            *self._command,
            *("run", "--rm", "-i", "--pull=never", f"--name={name}", "--network=none", "--hostname=workspace"),
            *("--security-opt=no-new-privileges", "--log-driver=none", f"--memory={limits.memory}"),
            *(f"--pids-limit={limits.processes + _ENGINES_OWN}", "--entrypoint=sh", image, "-c", _FIRST),
            stdin=_PIPE,
            stdout=_PIPE,
            stderr=_PIPE,
            start_new_session=True,
        )
        workspace = ContainerWorkspace(self, name, image, folder, limits, process)
        self._open.add(workspace)
        if image in self._num_users:
            self._num_users[image] += 1
        try:
            await workspace.begin()
        except BaseException:  # nobody has it to close it
            await workspace.close()
            raise
        return workspace

    async def commit(self, name: str) -> str:
        """Image of what is in a container, with one user. Errors: SandboxFailed."""
        told = await self.ask("commit", "--pause=false", f"--change=LABEL {_LABEL}=", name, seconds=_COPY_SECONDS)
        image = told.splitlines()[-1]
        self._num_users[image] += 1
        return image

    async def release(self, image: str) -> None:
        """Discount a user of an image that was made for forks; without any it is removed."""
        if image in self._num_users:
            self._num_users[image] -= 1
            if not self._num_users[image]:
                del self._num_users[image]
                with suppress(SandboxFailed):
                    await self.ask("rmi", "-f", image)

    async def forget(self, workspace: "ContainerWorkspace", image: str) -> None:
        """A workspace that began with an image has ended."""
        self._open.discard(workspace)
        await self.release(image)

    async def close(self) -> None:
        """End all containers; with them the images that were made for forks are removed."""
        await asyncio.gather(*(workspace.close() for workspace in list(self._open)))

    async def ask(self, *arguments: str, seconds: float = _START_SECONDS) -> str:
        """Output of a command of the engine's. Errors: SandboxFailed."""
        async with self.started(*arguments) as process:
            try:
                output, error = await asyncio.wait_for(process.communicate(), seconds)
            except TimeoutError:
                raise SandboxFailed(f"{self.program} {arguments[0]} did not answer in {seconds:g} s") from None
        if process.returncode:
            raise SandboxFailed(f"{self.program} {arguments[0]}: {_shown(error or output)}")
        return output.decode(errors="replace").strip()

    @asynccontextmanager
    async def started(
        self, *arguments: str, stdin: int = _NONE, stdout: int = _PIPE, stderr: int = _PIPE
    ) -> AsyncIterator[asyncio.subprocess.Process]:
        """Process of the engine's command, which is killed at the end."""
        process = await asyncio.create_subprocess_exec(
            *self._command, *arguments, stdin=stdin, stdout=stdout, stderr=stderr
        )
        try:
            yield process
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
                await asyncio.gather(*map(_drop, filter(None, [process.stdout, process.stderr])))
                await process.wait()


class ContainerWorkspace:
    """Workspace in a container. One caller at a time."""

    def __init__(
        self,
        engine: ContainerEngine,
        name: str,
        image: str,
        folder: str,
        limits: WorkspaceLimits,
        process: asyncio.subprocess.Process,
    ):
        self.name, self.folder = name, folder
        self._engine, self._image, self._limits = engine, image, limits
        self._process, self._shell = process, "sh"
        self._committed: str | None = None
        """Image of what is in it now."""
        self._committing, self._closing, self._is_closed = asyncio.Lock(), asyncio.Lock(), False
        self._words = bytearray()
        """What the engine said last."""
        self._reading = [asyncio.ensure_future(self._keep_words())]
        """Of what comes beside commands, so that no pipe fills up."""

    async def _keep_words(self) -> None:
        assert self._process.stderr is not None
        while part := await self._process.stderr.read(_PIECE):
            self._words = (self._words + part)[-_PIECE:]

    async def begin(self) -> None:
        """Wait until commands can run. Errors: as ``ContainerEngine.open``."""
        assert self._process.stdout is not None
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), _START_SECONDS)
        except (TimeoutError, ValueError):
            raise SandboxFailed(f"a container of {self._image!r} did not begin in {_START_SECONDS:g} s") from None
        finally:
            self._reading.append(asyncio.ensure_future(_drop(self._process.stdout)))
        if not line:
            await asyncio.wait(self._reading, timeout=_END_SECONDS)
            raise SandboxFailed(f"no container of {self._image!r}: {_shown(bytes(self._words))}")
        self._shell = line.decode(errors="replace").strip() or "sh"
        if not self.folder:
            self.folder = await self._engine.ask("inspect", "--format={{.Config.WorkingDir}}", self.name) or "/"
        try:
            await self._engine.ask("exec", "--workdir=/", self.name, self._shell, "-c", 'test -d "$0"', self.folder)
        except SandboxFailed as error:
            raise ConfigError(
                f"the image {self._image!r} has no folder {self.folder!r}, or no shell: {error}"
            ) from None

    async def run(self, command: Command) -> CommandResult:
        """Run a command to its end; the workspace ends with one that is cancelled. Errors: WorkspaceSpoiled where it
        left no room for others; SandboxFailed; ValueError for a line that no shell can be given."""
        check_line(command.line)
        if self._is_closed:
            raise SandboxFailed("the workspace was closed")
        await self._forget_commit()
        begun, seconds = monotonic(), command.seconds or self._limits.seconds
        output = BoundedOutput(command.output or self._limits.output)
        variables = [f"--env={name}={value}" for name, value in command.environment.items()]
        place = ("exec", "-i", f"--workdir={command.folder or self.folder}", *variables, self.name)
        line = (self._shell, "-c", _ALONE, self._shell, command.line)
        code, is_late = _KILLED, False
        try:
            async with self._engine.started(*place, *line, stdin=_PIPE, stderr=asyncio.subprocess.STDOUT) as process:
                async with asyncio.timeout(seconds):
                    await asyncio.gather(_send(process, command.stdin), _read(process, output))
                    code = await process.wait()
        except TimeoutError:
            is_late = True
        except BaseException:  # it may be beginning still
            await self.close()
            raise
        if code == _KILLED:
            await self._end_commands()
        if code in _OF_ENGINE:
            await self._close_if_broken()
        ending: Ending = "timeout" if is_late else "error" if code else "ok"
        return CommandResult(ending, code, output.kept(), output.num_dropped, monotonic() - begun)

    async def _end_commands(self) -> None:
        """End what runs in it, which had no time to do that itself. Errors: as ``_close_if_broken``."""
        try:
            twice = "kill -9 -1; sleep 0.3; kill -9 -1"  # it may have been beginning still
            await self._engine.ask("exec", "--workdir=/", self.name, self._shell, "-c", twice, seconds=_END_SECONDS)
        except SandboxFailed:
            await self._close_if_broken()

    async def _close_if_broken(self) -> None:
        """Close it if no command runs in it any more. Errors: WorkspaceSpoiled; SandboxFailed of the engine."""
        try:
            await self._engine.ask("exec", "--workdir=/", self.name, self._shell, "-c", ":", seconds=_END_SECONDS)
        except SandboxFailed:
            await self.close()
            await self._engine.ask("info")
            raise WorkspaceSpoiled("no command runs in the container any more") from None

    async def fork(self, port: int | None = None) -> "ContainerWorkspace":
        """Workspace that begins with all that is in this one. Errors: SandboxFailed."""
        assert port is None, "containers have no network"
        async with self._committing:
            if self._committed is None:
                self._committed = await self._engine.commit(self.name)
            return await self._engine.open(self._committed, self.folder, self._limits)

    async def _forget_commit(self) -> None:
        if self._committed is not None:
            image, self._committed = self._committed, None
            await self._engine.release(image)

    async def fork_folder(self) -> "ContainerWorkspace":
        """Workspace that begins as this one did, but for the folder in which commands run; empty, if it is gone.

        Errors: SandboxFailed; WorkspaceSpoiled for a folder that is larger than a workspace's disk."""
        other = await self._engine.open(self._image, self.folder, self._limits)
        try:
            emptied = await other.run(Command('rm -rf "$PWD"/* "$PWD"/.[!.]* "$PWD"/..?*', folder=self.folder))
            if emptied.ending != "ok":
                raise SandboxFailed(f"the folder {self.folder} could not be emptied: {_shown(emptied.raw_output)}")
            async with asyncio.timeout(_COPY_SECONDS):
                await self._copy_folder(other)
        except TimeoutError:
            await other.close()
            raise WorkspaceSpoiled(f"the folder {self.folder} was not copied in {_COPY_SECONDS:g} s") from None
        except BaseException:  # nobody has it to close it
            await other.close()
            raise
        return other

    async def _copy_folder(self, other: "ContainerWorkspace") -> None:
        source, target = ("cp", f"{self.name}:{self.folder}/.", "-"), ("cp", "-", f"{other.name}:{self.folder}")
        num_bytes = 0
        async with self._engine.started(*source) as giver, self._engine.started(*target, stdin=_PIPE) as taker:
            assert giver.stdout is not None and taker.stdin is not None
            with suppress(BrokenPipeError, ConnectionResetError):
                while part := await giver.stdout.read(_PIECE):
                    num_bytes += len(part)
                    if num_bytes > self._limits.disk:
                        raise WorkspaceSpoiled(f"the folder {self.folder} is larger than {self._limits.disk >> 20} MiB")
                    taker.stdin.write(part)
                    await taker.stdin.drain()
            taker.stdin.close()
            _, taken = await taker.communicate()
            await giver.communicate()
        if taker.returncode and num_bytes:
            raise SandboxFailed(f"the folder {self.folder} was not copied: {_shown(taken)}")

    async def close(self) -> None:
        """End it, with all that is in it."""
        await asyncio.shield(self._close())

    async def _close(self) -> None:
        async with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                await asyncio.wait_for(asyncio.shield(self._process.wait()), _END_SECONDS)
            except TimeoutError:
                with suppress(SandboxFailed):
                    await self._engine.ask("rm", "-f", self.name)
                with suppress(ProcessLookupError):
                    self._process.kill()
                await self._process.wait()
            await self._forget_commit()
            await self._engine.forget(self, self._image)


async def _send(process: asyncio.subprocess.Process, stdin: bytes) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError, ConnectionResetError):
        process.stdin.write(stdin)
        await process.stdin.drain()
    process.stdin.close()


async def _read(process: asyncio.subprocess.Process, output: BoundedOutput) -> None:
    assert process.stdout is not None
    while part := await process.stdout.read(_PIECE):
        output.add(part)


async def _drop(stream: asyncio.StreamReader) -> None:
    """Read a stream to its end, for nothing: a process is waited for until its pipes are closed."""
    while await stream.read(_PIECE):
        pass


def _shown(output: bytes) -> str:
    """What an engine says, for a message: the line of its error, where there is one."""
    lines = [line.strip() for line in output.decode(errors="replace").splitlines() if line.strip()]
    return next((line for line in lines if "rror" in line), lines[-1] if lines else "no word")[:300]

"""Workspaces as containers of podman or docker, on this machine or at a URL.

    run -i     a container of an image, without network; it ends when its standard input does, as when this process dies
    exec       a command; what it leaves running is killed behind it
    commit     an image of what is in a container, from which forks begin; removed with the engine's owner
    cp         a folder of one container into another, by the engine and not by what is in either

Walls are the engine's own, which share more of the kernel with a command than a box does (server.py), and disk is not
bounded. Images must be there already: nothing is fetched.
"""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from time import monotonic
from typing import Literal
from uuid import uuid4

from titan_rl.config.load import ConfigError
from titan_rl.environments.sandbox.program import SandboxFailed
from titan_rl.environments.sandbox.workspace.command import Command, CommandResult, Ending, WorkspaceLimits
from titan_rl.environments.sandbox.workspace.command_run import BoundedOutput, check_line

_LABEL = "titan_rl"
"""Of images that forks begin from: ``podman image prune --filter label=titan_rl`` removes those of a killed process."""
_LIVE = "while read -r line; do :; done"
_FIRST = f"if command -v bash; then exec bash -c '{_LIVE}'; fi; command -v sh; {_LIVE}"
"""First process of a container: tells its shell, and lives until its standard input ends. (bash buries orphans.)"""
_ALONE = '"$0" -c "$1"; code=$?; kill -9 -1 2>/dev/null; exit $code'
"""Runs ``$1`` by the shell ``$0``, and ends what it has left."""
_START_SECONDS, _END_SECONDS, _COPY_SECONDS = 60.0, 10.0, 300.0
_KILLED = 137
_PIECE = 1 << 16
_NONE, _PIPE = asyncio.subprocess.DEVNULL, asyncio.subprocess.PIPE


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
        """Errors: ConfigError for a program that is not there."""
        if shutil.which(options.program) is None:
            raise ConfigError(
                f"task.options.container: there is no {options.program} here: install it, or leave it out"
            )
        self.program, self._command = options.program, options.command
        self._open: set[ContainerWorkspace] = set()
        self._images: list[str] = []

    async def open(self, image: str, folder: str, limits: WorkspaceLimits) -> "ContainerWorkspace":
        """Workspace of an image. ``folder``: in which commands run; empty: the image's own.

        Errors: SandboxFailed; ConfigError for an image that is not there, or whose folder is unknown."""
        name = f"titan_rl-{uuid4().hex}"
        process = await asyncio.create_subprocess_exec(
            *self._command,
            *("run", "--rm", "-i", "--pull=never", f"--name={name}", "--network=none", "--hostname=workspace"),
            *("--security-opt=no-new-privileges", f"--pids-limit={limits.processes}", f"--memory={limits.memory}"),
            *("--entrypoint=sh", image, "-c", _FIRST),
            stdin=_PIPE,
            stdout=_PIPE,
            stderr=_PIPE,
            start_new_session=True,
        )
        workspace = ContainerWorkspace(self, name, image, folder, limits, process)
        self._open.add(workspace)
        try:
            await workspace.begin()
        except BaseException:
            await asyncio.shield(workspace.close())
            raise
        return workspace

    def forget(self, workspace: "ContainerWorkspace") -> None:
        self._open.discard(workspace)

    async def ask(self, *arguments: str, seconds: float = _START_SECONDS) -> str:
        """Output of a command of the engine's. Errors: SandboxFailed."""
        async with self.started(*arguments) as process:
            try:
                output, error = await asyncio.wait_for(process.communicate(), seconds)
            except TimeoutError:
                raise SandboxFailed(f"{self.program} {arguments[0]} did not answer in {seconds:g} s") from None
        if process.returncode:
            raise SandboxFailed(f"{self.program} {arguments[0]}: {_last(error or output)}")
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
                await process.wait()

    async def commit(self, name: str) -> str:
        """Image of what is in a container. Errors: SandboxFailed."""
        image = await self.ask("commit", "--pause=false", f"--change=LABEL {_LABEL}=", name, seconds=_COPY_SECONDS)
        self._images.append(image.splitlines()[-1])
        return self._images[-1]

    async def close(self) -> None:
        """End all containers, and remove what was made for forks."""
        await asyncio.gather(*(workspace.close() for workspace in list(self._open)))
        if self._images:
            with suppress(SandboxFailed):
                await self.ask("rmi", "-f", *self._images)


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
        self._engine, self.name, self._image, self.folder, self._limits = engine, name, image, folder, limits
        self._process, self._shell = process, "sh"
        self._committed: str | None = None
        """Image of what is in it now."""

    async def begin(self) -> None:
        """Wait until commands can run. Errors: as ``ContainerEngine.open``."""
        assert self._process.stdout is not None and self._process.stderr is not None
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), _START_SECONDS)
        except TimeoutError:
            raise SandboxFailed(f"a container of {self._image!r} did not begin in {_START_SECONDS:g} s") from None
        if not line:
            why = _last(await self._process.stderr.read(_PIECE))
            if "not known" in why or "No such image" in why or "not found locally" in why.lower():
                raise ConfigError(f"{self._engine.program} has no image {self._image!r}: pull or load it there ({why})")
            raise SandboxFailed(f"no container of {self._image!r}: {why}")
        self._shell = line.decode(errors="replace").strip() or "sh"
        if not self.folder:
            self.folder = await self._engine.ask("inspect", "--format={{.Config.WorkingDir}}", self.name) or "/"

    async def run(self, command: Command) -> CommandResult:
        """Run a command to its end. Errors: SandboxFailed; ValueError for a line that no shell can be given."""
        check_line(command.line)
        self._committed = None
        begun, seconds = monotonic(), command.seconds or self._limits.seconds
        output = BoundedOutput(command.output or self._limits.output)
        variables = [f"--env={name}={value}" for name, value in command.environment.items()]
        place = ("exec", "-i", f"--workdir={command.folder or self.folder}", *variables, self.name)
        line = (self._shell, "-c", _ALONE, self._shell, command.line)
        async with self._engine.started(*place, *line, stdin=_PIPE, stderr=asyncio.subprocess.STDOUT) as process:
            try:
                await asyncio.wait_for(asyncio.gather(_send(process, command.stdin), _read(process, output)), seconds)
                code = await asyncio.wait_for(process.wait(), _END_SECONDS)
                is_late = False
            except TimeoutError:
                code, is_late = _KILLED, True
        if is_late:
            await self._engine.ask("exec", self.name, "sh", "-c", "kill -9 -1", seconds=_END_SECONDS)
        if self._process.returncode is not None:
            raise SandboxFailed(f"the container of {self._image!r} has ended")
        ending: Ending = "timeout" if is_late else "error" if code else "ok"
        return CommandResult(ending, code, output.kept(), output.num_dropped, monotonic() - begun)

    async def fork(self, port: int | None = None) -> "ContainerWorkspace":
        """Workspace that begins with all that is in this one. Errors: SandboxFailed."""
        assert port is None, "containers have no network"
        if self._committed is None:
            self._committed = await self._engine.commit(self.name)
        return await self._engine.open(self._committed, self.folder, self._limits)

    async def fork_folder(self) -> "ContainerWorkspace":
        """Workspace that begins as this one did, but for the folder in which commands run. Errors: SandboxFailed."""
        other = await self._engine.open(self._image, self.folder, self._limits)
        try:
            emptied = await other.run(Command('rm -rf "$PWD"/* "$PWD"/.[!.]* "$PWD"/..?*', folder=self.folder))
            if emptied.ending != "ok":
                raise SandboxFailed(f"the folder {self.folder} could not be emptied: {_last(emptied.raw_output)}")
            await asyncio.wait_for(self._copy_folder(other), _COPY_SECONDS)
        except TimeoutError:
            await other.close()
            raise SandboxFailed(f"the folder {self.folder} was not copied in {_COPY_SECONDS:g} s") from None
        except BaseException:
            await other.close()
            raise
        return other

    async def _copy_folder(self, other: "ContainerWorkspace") -> None:
        reading, writing = os.pipe()
        try:
            source = ("cp", f"{self.name}:{self.folder}/.", "-")
            target = ("cp", "-", f"{other.name}:{self.folder}")
            async with (
                self._engine.started(*source, stdout=writing) as giver,
                self._engine.started(*target, stdin=reading) as taker,
            ):
                for number in (reading, writing):
                    os.close(number)
                reading = writing = -1
                (_, given), (_, taken) = await asyncio.gather(giver.communicate(), taker.communicate())
        finally:
            for number in filter(lambda each: each >= 0, (reading, writing)):
                os.close(number)
        if giver.returncode or taker.returncode:
            raise SandboxFailed(f"the folder {self.folder} was not copied: {_last(given or taken)}")

    async def close(self) -> None:
        """End it, with all that is in it."""
        self._engine.forget(self)
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), _END_SECONDS)
        except TimeoutError:
            with suppress(SandboxFailed):
                await self._engine.ask("rm", "-f", self.name)
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()


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


def _last(output: bytes) -> str:
    """Last line, for a message."""
    lines = output.decode(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "no word"

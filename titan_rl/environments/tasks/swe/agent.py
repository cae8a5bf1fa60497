"""A program that drives the model in a workspace, as it is: mini-swe-agent, or any other that speaks OpenAI's protocol.

    the program, in the workspace ──127.0.0.1:PORT, its only network──▶ the run's endpoint, with the episode's key

It finds ``OPENAI_BASE_URL``, ``OPENAI_API_KEY``, ``OPENAI_MODEL`` and ``ISSUE`` in its environment, and the issue as
standard input. What it has changed when it ends, however it ends, is evaluated.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from titan_rl.config.load import ConfigError, build_section
from titan_rl.config.sections.kinds import Seconds
from titan_rl.environments.interfaces.agent import ModelAccess, Outcome
from titan_rl.environments.interfaces.environment import EnvironmentFailed
from titan_rl.environments.sandbox.program import SandboxFailed
from titan_rl.environments.sandbox.workspace.command import Command
from titan_rl.environments.sandbox.workspace.server import BoxWorkspace
from titan_rl.environments.tasks.swe.workspaces import Workspaces

_SECTION = "task.options.agent"
_PORT = 8000
_PIECE = 1 << 16
_MOST_CONNECTIONS = 64
"""Of a program at a time: each takes descriptors of the verifier."""
_NOT_STARTED = (126, 127)
"""A shell's exit codes for a program that cannot be run, or is not there."""
_RESERVED = ("/proc", "/dev", "/tmp", "/etc", "/usr", "/w", "/images", "/empty", "/inside", "/workspace", "/host")
_LAST_SECONDS = 10.0
"""Of an episode, beside the program's own."""


@dataclass(kw_only=True)
class AgentOptions:
    """``[task.options.agent]``"""

    command: str
    """Line for bash, in the repository's folder."""
    shows: dict[str, str] = field(default_factory=dict)
    """Folders of this machine that it needs, by where the workspace has them, read-only: ``{ "/agent" = "venv" }``."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables for it."""
    timeout: Seconds = 600.0
    """Seconds for the program; with the tests' below verifier.episode_timeout."""

    @property
    def shown(self) -> dict[str, Path]:
        return {place: Path(folder).absolute() for place, folder in self.shows.items()}


def agent_options(values: Mapping[str, Any]) -> AgentOptions | None:
    """Parse and check ``[task.options.agent]``; None if there is none. Errors: ConfigError."""
    if not values:
        return None
    options = build_section(AgentOptions, dict(values), _SECTION)
    for place, folder in options.shown.items():
        is_taken = any(place == taken or place.startswith(f"{taken}/") for taken in _RESERVED)
        if not place.startswith("/") or place.count("/") != 1 or len(place) < 2 or is_taken:
            raise ConfigError(f"{_SECTION}.shows: {place!r} is no free folder at the top: take one such as '/agent'")
        if not folder.is_dir():
            raise ConfigError(f"{_SECTION}.shows: {str(folder)!r} is no folder")
    return options


class ProgramAgent:
    """Agent of one episode: the program, in a workspace of its own."""

    def __init__(self, issue: str, workspaces: Workspaces, options: AgentOptions, test_seconds: float):
        """``test_seconds``: for each of the runs that evaluate."""
        self._issue, self._workspaces, self._options = issue, workspaces, options
        self.timeout = options.timeout + 3 * test_seconds + _LAST_SECONDS

    async def run(self, model: ModelAccess) -> Outcome:
        """Run the program to its end, and evaluate. Errors: EnvironmentFailed; ConfigError."""
        try:
            workspace = await self._workspaces.open(_PORT)
            assert isinstance(workspace, BoxWorkspace), "containers are refused beside an agent"
            try:
                await self._run(workspace, model)
                return Outcome(await self._workspaces.evaluate(workspace))
            finally:
                await workspace.close()
        except SandboxFailed as error:
            raise EnvironmentFailed(f"the workspace: {error}") from error

    async def _run(self, workspace: BoxWorkspace, model: ModelAccess) -> None:
        """Errors: SandboxFailed; EnvironmentFailed for a program that is not there."""
        environment = {
            "OPENAI_BASE_URL": f"http://127.0.0.1:{_PORT}{urlsplit(model.base_url).path}",
            "OPENAI_API_KEY": model.api_key,
            "OPENAI_MODEL": model.model,
            "ISSUE": self._issue,
        }
        command = Command(
            self._options.command,
            stdin=self._issue.encode(errors="replace"),
            environment=environment | self._options.environment,
            seconds=self._options.timeout,
        )
        async with await _relay(workspace, urlsplit(model.base_url).port or 80):
            result = await workspace.run(command)
        if result.exit_code in _NOT_STARTED:
            raise EnvironmentFailed(f"{_SECTION}.command cannot be run: {result.output.strip()[-300:]}")


async def _relay(workspace: BoxWorkspace, port: int) -> asyncio.Server:
    """Server at the workspace's listener that passes all on to a port of this machine's loopback."""
    assert workspace.listener is not None, "it was opened with a port"

    free = _MOST_CONNECTIONS

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal free
        if not free:
            writer.close()
            return
        free -= 1
        try:
            there = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(_pass_on(reader, there[1]), _pass_on(there[0], writer))
        except OSError:
            writer.close()
        finally:
            free += 1

    return await asyncio.start_server(connect, sock=workspace.listener.dup())


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while part := await reader.read(_PIECE):
            writer.write(part)
            await writer.drain()
    with suppress(OSError):
        writer.close()

"""``[task] name = "swe"``: issues of repositories, resolved by commands in a workspace.

An episode has a workspace of its own, forked from one that is prepared once for a prompt. Its reward is 1 where all
checks pass that must turn green, and all that must stay so; with ``credit = "each"`` the share of the former, if none
of the latter is lost.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field

from titan_rl.config.load import ConfigError, build_section
from titan_rl.config.sections.kinds import Count, Seconds
from titan_rl.config.sections.schema import TaskConfig
from titan_rl.data.rows.column_names import with_names
from titan_rl.data.types import Prompt
from titan_rl.environments.conversation.session_limit import Sessions
from titan_rl.environments.interfaces.agent import Agent
from titan_rl.environments.prompts.jsonl_task import FileOptions, RowsTask
from titan_rl.environments.prompts.row_files import DataRow, Parse
from titan_rl.environments.sandbox.program import SandboxFailed
from titan_rl.environments.sandbox.workspace.command import Command, Workspace, WorkspaceLimits, WorkspaceSpoiled
from titan_rl.environments.sandbox.workspace.containers import ContainerEngine, ContainerOptions
from titan_rl.environments.sandbox.workspace.server import WorkspaceServer, check_workspaces
from titan_rl.environments.tasks.swe.agent import ProgramAgent, agent_options
from titan_rl.environments.tasks.swe.environment import (
    BASH,
    INSTRUCTIONS,
    SUBMIT,
    CommandEnvironment,
    CommandSettings,
    Protocol,
    written,
)
from titan_rl.environments.tasks.swe.evaluation import EvaluationSettings, resolution_reward
from titan_rl.environments.tasks.swe.rows import (
    SweRow,
    check_defaults,
    read_row,
    solution_of,
    unknown_folder,
    with_defaults,
)
from titan_rl.environments.tasks.swe.task_directories import read_file_or_tasks
from titan_rl.environments.tasks.swe.workspaces import PreparedWorkspaces, Workspaces

_SETUP_SECONDS = 600.0


@dataclass(kw_only=True)
class SweOptions(FileOptions):
    """``[task.options]`` of software engineering."""

    columns: dict[str, str] = field(default_factory=dict)
    """Names of ours (rows.py) to the files'."""
    defaults: dict[str, str] = field(default_factory=dict)
    """Columns that rows lack, such as ``test_command``; ``workspace`` may have a row's columns in braces."""
    protocol: Protocol = "block"
    """How the model gives its commands, without ``agent`` (environment.py)."""
    instruction: str | None = None
    """What follows each issue; left out: how commands are given. Empty: nothing."""
    max_commands: Count = 20
    """Commands of an episode; what is there after the last is evaluated."""
    output_characters: Annotated[int, Field(ge=50, le=100_000)] = 4000
    """Characters of a command's output that the model is shown."""
    seconds: Seconds = 30.0
    """For a command."""
    test_seconds: Seconds = 60.0
    """For each of the runs that evaluate (evaluation.py)."""
    memory_mib: Annotated[int, Field(ge=32)] = 512
    disk_mib: Annotated[int, Field(ge=1)] = 256
    processes: Count = 64
    credit: Literal["all", "each"] = "all"
    sessions: Count = 16
    """Workspaces at once in a verifier process; other episodes wait for their turn."""
    session_timeout: Seconds = 120.0
    """Seconds that an episode waits for its turn; keep it well below verifier.episode_timeout."""
    container: dict[str, Any] = field(default_factory=dict)
    """podman's or docker's containers in the place of boxes (containers.py); ``workspace`` is then an image's name."""
    agent: dict[str, Any] = field(default_factory=dict)
    """A program that drives the model (agent.py); empty: the model gives the commands itself."""


def swe_task(task: TaskConfig, folders: Sequence[str]) -> "SweTask":
    """Task of its options. Errors: ConfigError."""
    return (AgentSweTask if task.options.get("agent") else CommandSweTask)(task, folders)


class SweTask(RowsTask):
    """Task of issues and repositories. Errors: as RowsTask; ConfigError where there are no workspaces."""

    OPTIONS = SweOptions
    _read_file = staticmethod(read_file_or_tasks)
    options: SweOptions

    def __init__(self, task: TaskConfig, folders: Sequence[str]):
        super().__init__(task, folders)
        if not task.scores_itself:
            raise ConfigError("task.name = 'swe' is scored by its tests: leave task.reward out")
        check_defaults(self.options.defaults)
        self.sessions = Sessions(self.options.sessions, self.options.session_timeout)
        self._agent = agent_options(self.options.agent)
        self._prepared = PreparedWorkspaces()
        self._workspaces: WorkspaceServer | None = None
        self._containers = self._container_engine()
        if self._containers is None:
            check_workspaces()

    def _container_engine(self) -> ContainerEngine | None:
        """Errors: ConfigError."""
        if not self.options.container:
            return None
        if self._agent is not None:
            raise ConfigError("task.options.agent works in boxes, where it reaches the run: leave container out")
        return ContainerEngine(build_section(ContainerOptions, self.options.container, "task.options.container"))

    # rows

    def _parser(self) -> Parse:
        return self._parsed

    def _parsed(self, place: str, columns: dict[str, Any]) -> DataRow:
        columns = with_names(place, columns, self.options.columns, "task.options.columns")
        columns = with_defaults(place, columns, self.options.defaults)
        row = read_row(place, columns)
        if row.files and self._containers is not None:
            raise ConfigError(f"{place}: task.options.container needs 'workspace', an image's name, and not 'files'")
        instruction = self._instruction if self.options.instruction is None else self.options.instruction
        return DataRow(place, columns, f"{row.issue}\n\n{instruction}" if instruction else row.issue, None, None)

    @property
    def _instruction(self) -> str:
        return "" if self.style == "compact" or self._agent else INSTRUCTIONS[self.options.protocol]

    def _check_rows(self, rows: Sequence[DataRow]) -> None:
        super()._check_rows(rows)
        workspaces = {row.columns.get("workspace") or "": row for row in rows}
        workspaces.pop("", None)
        if self._containers is not None:
            self._containers.check_images(workspaces)
            return
        for row in workspaces.values():
            try:
                read_row(row.place, row.columns).path(self.folders)
            except ConfigError as error:
                raise ConfigError(f"{row.place}: {error}") from None

    def _check(self, row: DataRow) -> None:
        self._check_style(row)

    def is_exact(self, prompt: Prompt) -> bool:
        return False

    def score(self, prompt: Prompt, answers: list[str]) -> dict[str, float]:
        """Empty: the tests of the row have been run, and rewarded."""
        return {}

    # workspaces

    def row_of(self, prompt: Prompt) -> SweRow:
        """Row that a prompt carries. Errors: ConfigError."""
        return read_row(prompt.entry["place"], prompt.entry["row"])

    def workspaces_of(self, prompt: Prompt) -> Workspaces:
        """Workspaces of a prompt's samples."""
        return Workspaces(partial(self._open, prompt), partial(self._evaluate, prompt))

    async def _open(self, prompt: Prompt, port: int | None) -> Workspace:
        """Workspace of one sample: all of a prompt begin alike. Errors: SandboxFailed; ConfigError."""
        row = self.row_of(prompt)
        if row.setup:
            return await self._prepared.fork(prompt.id, partial(self._prepare, row), port)
        return await self._begun(row, port)

    async def _begun(self, row: SweRow, port: int | None = None) -> Workspace:
        """Workspace of a row's repository, as the row has it. Errors: SandboxFailed; ConfigError."""
        if self._containers is not None:
            workspace = await self._containers.open(row.workspace, row.folder, self._limits)
            if workspace.folder == "/" and not row.checks.reward_file:
                await workspace.close()
                raise unknown_folder(row.workspace)
            return workspace
        return await self._server.open(await asyncio.to_thread(row.image, self.folders), self._limits, port)

    async def _prepare(self, row: SweRow) -> Workspace:
        workspace = await self._begun(row)
        try:
            result = await workspace.run(Command(row.setup, seconds=_SETUP_SECONDS))
        except WorkspaceSpoiled as error:
            raise SandboxFailed(f"setup: {error}") from error
        if result.ending != "ok":
            await workspace.close()
            raise SandboxFailed(f"setup ended with {result.exit_code}: {result.output.strip()[-300:]}")
        return workspace

    @property
    def _server(self) -> WorkspaceServer:
        if self._workspaces is None:
            self._workspaces = WorkspaceServer(self._agent.shown if self._agent else {})
        return self._workspaces

    @property
    def most_episode_bytes(self) -> int:
        return self.options.sessions * (self._limits.memory + self._limits.disk)

    @property
    def _limits(self) -> WorkspaceLimits:
        options = self.options
        return WorkspaceLimits(
            seconds=options.seconds,
            memory=options.memory_mib << 20,
            disk=options.disk_mib << 20,
            processes=options.processes,
        )

    async def _evaluate(self, prompt: Prompt, workspace: Workspace) -> float:
        """Reward of what is in a workspace. Errors: SandboxFailed; ConfigError."""
        settings = EvaluationSettings(self.options.test_seconds, self.options.credit)
        begin = partial(self._open, prompt, None)
        return await resolution_reward(workspace, begin, self.row_of(prompt).checks, settings)

    async def close(self) -> None:
        self._prepared.cancel()
        if self._containers is not None:
            await self._containers.close()
        if self._workspaces is not None:
            await self._workspaces.close()


class CommandSweTask(SweTask):
    """Issues that the model resolves by commands of its own."""

    def __init__(self, task: TaskConfig, folders: Sequence[str]):
        super().__init__(task, folders)
        if self.options.protocol == "tool":
            self.tools = [BASH.schema]

    def environment(self, prompt: Prompt) -> CommandEnvironment:
        options = self.options
        settings = CommandSettings(options.protocol, options.max_commands, options.output_characters)
        return CommandEnvironment(self.workspaces_of(prompt), settings)

    def demonstration(self, prompt: Prompt) -> list[str]:
        commands = solution_of(prompt.entry["place"], prompt.entry["row"])
        has_room = len(commands) < self.options.max_commands
        return [written(command, self.options.protocol) for command in (*commands, *([SUBMIT] if has_room else []))]


class AgentSweTask(SweTask):
    """Issues that a program resolves, which asks the model."""

    def agent(self, prompt: Prompt) -> Agent:
        assert self._agent is not None, "it is why this class was chosen"
        issue = self.row_of(prompt).issue
        return ProgramAgent(issue, self.workspaces_of(prompt), self._agent, self.options.test_seconds)

    def demonstration(self, prompt: Prompt) -> str:
        raise ConfigError("task.options.agent has no worked examples: set sft.steps = 0")

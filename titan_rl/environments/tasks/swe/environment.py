"""The model's own commands in a workspace: an answer's command runs, its output is the reply.

    block   the answer has one fenced block of bash, as mini-swe-agent's; without one it is told so
    tool    a call of the tool ``bash``, as the model's chat template writes calls
    line    the answer is the command, for models that write nothing else

What is there after the last command, or after ``submit``, is evaluated.
"""

import json
import re
from dataclasses import dataclass
from typing import Literal

from titan_rl.config.io.printable import whole_characters
from titan_rl.data.text.messages import message
from titan_rl.environments.conversation.tools import ToolEnvironment
from titan_rl.environments.interfaces.environment import OVER, EnvironmentFailed, OneAnswer, Reply
from titan_rl.environments.interfaces.tool import Tool
from titan_rl.environments.sandbox.program import SandboxFailed
from titan_rl.environments.sandbox.workspace.command import Command, CommandResult, Workspace, WorkspaceSpoiled
from titan_rl.environments.tasks.swe.workspaces import Workspaces

Protocol = Literal["block", "tool", "line"]
SUBMIT = "submit"
"""Command that ends the episode."""
_SUBMITS = (SUBMIT, "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
_BLOCK = re.compile(r"```(?:bash|sh|shell|mswea_bash_command)[ \t]*\n(.*?)\n?```", re.DOTALL)
_PARAMETERS = {
    "type": "object",
    "properties": {"command": {"type": "string", "description": f"bash command, or {SUBMIT!r} when you are done"}},
    "required": ["command"],
    "additionalProperties": False,
}
_TOOL_SECONDS = 3600.0
"""Of a call; the command's own limit comes before."""
INSTRUCTIONS: dict[Protocol, str] = {
    "block": "Work in the repository with bash: each answer has one ```bash block, which is run, and its output is "
    f"shown. When the issue is resolved, give the command {SUBMIT}.",
    "tool": f"Work in the repository with the tool bash. When the issue is resolved, call it with {SUBMIT}.",
    "line": "",
}


async def _nothing(arguments: str) -> str:
    raise AssertionError("the schema alone is shown")


BASH = Tool("bash", "Runs a command in the repository's folder, and gives its output.", _PARAMETERS, _nothing)


def shown(result: CommandResult, most: int) -> str:
    """Result of a command as the model is shown it. ``most``: characters of its output."""
    output = whole_characters(result.output).rstrip("\n")
    if len(output) > most:
        half = most // 2
        output = f"{output[:half]}\n[{len(output) - 2 * half} characters are left out here]\n{output[-half:]}"
    ends = {"error": f"exit code {result.exit_code}", "timeout": "it took too long", "memory": "out of memory"}
    return "\n".join(filter(None, [output, ends.get(result.ending)])) or "(no output)"


@dataclass(frozen=True)
class CommandSettings:
    """Settings of the commands of an episode."""

    protocol: Protocol
    max_commands: int
    most_shown: int
    """Characters of a command's output that the model is shown."""


class CommandEnvironment(OneAnswer):
    """Environment of an episode: a workspace, opened with the first command, and evaluated at the end."""

    def __init__(self, workspaces: Workspaces, settings: CommandSettings):
        self._workspaces, self._settings = workspaces, settings
        self._workspace: Workspace | None = None
        self._num_commands = 0
        self._is_submitted = False
        tool = Tool(BASH.name, BASH.description, _PARAMETERS, self._call, timeout=_TOOL_SECONDS, retries=0)
        self._tools = ToolEnvironment([tool])

    async def step(self, answer: str) -> Reply:
        """Errors: EnvironmentFailed."""
        try:
            return await self._step(answer)
        except WorkspaceSpoiled:
            return Reply(reward=0.0)
        except SandboxFailed as error:
            raise EnvironmentFailed(f"the workspace: {error}") from error

    async def _step(self, answer: str) -> Reply:
        reply = await self._reply(answer)
        self._num_commands += 1
        if self._is_submitted or not reply.messages or self._num_commands >= self._settings.max_commands:
            return Reply(reward=await self._workspaces.evaluate(await self._opened()), calls=reply.calls)
        return reply

    async def _reply(self, answer: str) -> Reply:
        """Reply to an answer, as if the episode went on."""
        if self._settings.protocol == "tool":
            return await self._tools.step(answer)
        command = answer if self._settings.protocol == "line" else _block_of(answer)
        if command is None:
            return _user("Give one ```bash block with the next command.")
        text = await self._run(command)
        return OVER if text is None else _user(text)

    async def _call(self, command: str) -> str:
        return await self._run(command) or "submitted"

    async def _run(self, line: str) -> str | None:
        """Output of a command; None once the work is submitted. Errors: SandboxFailed."""
        if self._is_submitted or line.strip() in _SUBMITS:
            self._is_submitted = True
            return None
        try:
            result = await (await self._opened()).run(Command(line))
        except ValueError as error:
            return f"error: {error}"
        return shown(result, self._settings.most_shown)

    async def _opened(self) -> Workspace:
        if self._workspace is None:
            self._workspace = await self._workspaces.open(None)
        return self._workspace

    async def close(self) -> None:
        if self._workspace is not None:
            await self._workspace.close()


def written(command: str, protocol: Protocol) -> str:
    """Answer that gives a command."""
    if protocol == "tool":
        return f"<tool_call>\n{json.dumps({'name': BASH.name, 'arguments': {'command': command}})}\n</tool_call>"
    return command if protocol == "line" else f"```bash\n{command}\n```"


def _block_of(answer: str) -> str | None:
    blocks = _BLOCK.findall(answer)
    return blocks[0] if len(blocks) == 1 else None


def _user(text: str) -> Reply:
    return Reply([message("user", text)])

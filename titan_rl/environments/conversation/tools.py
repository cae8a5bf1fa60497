"""Tools that a model calls: parsed, checked against their schema, and run under a deadline.

What the model did wrong (a call that cannot be read, an unknown tool, arguments that do not fit, a tool that says no)
is told to the model, and the episode goes on. What the machinery did wrong is retried, and then ends the episode by
name: it is never the model's wrong answer.
"""

import asyncio
import inspect
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from titan_rl.config.io.printable import whole_characters
from titan_rl.config.sections.kinds import Style
from titan_rl.data.text.messages import message
from titan_rl.data.types import CallStatus, ToolCall
from titan_rl.environments.conversation.tool_calls import Call, Malformed, arguments_json, read_calls
from titan_rl.environments.interfaces.environment import OVER, EnvironmentFailed, OneAnswer, Reply
from titan_rl.environments.interfaces.tool import Tool, ToolError
from titan_rl.mesh.processes.deadlines import together

MAX_CALLS = 8
"""Of one answer; further calls get an error."""
MAX_RESULT = 4000
"""Characters of a tool's result that the model is shown."""
_PAUSE_SECONDS = 0.1


@dataclass
class ToolEnvironment(OneAnswer):
    """Environment of tools: results of an answer's calls, in order; an answer without calls is the last."""

    tools: Sequence[Tool]
    style: Style = "chat"
    """How calls are written (tool_calls.py)."""
    by_name: dict[str, Tool] = field(init=False)

    def __post_init__(self) -> None:
        self.by_name = {tool.name: tool for tool in self.tools}

    async def step(self, answer: str) -> Reply:
        parsed = read_calls(answer, self.style, self.by_name)
        if not parsed:
            return OVER
        results = await self._results(parsed[: MAX_CALLS + 1])
        messages = [message("tool", self._written(result[:MAX_RESULT])) for result, _ in results]
        return Reply(messages, calls=[record for _, record in results])

    async def _results(self, calls: Sequence[Call | Malformed]) -> list[tuple[str, ToolCall]]:
        """Side by side; in the order of the calls where tools share a state."""
        return await together(self._result(number, call) for number, call in enumerate(calls))

    def _written(self, result: str) -> str:
        """Where no template sets it apart, a mark and a line's end do."""
        result = whole_characters(result)
        return f"={result}\n" if self.style == "compact" else result

    async def _result(self, number: int, call: Call | Malformed) -> tuple[str, ToolCall]:
        """Result for the model, and the record. Errors: EnvironmentFailed."""
        start = time.perf_counter()
        if isinstance(call, Malformed):
            return f"error: {call.why}", ToolCall("", call.text, "error", 0.0)
        status, result = await self._run(number, call)
        record = ToolCall(call.name, arguments_json(call.arguments), status, time.perf_counter() - start)
        return result, record

    async def _run(self, number: int, call: Call) -> tuple[CallStatus, str]:
        tool = self.by_name.get(call.name)
        if number >= MAX_CALLS:
            return "error", f"error: at most {MAX_CALLS} calls in one answer"
        if tool is None:
            return "error", f"error: there is no tool {call.name!r}: take one of {', '.join(self.by_name)}"
        if mistake := tool.mistake(call.arguments):
            return "error", f"error: {call.name}: {mistake}"
        try:
            return "ok", await asyncio.wait_for(_run_with_retries(tool, call.arguments), tool.timeout)
        except ToolError as error:
            return "error", f"error: {error}"
        except TimeoutError:
            return "timeout", f"error: {call.name} took longer than {tool.timeout:g} s"


async def _run_with_retries(tool: Tool, arguments: dict[str, Any]) -> str:
    """Errors: ToolError; EnvironmentFailed when it was tried ``retries`` times more."""
    for attempt in range(tool.retries + 1):
        try:
            result = tool.run(**arguments)
            return str(await result if inspect.isawaitable(result) else result)
        except ToolError:
            raise
        except Exception as error:  # whatever the machinery behind a tool raises
            if attempt == tool.retries:
                message = f"tool {tool.name} failed {attempt + 1} times: {type(error).__name__}: {error}"
                raise EnvironmentFailed(message) from error
        await asyncio.sleep(_PAUSE_SECONDS * 4**attempt)  # what is behind it may be on its way back
    raise AssertionError("a tool is tried once at least")

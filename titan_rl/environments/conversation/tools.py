"""Tools that a model calls: parsed, checked against their schema, and run under a deadline.

What the model did wrong (a call that cannot be read, an unknown tool, arguments that do not fit, a tool that says no)
is told to the model, and the episode goes on. What the machinery did wrong is retried, and then ends the episode by
name: it is never the model's wrong answer.
"""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, best_match
from referencing import Registry

from titan_rl.config.io.printable import whole_characters
from titan_rl.config.load import ConfigError
from titan_rl.config.sections.kinds import Style
from titan_rl.data.types import CallStatus, ToolCall
from titan_rl.environments.conversation.tool_calls import Call, Malformed, arguments_json, read_calls
from titan_rl.environments.interfaces.environment import OVER, EnvironmentFailed, OneAnswer, Reply
from titan_rl.mesh.processes.deadlines import together

MAX_CALLS = 8
"""Of one answer; further calls get an error."""
MAX_RESULT = 4000
"""Characters of a tool's result that the model is shown."""
_RETRIES = 2
_PAUSE_SECONDS = 0.1
_NOTHING_ELSE = Registry()
"""A schema that refers to another address is not looked up there."""
_ANY_ARGUMENTS = inspect.signature(lambda **arguments: "")


Schema = dict[str, Any]
"""A tool as chat templates take it: ``{"type": "function", "function": {name, description, parameters}}``."""


class ToolError(Exception):
    """Error of a tool call by the model's fault: its message is the call's result."""


@dataclass(frozen=True)
class Tool:
    """Function for the model to call.

    ``run`` takes the arguments by name and gives text, sync or async. It raises ToolError for what the model did wrong;
    whatever else it raises is the machinery's fault, and it is tried again before the episode ends for it.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema of the arguments, an object's."""
    run: Callable[..., str | Awaitable[str]]
    timeout: float = 10.0
    """Seconds for a call; the model gets a timeout as its result."""
    retries: int = _RETRIES

    def __post_init__(self) -> None:
        try:
            Draft202012Validator.check_schema(self.parameters)
        except SchemaError as error:
            raise ConfigError(f"tool {self.name}: its parameters are no JSON schema: {error.message}") from None

    @cached_property
    def schema(self) -> Schema:
        """Schema for chat templates."""
        about = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": about}

    def mistake(self, arguments: dict[str, Any]) -> str | None:
        """Schema violation of the arguments, as a message; None if they fit."""
        try:
            error = best_match(Draft202012Validator(self.parameters, registry=_NOTHING_ELSE).iter_errors(arguments))
        except (RecursionError, ArithmeticError) as error:  # what the model wrote is too deep or too large to check
            return f"the arguments cannot be checked ({type(error).__name__})"
        if error is not None:
            return f"{error.json_path.removeprefix('$.')}: {error.message}"
        try:
            self._signature.bind(**arguments)
        except TypeError as error:  # its schema lets through what the function has no place for
            return str(error)
        return None

    @cached_property
    def _signature(self) -> inspect.Signature:
        try:
            return inspect.signature(self.run)
        except (TypeError, ValueError):  # of something written in C, which does not tell
            return _ANY_ARGUMENTS


def schema_of(tool: Tool | Schema) -> Schema:
    """Schema of a tool, or the schema itself."""
    return tool.schema if isinstance(tool, Tool) else tool


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
        messages = [{"role": "tool", "content": self._written(result[:MAX_RESULT])} for result, _ in results]
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

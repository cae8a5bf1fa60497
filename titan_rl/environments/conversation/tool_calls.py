"""Tool calls in a model's answer, parsed from its text.

chat      <tool_call>{"name": "calc", "arguments": {"expression": "2+3"}}</tool_call>, any number of them, as Hermes,
          Qwen and others write it; or an answer that is nothing but such an object, or a list of them, as Llama does.
compact   calc(2+3), the whole answer: for tiny character models. The text is the tool's only argument, as JSON where
          its schema asks for other than text; a tool without arguments is called by now().

A call that was begun and cannot be read is a ``Malformed``, one for each, and takes no other with it.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from titan_rl.config.sections.kinds import Style
from titan_rl.environments.conversation.untrusted_json import read_json

_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|(?=<tool_call>)|\Z)", re.DOTALL)
_COMPACT = re.compile(r"(\w+)\((.*)\)", re.DOTALL)
_SHOWN = 200
"""Characters of a call that cannot be read."""
_RECORDED = 2000
"""Characters of a call's arguments in the rollouts' files."""


@dataclass(frozen=True)
class Call:
    """Tool call with its arguments."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Malformed:
    """Tool call that cannot be parsed."""

    text: str
    why: str
    """Error message for the model."""


class HasParameters(Protocol):
    """Tool, as far as the parser needs it."""

    @property
    def parameters(self) -> dict[str, Any]:
        """JSON schema of its arguments."""
        ...


def read_calls(answer: str, style: Style, tools: Mapping[str, HasParameters]) -> list[Call | Malformed]:
    """Tool calls of an answer, in order."""
    answer = answer.strip()
    if style == "compact":
        return _compact(answer, tools)
    if "<tool_call>" in answer:
        return [_tagged(text.strip()) for text in _TAGGED.findall(answer)]
    return _bare(answer)


def _compact(answer: str, tools: Mapping[str, HasParameters]) -> list[Call | Malformed]:
    match = _COMPACT.fullmatch(answer)
    if match is None or match[1] not in tools:
        return []
    [argument, *further] = (properties := tools[match[1]].parameters.get("properties", {})) or [None]
    if further or (argument is None and match[2]):
        return [Malformed(answer[:_SHOWN], f"{match[1]} takes other than one argument, and cannot be called so")]
    return [Call(match[1], {} if argument is None else {argument: _typed(match[2], properties[argument])})]


def _typed(text: str, schema: Any) -> Any:
    """The argument as its schema has it; as text where it cannot be read so, which the schema then refuses."""
    if not isinstance(schema, dict) or schema.get("type", "string") == "string":
        return text
    try:
        return read_json(text)
    except ValueError:
        return text


def _tagged(text: str) -> Call | Malformed:
    try:
        return _call(read_json(text))
    except ValueError as error:
        return Malformed(text[:_SHOWN], f"a call must be one JSON object with name and arguments: {error}")


def _call(value: Any) -> Call:
    """Errors: ValueError."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError("there is no name")
    arguments = value.get("arguments", value.get("parameters", {}))
    if not isinstance(arguments, dict):
        raise ValueError("arguments must be an object")
    return Call(value["name"], arguments)


def _bare(answer: str) -> list[Call | Malformed]:
    """An answer that is nothing but calls; whatever else looks like JSON is an answer."""
    if not answer.startswith(("{", "[")):
        return []
    try:
        value = read_json(answer)
        return [_call(call) for call in (value if isinstance(value, list) else [value])]
    except ValueError:
        return []


def text_beside_calls(answer: str, style: Style, calls: list[Call | Malformed]) -> str:
    """Text of an answer without its calls; malformed calls count as text."""
    if not any(isinstance(call, Call) for call in calls):
        return answer.strip()
    rest = _TAGGED.sub("", answer) if style == "chat" and "<tool_call>" in answer else ""
    return "\n".join([*filter(None, [rest.strip()]), *(call.text for call in calls if isinstance(call, Malformed))])


def arguments_json(arguments: dict[str, Any]) -> str:
    """Arguments as JSON for the record, cut after ``_RECORDED`` characters."""
    return json.dumps(arguments, ensure_ascii=False)[:_RECORDED]

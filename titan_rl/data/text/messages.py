"""Messages of a conversation, in OpenAI's form, as chat templates take them."""

from typing import Any, NotRequired, TypedDict

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of an assistant's reasoning in a message, of which it has one."""


class CalledFunction(TypedDict):
    """Function of a message's tool call."""

    name: str
    arguments: dict[str, Any] | str
    """By the parameters' names; text is JSON of it."""


class MessageCall(TypedDict):
    """Tool call of a message."""

    type: NotRequired[str]
    id: NotRequired[str]
    function: CalledFunction


class Message(TypedDict):
    """Message of a conversation, in OpenAI's form, as chat templates take it (text/message_forms.py)."""

    role: str
    content: NotRequired[str | None]
    """Text; null or left out beside tool calls alone."""
    reasoning_content: NotRequired[str]
    thinking: NotRequired[str]
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[MessageCall]]
    tool_call_id: NotRequired[str]
    """Of a tool's result: the call that it is of."""
    name: NotRequired[str]


def message(role: str, content: str) -> Message:
    """Message of text alone."""
    return {"role": role, "content": content}


def reasoning_of(message: Message) -> dict[str, str]:
    """Reasoning of a message by its name; empty if it has none."""
    return {name: str(value) for name, value in message.items() if name in REASONING}


def content_of(message: Message) -> str:
    """Text of a message; empty if it has none."""
    return message.get("content") or ""

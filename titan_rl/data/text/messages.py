"""Messages of a conversation, in OpenAI's form, as chat templates take them."""

from typing import Any, NotRequired, TypedDict

from titan_rl.config.errors import ConfigError

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of an assistant's reasoning in a message, of which it has one."""

IMAGE_MARK = "<image>"
"""Where an image stands in a text of a row that has images."""


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


def with_images(messages: list[Message], count: int) -> list[Message]:
    """Messages with images as parts of their content, as chat templates of vision models take them.

    They stand where users' texts have ``IMAGE_MARK``, or before the first of these texts. Errors: ConfigError for
    another number of marks, and if no user says anything.
    """
    users = [number for number, each in enumerate(messages) if each["role"] == "user"]
    if not count:
        return messages
    if not users:
        raise ConfigError("images stand in a user's message, and there is none")
    num_marks = sum(content_of(messages[number]).count(IMAGE_MARK) for number in users)
    if num_marks not in (0, count):
        raise ConfigError(f"its text has {IMAGE_MARK} {num_marks} times, and there are {count} images")
    shown = {number: _parts(content_of(messages[number])) for number in users}
    if not num_marks:
        shown[users[0]] = [{"type": "image"}] * count + shown[users[0]]
    parts: Any = [{**each, "content": shown.get(number, each.get("content"))} for number, each in enumerate(messages)]
    return parts


def _parts(text: str) -> list[dict[str, str]]:
    """Texts, and images where they are marked."""
    texts = [[{"type": "text", "text": piece}] if piece else [] for piece in text.split(IMAGE_MARK)]
    return [*texts[0], *(part for piece in texts[1:] for part in [{"type": "image"}, *piece])]


def content_of(message: Message) -> str:
    """Text of a message; empty if it has none."""
    return message.get("content") or ""

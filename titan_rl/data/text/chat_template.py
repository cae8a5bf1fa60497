"""What a model's chat template writes, found by rendering short conversations of marks.

Everything that writes out messages asks here, so that prompts, worked examples, rows of data and replies of tools all
have the same variant of the template, the same options (``model.chat_template.options``) and the same date.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from titan_rl.config.load import ConfigError
from titan_rl.data.text.message_forms import fitted, is_text, marked_call, marks_of
from titan_rl.data.text.messages import Message, content_of, message
from titan_rl.data.text.rendering import rendered
from titan_rl.data.text.tokenizer import Tokenizer

ASKED, ANSWER, REPLY = "asked-mark", "answer-mark", "reply-mark"
Tools = Sequence[dict[str, Any]]
"""Schemas of what the model may call, as OpenAI's form has them."""


def render(tokenizer: Tokenizer, messages: Sequence[Message], *, tokenize: bool = False, **options: Any) -> Any:
    """Rendering of messages by the chat template, up to where the model begins. Errors: ConfigError with what the
    template says, or for a message that it does not write out."""
    fitting = fitted(tokenizer, messages, has_tools=bool(options.get("tools")))
    return rendered(tokenizer, fitting, tokenize=tokenize, **options)


def render_with_tools(tokenizer: Tokenizer, messages: list[Message], tools: Tools, **options: Any) -> Any:
    """Rendering of messages with tools.

    ``tools``: for a template without a place for them they stand in the system message. Errors: ConfigError.
    """
    if not tools:
        return render(tokenizer, messages, **options)
    if renders_tools(tokenizer):
        return render(tokenizer, messages, tools=list(tools), **options)
    return render(tokenizer, with_tools(messages, tools), **options)


@lru_cache(maxsize=8)
def renders_tools(tokenizer: Tokenizer) -> bool:
    """Whether the chat template writes out the tools that it is given."""
    mark = "tool-mark"
    schema = {"name": mark, "description": "", "parameters": {"type": "object", "properties": {}}}
    try:
        return mark in render(tokenizer, [message("user", ASKED)], tools=[{"type": "function", "function": schema}])
    except ConfigError:
        return False


@lru_cache(maxsize=256)
def first_unrendered(tokenizer: Tokenizer, roles: tuple[str, ...]) -> int | None:
    """Index of the first of these messages that is missing from the rendering, an assistant's excepted.

    Errors: ConfigError if it refuses them.
    """
    return first_left_out(tokenizer, [message(role, "") for role in roles])


def first_left_out(tokenizer: Tokenizer, messages: Sequence[Message], tools: Tools = ()) -> int | None:
    """Index of the first of these messages of which the rendering lacks the content, or, of an assistant's, a tool
    call or an argument of one.

    Errors: ConfigError if it refuses them.
    """
    marked = [_marked(number, each) for number, each in enumerate(messages)]
    text = render_with_tools(tokenizer, [each for each, _ in marked], tools).casefold()
    return next((number for number, (_, marks) in enumerate(marked) if any(mark not in text for mark in marks)), None)


def _marked(number: int, each: Message) -> tuple[Message, list[str]]:
    """Message with marks for what it says, and those of them that must be written."""
    mark = f"mark-{number}-"
    if each["role"] != "assistant":
        return {**each, "content": mark}, [mark]
    if not (calls := each.get("tool_calls")):
        return message("assistant", mark) if is_text(each) else each, []
    marked: Any = {**each, "tool_calls": [marked_call(call, f"{mark}{n}-") for n, call in enumerate(calls)]}
    return marked, [text for call in marked["tool_calls"] for text in marks_of(call)]


def with_tools(messages: list[Message], tools: Tools) -> list[Message]:
    """Messages with a system message about the tools and their call format."""
    schemas = "\n".join(json.dumps(tool.get("function", tool)) for tool in tools)
    instructions = (
        f"You can call these tools:\n{schemas}\nTo call one, write nothing but\n"
        f'<tool_call>{{"name": the tool, "arguments": {{...}}}}</tool_call>\nand you will be given its result.'
    )
    if messages[0]["role"] != "system":
        return [message("system", instructions), *messages]
    return [message("system", f"{content_of(messages[0])}\n\n{instructions}"), *messages[1:]]


# replies


@dataclass(frozen=True)
class ReplyTemplate:
    """The text around replies, from the end of the model's answer to the start of its next one."""

    pieces: tuple[str, ...]
    """Before the first reply, between two, and behind the last."""
    is_trimmed: bool
    """Whether the template strips a message's text."""
    is_json: bool
    """Whether it writes a message's text as a JSON string; the quotes are in the pieces."""

    def written(self, reply: str) -> str:
        """Reply as the template writes it: trimmed, or as JSON."""
        reply = reply.strip() if self.is_trimmed else reply
        return _as_json(reply) if self.is_json else reply


def reply_template(tokenizer: Tokenizer, role: str = "user", count: int = 1, tools: Tools = ()) -> ReplyTemplate:
    """Around ``count`` replies of the role; a template that does not know the role ``tool`` is told of a user's.

    Errors: ConfigError if the template does not show an answer and replies as they are, one after the other.
    """
    return _reply_template(tokenizer, role, count, json.dumps(list(tools)))


@lru_cache(maxsize=256)
def _reply_template(tokenizer: Tokenizer, role: str, count: int, tools: str) -> ReplyTemplate:
    try:
        return _find_template(tokenizer, role, count, json.loads(tools))
    except ConfigError:
        if role == "user":
            raise
        return _find_template(tokenizer, "user", count, json.loads(tools))


def _find_template(tokenizer: Tokenizer, role: str, count: int, tools: Tools) -> ReplyTemplate:
    def rendered_with(replies: list[str]) -> str:
        conversation = [message("user", ASKED), message("assistant", ANSWER)]
        reply_messages = [message(role, reply) for reply in replies]
        return render_with_tools(tokenizer, [*conversation, *reply_messages], tools)

    marks = [f"{REPLY}-{number}" for number in range(count)]
    pieces = _pieces(rendered := rendered_with(marks), marks)
    is_trimmed = rendered_with([f" {mark} " for mark in marks]) == rendered
    return ReplyTemplate(pieces, is_trimmed, _is_json(rendered_with, marks))


def _pieces(rendered: str, marks: list[str]) -> tuple[str, ...]:
    """Errors: ConfigError."""
    if rendered.count(ANSWER) != 1 or any(rendered.count(mark) != 1 for mark in marks):
        raise ConfigError(
            "the model's chat template does not show an answer and the reply to it once each, as they are: "
            "this task replies, so it needs another model or template"
        )
    rest, pieces = rendered.partition(ANSWER)[2], []
    for mark in marks:
        piece, separator, rest = rest.partition(mark)
        if not separator:
            raise ConfigError(
                "the model's chat template shows a reply before the answer: take another model or template"
            )
        pieces.append(piece)
    return (*pieces, rest)


def _is_json(rendered_with: Callable[[list[str]], str], marks: list[str]) -> bool:
    """Errors: ConfigError for a template that changes a reply's text in any other way."""
    odd = [f'{mark}"\\\n<é>' for mark in marks]
    as_it_is = rendered_with(odd)
    if all(text in as_it_is for text in odd):
        return False
    if not all(_as_json(text) in as_it_is for text in odd):
        raise ConfigError("the model's chat template changes the text of a reply: take another model or template")
    return True


def _as_json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]

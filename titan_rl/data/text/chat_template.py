"""What a model's chat template writes, found by rendering short conversations of marks.

Everything that writes out messages asks here, so that prompts, worked examples, rows of data and replies of tools all
have the same variant of the template, the same switches (``model.chat_template_kwargs``) and the same date.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError

from titan_rl.config.load import ConfigError
from titan_rl.data.text.template_limits import check_source, limited
from titan_rl.data.text.tokenizer import Tokenizer, text_settings
from titan_rl.data.types import Message

ASKED, ANSWER, REPLY = "asked-mark", "answer-mark", "reply-mark"
Tools = Sequence[dict[str, Any]]
"""Schemas of what the model may call, as OpenAI's form has them."""


_FAULTS = (
    TemplateError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
    SyntaxError,
)
"""What a template may raise: it is a program."""


def render(tokenizer: Tokenizer, messages: list[Message], *, tokenize: bool = False, **options: Any) -> Any:
    """Rendering of messages by the chat template, up to where the model begins. Errors: ConfigError with what the
    template says."""
    settings = text_settings(tokenizer)
    arguments = {"add_generation_prompt": True, "return_dict": False, "strftime_now": settings.strftime}
    arguments |= settings.template_kwargs | options
    try:
        with limited():  # to make tokens of it starts a thread for each core, whose stacks count
            for source in _sources(tokenizer):
                check_source(source)
            text = tokenizer.apply_chat_template(messages, tokenize=False, **_without_tokens(arguments))
        return tokenizer.apply_chat_template(messages, tokenize=True, **arguments) if tokenize else text
    except _FAULTS as error:
        roles = ", ".join(message["role"] for message in messages)
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"the model's chat template refuses messages of {roles}: {reason}") from None


def _without_tokens(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if not name.startswith("return_")}


def _sources(tokenizer: Tokenizer) -> Iterable[str]:
    """The one, or those that have names."""
    templates = getattr(tokenizer, "chat_template", None) or ()
    return (templates,) if isinstance(templates, str) else templates.values() if isinstance(templates, dict) else ()


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
    marks = [f"mark-{number}-" for number in range(len(roles))]
    rendered = render(tokenizer, [message(role, mark) for role, mark in zip(roles, marks, strict=True)]).casefold()
    required = (number for number, role in enumerate(roles) if role != "assistant")
    return next((number for number in required if marks[number] not in rendered), None)


def with_tools(messages: list[Message], tools: Tools) -> list[Message]:
    """Messages with a system message about the tools and their call format."""
    schemas = "\n".join(json.dumps(tool["function"]) for tool in tools)
    instructions = (
        f"You can call these tools:\n{schemas}\nTo call one, write nothing but\n"
        f'<tool_call>{{"name": the tool, "arguments": {{...}}}}</tool_call>\nand you will be given its result.'
    )
    if messages[0]["role"] != "system":
        return [message("system", instructions), *messages]
    return [message("system", f"{messages[0]['content']}\n\n{instructions}"), *messages[1:]]


def message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


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

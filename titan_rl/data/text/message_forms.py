"""The form in which a model's chat template takes tool calls and reasoning, found by rendering marks.

Rows have them as OpenAI's form does. Templates differ: most take a call's arguments as an object, some as JSON text;
some look for calls beside no content at all, some for the name ``thinking``.

    {"role": "assistant", "content": null, "reasoning_content": "...",
     "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]}
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any, Literal

from titan_rl.config.io.bounded_files import KeyTwice, each_once, json_fault, parse_json
from titan_rl.config.load import ConfigError
from titan_rl.data.text.messages import REASONING, Message, MessageCall, message
from titan_rl.data.text.rendering import rendered
from titan_rl.data.text.tokenizer import Tokenizer

_CALL, _KEY, _VALUE, _THOUGHT, _ID = "callmark", "keymark", "valuemark", "thoughtmark", "id1234567"
_SCHEMA = {"name": "other", "description": "", "parameters": {"type": "object", "properties": {}}}


@dataclass(frozen=True)
class CallForm:
    """Form of tool calls that a chat template writes out."""

    no_content: str | None
    """What stands for the content that a call has none of."""
    is_wrapped: bool
    """Whether name and arguments stand in ``function``."""
    arguments: Literal["object", "text"]

    def apply(self, call: MessageCall) -> dict[str, Any]:
        """A call as the template takes it. Errors: ConfigError for arguments that are no object of JSON."""
        function = call["function"]
        arguments = arguments_of(function.get("arguments"), f"arguments of {function['name']}")
        written = arguments if self.arguments == "object" else json.dumps(arguments, ensure_ascii=False)
        bare = {"name": function["name"], "arguments": written}
        others = {name: value for name, value in call.items() if name != "function"}
        return {**others, "function": bare} if self.is_wrapped else {**others, **bare}


_CALL_FORMS = [
    CallForm(no_content, is_wrapped, arguments)
    for no_content, is_wrapped, arguments in product((None, ""), (True, False), ("object", "text"))
]


def arguments_of(value: Any, what: str) -> dict[str, Any]:
    """A call's arguments, given as an object, or as JSON of one; none are an empty object. Errors: ConfigError, also
    for a key that is there twice."""
    if value is None or value == "":
        return {}
    try:
        arguments = parse_json(value, pairs=each_once) if isinstance(value, str) else value
    except KeyTwice as error:
        raise ConfigError(f"{what}: {error}") from None
    except ValueError as error:
        raise ConfigError(f"{what}: not JSON: {json_fault(error)}") from None
    if not isinstance(arguments, dict):
        kind = type(arguments).__name__
        raise ConfigError(f"{what}: of type {kind}: give an object of JSON, by the parameters' names")
    return arguments


# what a template takes


@lru_cache(maxsize=32)
def call_form(tokenizer: Tokenizer, has_tools: bool, no_content: str | None = None) -> CallForm | None:
    """First form of tool calls of which the chat template writes name and arguments; None if there is none.

    ``has_tools``: whether the conversation has tools, for which some models have another template. ``no_content``:
    what stands for it in the message, and is kept if the template takes it.
    """
    forms = sorted(_CALL_FORMS, key=lambda form: form.no_content != no_content)
    return next((form for form in forms if _shows_call(tokenizer, form, has_tools)), None)


def _shows_call(tokenizer: Tokenizer, form: CallForm, has_tools: bool) -> bool:
    call: MessageCall = {
        "id": _ID,
        "type": "function",
        "function": {"name": _CALL, "arguments": {_KEY: _VALUE}},
    }
    calling: Any = {"role": "assistant", "content": form.no_content, "tool_calls": [form.apply(call)]}
    result: Message = {"role": "tool", "content": "7", "tool_call_id": _ID, "name": _CALL}
    text = _try(tokenizer, [message("user", "ask"), calling, result], has_tools)
    is_code = f"'{_KEY}'" in text or f'\\"{_KEY}' in text or "None" in text
    return all(mark in text for mark in (_CALL, _KEY, _VALUE)) and not is_code


@lru_cache(maxsize=16)
def reasoning_names(tokenizer: Tokenizer, has_tools: bool) -> tuple[str, ...]:
    """Names under which the chat template writes an assistant's reasoning."""
    return tuple(name for name in REASONING if _shows_reasoning(tokenizer, name, has_tools))


def _shows_reasoning(tokenizer: Tokenizer, name: str, has_tools: bool) -> bool:
    answer: Any = {**message("assistant", "answer"), name: _THOUGHT}
    return _THOUGHT in _try(tokenizer, [message("user", "ask"), answer], has_tools)


def _try(tokenizer: Tokenizer, messages: list[Message], has_tools: bool) -> str:
    """Rendering, or empty text for messages that the template refuses."""
    tools = [{"type": "function", "function": _SCHEMA}] if has_tools else None
    try:
        return rendered(tokenizer, messages, add_generation_prompt=False, tools=tools)
    except ConfigError:
        return ""


# messages in that form


def is_text(each: Message) -> bool:
    """Whether a message is text alone."""
    return set(each) == {"role", "content"}


_NO_CALLS = (
    "the model's chat template does not write out tool_calls: set model.chat_template.file to one that does, or write "
    "each call into 'content' as the model is to write it"
)


def fitted(tokenizer: Tokenizer, messages: Sequence[Message], *, has_tools: bool = False) -> list[Message]:
    """Messages in the form that the chat template takes.

    Errors: ConfigError for tool calls or reasoning that it does not write out, or arguments that are not JSON.
    """
    return [each if is_text(each) else _fitted(tokenizer, each, has_tools) for each in messages]


def _fitted(tokenizer: Tokenizer, each: Message, has_tools: bool) -> Message:
    fields: dict[str, Any] = dict(each)
    if name := next((name for name in REASONING if name in fields), None):
        fields[_reasoning_name(tokenizer, name, has_tools)] = fields.pop(name)
    if calls := each.get("tool_calls"):
        if (form := call_form(tokenizer, has_tools, "" if each.get("content") == "" else None)) is None:
            raise ConfigError(_NO_CALLS)
        fields["tool_calls"] = [form.apply(call) for call in calls]
        if not fields.get("content"):
            fields["content"] = form.no_content
    result: Any = fields
    return result


def _reasoning_name(tokenizer: Tokenizer, name: str, has_tools: bool) -> str:
    """Errors: ConfigError."""
    known = reasoning_names(tokenizer, has_tools)
    if not known:
        raise ConfigError(
            f"the model's chat template does not write out {name!r}: put it into 'content', such as between <think> "
            f"and </think>, or set model.chat_template.file to one that does"
        )
    return name if name in known else known[0]


# their calls, marked


def marked_call(call: MessageCall, mark: str) -> MessageCall:
    """Call whose name and arguments are marks, each another one.

    Errors: ConfigError for arguments that are not JSON.
    """
    function = call["function"]
    names = arguments_of(function.get("arguments"), f"arguments of {function['name']}")
    arguments = {name: f"{mark}argument-{number}-" for number, name in enumerate(names)}
    return {**call, "function": {"name": f"{mark}name-", "arguments": arguments}}


def marks_of(call: MessageCall) -> list[str]:
    """Marks of a marked call."""
    arguments: Any = call["function"]["arguments"]
    return [call["function"]["name"], *arguments.values()]


# their texts


def with_texts(each: Message, change: Callable[[str], str]) -> Message:
    """Message with each of its texts changed, those of tool calls too; its role stays.

    Errors: ConfigError for arguments of a call that are not JSON.
    """
    changed: Any = {
        name: changed_texts(value, change) for name, value in each.items() if name not in ("role", "tool_calls")
    }
    if calls := each.get("tool_calls"):
        changed["tool_calls"] = [_call(call, change) for call in calls]
    return {"role": each["role"]} | changed


def _call(call: MessageCall, change: Callable[[str], str]) -> Any:
    function = call["function"]
    arguments = arguments_of(function.get("arguments"), f"arguments of {function['name']}")
    changed = {"name": change(function["name"]), "arguments": changed_texts(arguments, change)}
    identity = {"id": change(call["id"])} if "id" in call else {}
    return {**call, **identity, "function": changed}


def changed_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Value of JSON with each of its texts changed, those of keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [changed_texts(part, change) for part in value]
    if isinstance(value, dict):
        return {change(name): changed_texts(part, change) for name, part in value.items()}
    return value


def texts_of(each: Message) -> list[str]:
    """Texts of a message, those of tool calls too."""
    texts: list[str] = []
    with_texts(each, _keeping(texts))
    return texts


def texts_in(value: Any) -> list[str]:
    """Texts of a value of JSON, those of keys too."""
    texts: list[str] = []
    changed_texts(value, _keeping(texts))
    return texts


def _keeping(texts: list[str]) -> Callable[[str], str]:
    def keep(text: str) -> str:
        texts.append(text)
        return text

    return keep

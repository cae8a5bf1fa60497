"""Rows in the shapes that the field writes them in become what is asked and what is answered. Pure.

    demonstrations   messages | prompt, completion | text
    pairs            chosen, rejected, and prompt unless both begin with it; margin if there is one
    labels           prompt, completion, label (true: desirable)

Each is text or a list of messages (row_messages.py), one kind in all columns of a row; ``tools`` and
``chat_template_kwargs`` may stand beside them. Whatever is wrong is a ConfigError: one line with the row's place.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, Literal

from titan_rl.config.load import ConfigError
from titan_rl.data.numbers import as_float
from titan_rl.data.rows.column_names import SAME, SHARED
from titan_rl.data.rows.row_fields import joined, names, said, shown, text
from titan_rl.data.rows.row_images import take_images
from titan_rl.data.rows.row_messages import Schema, messages, template_options, tools
from titan_rl.data.rows.splits import key
from titan_rl.data.text.messages import Message

Kind = Literal["demonstrations", "pairs", "labels"]
Format = Literal["auto", "messages", "prompt_completion", "text", "pairs", "labels"]
Written = str | list[Message]
FORMATS: dict[str, tuple[Format, ...]] = {
    "demonstrations": ("messages", "prompt_completion", "text"),
    "pairs": ("pairs",),
    "labels": ("labels",),
}
"""What an algorithm can be trained on, by its ``trains_on``."""


@dataclass(frozen=True)
class ParsedRow:
    """Content of a row: one answer, or a chosen and a rejected one."""

    place: str
    prompt: Written
    """Empty: there is nothing before the answer (text), or all messages are in the answer."""
    answers: list[Written]
    value: float = 1.0
    """Of a pair: the margin by which the first is better. Of a label: 1 or -1."""
    tools: Sequence[Schema] = ()
    """Schemas of what the assistant may call."""
    template_options: dict[str, Any] = field(default_factory=dict)
    """The row's own options for the chat template."""
    source: int = 0
    """Number of its source among those of the file setting."""

    @property
    def text(self) -> str:
        """Question as one text: the rows with the same one are trained on or held out together."""
        if self.prompt:
            return _as_text(self.prompt)
        [answer] = self.answers
        return answer if isinstance(answer, str) else joined(_before_answer(answer))

    @property
    def question_key(self) -> str:
        """What tells its question from others."""
        return self.text


def _as_text(written: Written) -> str:
    return written if isinstance(written, str) else joined(written)


def _before_answer(conversation: list[Message]) -> list[Message]:
    roles = [message["role"] for message in conversation]
    return conversation[: roles.index("assistant")]


def read_row(
    place: str, columns: dict[str, Any], kind: Kind, format: Format, mapped: Collection[str] = ()
) -> ParsedRow:
    """Parsed row of a data file.

    ``format``: one that goes with ``kind``, or ``auto``. ``mapped``: columns that the user named. Errors: ConfigError,
    for a mapped column that is not read, too.
    """
    format = _format(place, columns, kind) if format == "auto" else format
    read = {*_READ[format], *SHARED}
    unread = (name for name in mapped if columns.get(name) is not None and SAME.get(name, name) not in read)
    if name := min(unread, key=lambda each: (each not in SAME, each), default=None):  # as the user wrote it
        raise ConfigError(
            f"{place}: data.columns names {name!r}, and the row is read as {' and '.join(map(repr, _READ[format]))}: "
            f"leave it out, or set data.format"
        )
    images, columns = take_images(place, columns)
    if images:
        raise ConfigError(f"{place}: images are shown in tasks alone: set task.name = 'jsonl', or leave the column out")
    row = _READERS[format](place, columns)
    return replace(row, tools=tools(place, columns), template_options=template_options(place, columns))


def _format(place: str, columns: dict[str, Any], kind: Kind) -> Format:
    """By the columns that are there."""
    if kind != "demonstrations":
        return FORMATS[kind][0]
    signs: dict[str, Format] = {"messages": "messages", "completion": "prompt_completion", "text": "text"}
    present = [name for name in signs if columns.get(name) is not None]
    if not present:
        listing = names(columns, [*signs, "prompt"])
        raise ConfigError(
            f"{place}: no 'messages', no 'prompt' and 'completion', and no 'text'; {listing}; name its own by "
            f"data.columns, such as {{ prompt = 'question', completion = 'response' }}"
        )
    if len(present) > 1:
        raise ConfigError(f"{place}: {' and '.join(map(repr, present))}: set data.format to say which is meant")
    return signs[present[0]]


def _read_messages(place: str, columns: dict[str, Any]) -> ParsedRow:
    conversation = messages(place, "messages", _needed(place, columns, "messages"))
    _check_answered(place, "messages", conversation)
    if conversation[0]["role"] == "assistant":
        raise ConfigError(f"{place}: 'messages' begins with the assistant's: put what it answers before it")
    return ParsedRow(place, "", [conversation])


def _read_text(place: str, columns: dict[str, Any]) -> ParsedRow:
    return ParsedRow(place, "", [text(place, "text", _needed(place, columns, "text"))])


def _read_completion(place: str, columns: dict[str, Any]) -> ParsedRow:
    prompt, completion = _prompt(place, columns), _answer(place, columns, "completion")
    _check_alike(place, prompt=prompt, completion=completion)
    return ParsedRow(place, prompt, [_behind(prompt, completion)])


def _read_label(place: str, columns: dict[str, Any]) -> ParsedRow:
    row, label = _read_completion(place, columns), _needed(place, columns, "label")
    if label not in (True, False):  # 1 and 0 too
        raise ConfigError(f"{place}: 'label' is {shown(label)}: give true (desirable) or false")
    return ParsedRow(place, row.prompt, row.answers, 1.0 if label else -1.0)


def _read_pair(place: str, columns: dict[str, Any]) -> ParsedRow:
    answers = [_answer(place, columns, name) for name in ("chosen", "rejected")]
    _check_alike(place, chosen=answers[0], rejected=answers[1])
    if columns.get("prompt") is not None:
        prompt = _prompt(place, columns)
        _check_alike(place, prompt=prompt, chosen=answers[0])
        answers = [_behind(prompt, answer) for answer in answers]
    else:
        prompt, answers = _common(place, answers)
    if answers[0] == answers[1]:
        raise ConfigError(f"{place}: 'chosen' and 'rejected' are the same: leave the row out")
    return ParsedRow(place, prompt, answers, _margin(place, columns.get("margin")))


_READ: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "prompt_completion": ("prompt", "completion"),
    "text": ("text",),
    "pairs": ("prompt", "chosen", "rejected", "margin"),
    "labels": ("prompt", "completion", "label"),
}
"""Columns that a format reads."""
_READERS: dict[str, Callable[[str, dict[str, Any]], ParsedRow]] = {
    "messages": _read_messages,
    "prompt_completion": _read_completion,
    "text": _read_text,
    "pairs": _read_pair,
    "labels": _read_label,
}


# columns


def _needed(place: str, columns: dict[str, Any], name: str) -> Any:
    if columns.get(name) is None:
        mend = f"data.columns = {{ {name} = '...' }} names another"
        raise ConfigError(f"{place}: no {name!r}; {names(columns, [name])}; {mend}")
    return columns[name]


def _written(place: str, columns: dict[str, Any], name: str) -> Written:
    value = _needed(place, columns, name)
    return messages(place, name, value) if isinstance(value, list) else text(place, name, value)


def _prompt(place: str, columns: dict[str, Any]) -> Written:
    prompt = _written(place, columns, "prompt")
    if isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
        raise ConfigError(f"{place}: the last of 'prompt' is the assistant's own: end with one that it must answer")
    return prompt


def _answer(place: str, columns: dict[str, Any], name: str) -> Written:
    answer = _written(place, columns, name)
    if isinstance(answer, list):
        _check_answered(place, name, answer)
    return answer


def _check_answered(place: str, name: str, conversation: list[Message]) -> None:
    if conversation[-1]["role"] != "assistant":
        raise ConfigError(f"{place}: the last of {name!r} is not the assistant's: there is no answer to learn from")


def _check_alike(place: str, **columns: Written) -> None:
    if len({isinstance(value, str) for value in columns.values()}) > 1:
        raise ConfigError(f"{place}: {' and '.join(map(repr, columns))}: give both as text, or both as messages")


def _behind(prompt: Written, answer: Written) -> Written:
    """Answer without the prompt's messages, where a conversation begins with them."""
    if isinstance(prompt, str) or isinstance(answer, str) or _words(answer[: len(prompt)]) != _words(prompt):
        return answer
    return answer[len(prompt) :]


def _words(conversation: list[Message]) -> list[tuple[str, str]]:
    return [(message["role"], key(said(message))) for message in conversation]


def _margin(place: str, value: Any) -> float:
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(as_float(value)):
        raise ConfigError(f"{place}: 'margin' is {shown(value)}: give a number")
    return float(value)


# a pair without a prompt


def _common(place: str, answers: list[Written]) -> tuple[Written, list[Written]]:
    """What both begin with is the prompt. Errors: ConfigError if that is nothing, or if nothing is left of one."""
    alike = takewhile(lambda each: each[0] == each[1], zip(*answers, strict=False))
    count = sum(1 for _ in alike)
    texts = [answer for answer in answers if isinstance(answer, str)]
    conversations = [answer for answer in answers if not isinstance(answer, str)]  # all are the one or the other
    count = _whole_words(texts, count) if texts else _whole_question(conversations[0], count)
    if not count or not all(answer[count:] for answer in answers):
        raise ConfigError(f"{place}: 'chosen' and 'rejected' do not begin alike and then differ: give 'prompt' too")
    if texts:
        return text(place, "prompt", texts[0][:count]), [text(place, "answer", each[count:]) for each in texts]
    for answer in conversations:
        _check_answered(place, "chosen", answer[count:])
    return conversations[0][:count], [each[count:] for each in conversations]


def _whole_words(answers: Sequence[str], count: int) -> int:
    """Up to the last white space, which belongs to the answers: tokenizers keep a word's space before it."""
    while count and not all(answer[count : count + 1].isspace() for answer in answers):
        count -= 1
    return count


def _whole_question(conversation: list[Message], count: int) -> int:
    """Up to a message that the assistant must answer."""
    while count and conversation[count - 1]["role"] == "assistant":
        count -= 1
    return count

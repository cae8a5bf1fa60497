"""Rows of data files as prompts with answers, checked row by row.

A row asks by exactly one of ``prompt``, ``question`` (text, or messages) and ``messages``; ``answer`` is text or a
number. ``tools`` and ``chat_template_kwargs`` go to the chat template. All columns are kept for the reward function.
Whatever is wrong is a ConfigError: one line with the file and the line.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titan_rl.config.load import ConfigError
from titan_rl.data.rows.row_fields import check_finite, encodable, joined, names, shown, text, written
from titan_rl.data.rows.row_files import read_raw_rows
from titan_rl.data.rows.row_messages import Schema, messages, template_options, tools
from titan_rl.data.types import Message

_PROMPTS = ("prompt", "question", "messages")


@dataclass(frozen=True)
class DataRow:
    """Checked row of a data file."""

    place: str
    """Origin, for error messages: ``questions.jsonl line 7``."""
    columns: dict[str, Any]
    text: str
    """The prompt, as one text."""
    messages: list[Message] | None
    answer: str | None
    tools: Sequence[Schema] = ()
    """What the model may call."""
    template_options: dict[str, Any] = field(default_factory=dict)
    """The row's own, for the chat template."""


def read_rows(path: Path) -> list[DataRow]:
    """Read all rows, in order. Errors: ConfigError."""
    try:
        rows = [_check_row(place, columns) for place, columns in read_raw_rows(path)]
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    if not rows:
        raise ConfigError(f"{path} holds no rows")
    return rows


def _check_row(place: str, columns: dict[str, Any]) -> DataRow:
    present = [name for name in _PROMPTS if columns.get(name) is not None]
    if not present:
        raise ConfigError(f"{place}: no 'prompt', 'question' or 'messages'; {names(columns, _PROMPTS)}")
    if len(present) > 1:
        raise ConfigError(
            f"{place}: {' and '.join(map(repr, present))}: keep one of them, and give the others new names"
        )
    [name] = present
    answer = _answer(place, columns.get("answer"))
    check_finite(place, columns)
    beside = tools(place, columns), template_options(place, columns)
    if name == "messages" or isinstance(columns[name], list):
        conversation = _conversation(place, name, columns[name])
        return DataRow(place, columns, joined(conversation), conversation, answer, *beside)
    return DataRow(place, columns, text(place, name, columns[name]), None, answer, *beside)


def without_answer(row: DataRow, reason: str) -> ConfigError:
    """Error for a row without a required answer."""
    return ConfigError(f"{row.place}: no 'answer', which {reason}; {names(row.columns, ['answer'])}")


def _answer(place: str, value: Any) -> str | None:
    """Errors: ConfigError for anything but text and numbers; a bool has no one way to be written."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ConfigError(f"{place}: 'answer' is {shown(value)}: give text or a number")
    if isinstance(value, str):
        return encodable(place, "answer", value)
    try:
        return written(value)
    except ValueError as error:
        raise ConfigError(f"{place}: 'answer': {error}") from None


def _conversation(place: str, name: str, value: Any) -> list[Message]:
    conversation = messages(place, name, value)
    if conversation[-1]["role"] == "assistant":
        raise ConfigError(f"{place}: the last of {name!r} is the assistant's own: end with one that it must answer")
    return conversation

"""Rows of data files as prompts with answers, checked row by row.

A row asks by exactly one of ``prompt``, ``question`` (text, or messages) and ``messages``, or as a public set does
(data/rows/public_shapes.py); ``answer`` is text or a number. ``tools`` and ``chat_template_kwargs`` go to the chat
template, ``images`` to a vision model (data/rows/row_images.py). All other columns are kept for the reward function.
Whatever is wrong is a ConfigError: one line with the file and the line.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from titan_rl.config.load import ConfigError
from titan_rl.data.images import question_key
from titan_rl.data.rows.column_names import with_names
from titan_rl.data.rows.file_sources import Source, list_names, read_sources
from titan_rl.data.rows.public_shapes import as_question, source_of
from titan_rl.data.rows.row_fields import check_finite, encodable, joined, names, shown, text, written
from titan_rl.data.rows.row_files import ReadFile, read_raw_rows
from titan_rl.data.rows.row_images import take_images
from titan_rl.data.rows.row_messages import Schema, messages, template_options, tools
from titan_rl.data.text.messages import Message

_SECTION = "task.options"


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
    worked: str = ""
    """Answer with its derivation, where the row has one."""
    images: tuple[bytes, ...] = ()
    """What it shows, encoded."""
    source: int = 0
    """Number of its source among those of the file setting."""

    @property
    def question_key(self) -> str:
        """What tells its question from others: its text and images."""
        return question_key(self.text, self.images)

    @property
    def set_name(self) -> str | None:
        """Name of the set that the row says it is of (``data_source`` and others)."""
        return source_of(self.columns)


Parse = Callable[[str, dict[str, Any]], DataRow | None]
"""Row of a place and its columns; None leaves it out."""


def read_rows(sources: Sequence[Source], parse: Parse, read: ReadFile = read_raw_rows) -> list[DataRow]:
    """Read all rows of all sources that are not left out, in order. Errors: ConfigError."""
    try:
        parsed = ((number, parse(*row)) for number, row in read_sources(sources, read))
        rows = [replace(row, source=number) for number, row in parsed if row is not None]
    except OSError as error:
        raise ConfigError(f"cannot read {list_names(sources)}: {error}") from None
    if not rows:
        raise ConfigError(f"{', '.join(str(path) for source in sources for path in source.paths)} holds no rows")
    return rows


def parser_of(mapping: Mapping[str, str]) -> Parse:
    """Parser of rows whose columns have other names. ``mapping``: ``task.options.columns``."""

    def parse(place: str, columns: dict[str, Any]) -> DataRow:
        return parse_row(place, with_names(place, columns, mapping, f"{_SECTION}.columns"), mapping)

    return parse


def parse_row(place: str, columns: dict[str, Any], mapped: Mapping[str, str] = MappingProxyType({})) -> DataRow:
    """Checked row. Errors: ConfigError."""
    images, columns = take_images(place, columns)
    question = as_question(place, columns, mapped, _SECTION)
    name, columns = question.column, question.columns
    answer = _answer(place, question.answer)
    check_finite(place, columns)
    conversation = _conversation(place, name, columns[name], bool(images)) if name == "messages" else None
    asked = text(place, name, columns[name]) if conversation is None else joined(conversation)
    row = DataRow(place, columns, asked, conversation, answer, tools(place, columns), template_options(place, columns))
    return replace(row, worked=question.worked, images=images)


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


def _conversation(place: str, name: str, value: Any, has_images: bool) -> list[Message]:
    conversation = messages(place, name, value, has_images=has_images)
    if conversation[-1]["role"] == "assistant":
        raise ConfigError(f"{place}: the last of {name!r} is the assistant's own: end with one that it must answer")
    return conversation

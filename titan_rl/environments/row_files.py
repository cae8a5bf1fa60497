"""Data files, read and checked row by row: JSON lines or Parquet become prompts with answers.

A row asks by exactly one of ``prompt``, ``question`` (text) and ``messages`` (a list of {role, content}); ``answer``
is text or a number. All columns are kept for the reward function. Whatever is wrong is a ConfigError: one line with
the file and the line.
"""

import difflib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_rl.config.load import ConfigError, nearest

Message = dict[str, str]
_JSON_LINES, _PARQUET = (".jsonl", ".json", ".ndjson"), (".parquet",)
_PROMPTS = ("prompt", "question", "messages")
_ROLES = ("system", "user", "assistant", "tool")
_SHOWN_NAMES = 8


@dataclass(frozen=True)
class DataRow:
    """One row, checked."""

    place: str
    """For messages: ``questions.jsonl line 7``."""
    columns: dict[str, Any]
    text: str
    """What is asked, as one text."""
    messages: list[Message] | None
    answer: str | None


def find_file(setting: str, name: str, folders: Sequence[str]) -> Path:
    """A data file by its path, a relative one in ``folders``, in turn. Errors: ConfigError."""
    suffixes = (*_JSON_LINES, *_PARQUET)
    if Path(name).suffix not in suffixes:
        raise ConfigError(f"{setting} = {name!r}: the name must end in {', '.join(suffixes)}")
    places = [Path(folder, Path(name).expanduser()) for folder in folders or ["."]]
    for place in places:
        if place.is_file():
            return place
    near = {path.name for place in places for path in place.parent.glob("*") if path.suffix in suffixes}
    hint = nearest(Path(name).name, near) if near else "correct the path"
    raise ConfigError(f"{setting} = {name!r}: there is no file {' or '.join(dict.fromkeys(map(str, places)))}: {hint}")


def read_rows(path: Path) -> list[DataRow]:
    """All rows, in order. Errors: ConfigError."""
    read = _read_parquet if path.suffix in _PARQUET else _read_json_lines
    try:
        rows = [_check_row(place, columns) for place, columns in read(path)]
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    if not rows:
        raise ConfigError(f"{path} holds no rows")
    return rows


def _read_json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            place = f"{path.name} line {number}"
            if not (line := line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line).strip():
                continue
            try:
                columns = json.loads(line.decode())
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{place}: not JSON: {error}; each line must be one JSON object") from None
            if not isinstance(columns, dict):
                raise ConfigError(f"{place}: a {type(columns).__name__}: each line must be one JSON object")
            yield place, columns


def _read_parquet(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows = pq.read_table(path).to_pylist()
    except (pa.ArrowException, ValueError) as error:
        raise ConfigError(f"{path} is not Parquet: {' '.join(str(error).split())}") from None
    for number, columns in enumerate(rows, 1):
        place = f"{path.name} row {number}"
        yield place, {name: _plain(value, f"{place}: column {name!r}") for name, value in columns.items()}


def _plain(value: Any, where: str) -> Any:
    """As JSON would have it: a row travels to the scorer as JSON. Dates and decimals become text."""
    if isinstance(value, bytes):
        raise ConfigError(f"{where} holds bytes, which a reward function cannot be given: leave the column out")
    if isinstance(value, dict):
        return {str(key): _plain(part, where) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part, where) for part in value]
    return value if value is None or isinstance(value, str | int | float) else str(value)


def _check_row(place: str, columns: dict[str, Any]) -> DataRow:
    given = [name for name in _PROMPTS if columns.get(name) is not None]
    if not given:
        raise ConfigError(f"{place}: no 'prompt', 'question' or 'messages'; {_names(columns, _PROMPTS)}")
    if len(given) > 1:
        raise ConfigError(f"{place}: {' and '.join(map(repr, given))}: keep one of them, and give the others new names")
    [name] = given
    answer = _answer(place, columns.get("answer"))
    if name == "messages":
        messages = _messages(place, columns[name])
        return DataRow(place, columns, _joined(messages), messages, answer)
    return DataRow(place, columns, _text(place, name, columns[name]), None, answer)


def without_answer(row: DataRow, wanted_by: str) -> ConfigError:
    """The mistake of a row that must have an answer."""
    return ConfigError(f"{row.place}: no 'answer', which {wanted_by}; {_names(row.columns, ['answer'])}")


def _names(columns: dict[str, Any], wanted: Sequence[str]) -> str:
    """What a row has instead, the likely misspelling first."""
    close = [name for name in columns if difflib.get_close_matches(name, wanted, n=1, cutoff=0.7)]
    names = list(dict.fromkeys([*close, *columns]))
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    empty = [name for name in wanted if name in columns]
    said = f"it has {', '.join(map(repr, names[:_SHOWN_NAMES]))}{more}" if names else "it is empty"
    return f"{said}, but {', '.join(map(repr, empty))} is null" if empty else said


def _text(place: str, name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{place}: {name!r} is {_shown(value)}: give text")
    if not value.strip():
        raise ConfigError(f"{place}: {name!r} is empty: give text, or leave the row out")
    return _encodable(place, name, value)


def _encodable(place: str, name: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{place}: {name!r} holds half a character (a lone surrogate) at {error.start}") from None
    return text


def _answer(place: str, value: Any) -> str | None:
    """Errors: ConfigError for anything but text and numbers; a bool has no one way to be written."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ConfigError(f"{place}: 'answer' is {_shown(value)}: give text or a number")
    return _encodable(place, "answer", str(value))


def _messages(place: str, value: Any) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{place}: 'messages' is {_shown(value)}: give a list of {{role, content}}")
    messages = [_message(f"{place}: message {number}", message) for number, message in enumerate(value, 1)]
    if messages[-1]["role"] == "assistant":
        raise ConfigError(f"{place}: the last of 'messages' is the assistant's own: end with one that it must answer")
    return messages


def _message(place: str, message: Any) -> Message:
    if not isinstance(message, dict):
        raise ConfigError(f"{place} is {_shown(message)}: give {{role, content}}")
    given = {key: value for key, value in message.items() if value is not None}  # Parquet has all keys in all rows
    if set(given) != {"role", "content"}:
        raise ConfigError(f"{place} has {', '.join(map(repr, given)) or 'nothing'}: give role and content")
    if given["role"] not in _ROLES:
        raise ConfigError(f"{place}: role {given['role']!r} is unknown: {nearest(str(given['role']), _ROLES)}")
    return {"role": given["role"], "content": _text(place, "content", given["content"])}


def _joined(messages: list[Message]) -> str:
    if len(messages) == 1:
        return messages[0]["content"]
    return "\n".join(f"{message['role']}: {message['content']}" for message in messages)


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:60]}..."

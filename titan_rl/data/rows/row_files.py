"""Data files, read row by row: JSON lines, Parquet, and directories as ``datasets`` saves them.

A row is a place for messages (``questions.jsonl line 7``) and its columns as JSON would have them. Whatever is wrong is
a ConfigError of one line. What the columns must be is checked by whoever wants rows (``row_fields.py`` helps).
"""

from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from titan_rl.config.io.bounded_files import (
    KeyTwice,
    RefusedFile,
    check_file,
    each_once,
    json_fault,
    parse_json,
    read_json,
    read_lines,
)
from titan_rl.config.load import ConfigError, nearest
from titan_rl.data.rows.row_fields import EXACT
from titan_rl.data.rows.row_images import IMAGE, IMAGES, as_uris
from titan_rl.data.rows.row_messages import without_filled

_JSON_LINES, _PARQUET = (".jsonl", ".json", ".ndjson"), (".parquet",)
SUFFIXES = (*_JSON_LINES, *_PARQUET)
_LINE_BYTES = 16 << 20
"""Of a row: millions of tokens."""
_ROWS_AT_ONCE = 1024
"""Of a table, which become objects."""
RawRow = tuple[str, dict[str, Any]]
"""Place and columns."""
ReadFile = Callable[[Path, str], Iterator[RawRow]]
"""Reads a file, or a directory, by its path and its name in the rows' places."""


def find_file(setting: str, name: str, folders: Sequence[str]) -> Path:
    """A data file by its path, a relative one in ``folders``, in turn. Errors: ConfigError."""
    places = [Path(folder, without_tilde(setting, name)) for folder in folders or ["."]]
    if Path(name).suffix not in SUFFIXES:
        raise ConfigError(
            f"{setting} = {name!r}: the name must end in {', '.join(SUFFIXES)}, or be a directory that "
            f"datasets.save_to_disk wrote, or a data set of the Hub, as in organization/name:config:split"
        )
    for place in places:
        if place.is_file():
            return place
    near = {path.name for place in places for path in place.parent.glob("*") if path.suffix in SUFFIXES}
    hint = nearest(Path(name).name, near) if near else "correct the path"
    raise ConfigError(f"{setting} = {name!r}: there is no file {' or '.join(dict.fromkeys(map(str, places)))}: {hint}")


def without_tilde(setting: str, name: str) -> Path:
    """Path with the user's folder in the place of ``~``. Errors: ConfigError for the folder of one who has none."""
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{setting} = {name!r}: {error}: give the whole path") from None


def read_raw_rows(path: Path, name: str = "") -> Iterator[RawRow]:
    """Rows of a file, in order. ``name``: of the file in the rows' places; by default its own. Errors: ConfigError;
    OSError."""
    name = name or path.name
    if path.is_dir():
        return _read_directory(path, name)
    return _read_parquet(path, name) if path.suffix in _PARQUET else _read_json_lines(path, name)


def data_files(path: Path) -> list[Path]:
    """Files of a run's data: the file, or the files of a directory."""
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


def _read_json_lines(path: Path, name: str) -> Iterator[RawRow]:
    for number, line in enumerate(read_lines(path, _LINE_BYTES), 1):
        place = f"{name} line {number}"
        if not (line := line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line).strip():
            continue
        try:
            columns = parse_json(line.decode(), pairs=each_once)
        except KeyTwice as error:
            raise ConfigError(f"{place}: {error}") from None
        except ValueError as error:
            raise ConfigError(f"{place}: not JSON: {json_fault(error)}; each line must be one JSON object") from None
        if not isinstance(columns, dict):
            raise ConfigError(f"{place}: of type {type(columns).__name__}: each line must be one JSON object")
        yield place, columns


def _read_parquet(path: Path, name: str) -> Iterator[RawRow]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    from titan_rl.data.storage.tables import check_table

    try:
        check_table(path)
        _check_names(path, pq.read_schema(path).names)
        with pq.ParquetFile(path) as file:  # pyarrow's read_table imports pandas
            table = file.read()
    except ConfigError:
        raise
    except (pa.ArrowException, ValueError) as error:
        raise ConfigError(f"{path} is not Parquet: {' '.join(str(error).split())}") from None
    yield from _plain_rows(name, _rows_in_turn(path, table))


def _read_directory(path: Path, name: str) -> Iterator[RawRow]:
    """Of ``datasets``, by the list of Arrow files that it keeps there: nothing of that library runs."""
    import pyarrow as pa

    if (path / "dataset_dict.json").is_file():
        splits = sorted(folder.name for folder in path.iterdir() if folder.is_dir())
        raise ConfigError(
            f"{path} holds several datasets: name one of them ({', '.join(splits)}), as in {path.name}:train"
        )
    tables = []
    for file in _arrow_files(path):
        try:
            check_file(file)
            with pa.memory_map(str(file)) as source:
                tables.append(_as_table(file, pa.ipc.open_stream(source)))
        except RefusedFile:
            raise
        except (pa.ArrowException, ValueError) as error:
            raise ConfigError(f"{file} is not an Arrow stream: {' '.join(str(error).split())}") from None
    yield from _plain_rows(name, (row for table in tables for row in _rows_in_turn(path, table)))


def _as_table(file: Path, batches: Any) -> Any:
    """Of an Arrow stream's batches, a table. Errors: RefusedFile."""
    import pyarrow as pa

    from titan_rl.data.storage.tables import check_batch

    size, parts = 0, []
    for batch in batches:
        size = check_batch(file, batch, size)
        parts.append(batch)
    return pa.Table.from_batches(parts, batches.schema)


def _rows_in_turn(path: Path, table: Any) -> Iterator[dict[str, Any]]:
    _check_names(path, table.column_names)
    for start in range(0, len(table), _ROWS_AT_ONCE):
        yield from _rows(path, table.slice(start, _ROWS_AT_ONCE))


def _rows(path: Path, table: Any) -> list[dict[str, Any]]:
    """Of an Arrow table; numbers of half and single precision by the shortest decimal that is one there, which is what
    was written: 0.1, and not 0.10000000149011612.

    Errors: ConfigError for two columns of a name, text that is not UTF-8, or a time that Python has not."""
    _check_names(path, table.column_names)
    try:
        rows = table.to_pylist()
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{path} holds a value that cannot be read: {' '.join(str(error).split())}") from None
    for name, shorten in ((field.name, _shortening(field.type)) for field in table.schema):
        if shorten is not None:
            for row in rows:
                row[name] = shorten(row[name])
    return rows


def _check_names(path: Path, names: Sequence[str]) -> None:
    if (twice := next((name for name in names if names.count(name) > 1), None)) is not None:  # which may be ""
        raise ConfigError(f"{path}: two columns have the name {twice!r}: rename one of them, or leave it out")


Shorten = Callable[[Any], Any]


def _shortening(kind: Any) -> Shorten | None:
    """What becomes of values of an Arrow type that holds numbers of less than double precision; None for others."""
    import pyarrow.types as of

    if of.is_float16(kind) or of.is_float32(kind):
        number = np.float16 if of.is_float16(kind) else np.float32
        return _unless_null(lambda value: float(str(number(value))))
    if of.is_dictionary(kind):
        return _shortening(kind.value_type)
    if of.is_list(kind) or of.is_large_list(kind) or of.is_fixed_size_list(kind):
        inner = _shortening(kind.value_type)
        return None if inner is None else _unless_null(lambda values: [inner(value) for value in values])
    if of.is_struct(kind):
        parts = {field.name: part for field in kind if (part := _shortening(field.type)) is not None}
        return _unless_null(lambda value: value | {name: parts[name](value[name]) for name in parts}) if parts else None
    return None


def _unless_null(shorten: Shorten) -> Shorten:
    return lambda value: None if value is None else shorten(value)


def _arrow_files(path: Path) -> list[Path]:
    """Errors: ConfigError for a directory that ``datasets`` did not save, or whose list leads out of it."""
    try:
        state = read_json(path / "state.json")
        names = [entry["filename"] for entry in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"{path} is no directory that datasets.save_to_disk wrote: its state.json cannot be read "
            f"({type(error).__name__})"
        ) from None
    if state.get("_indices_files"):
        raise ConfigError(f"{path} is a selection of rows: write it out with flatten_indices() before save_to_disk")
    if not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise ConfigError(f"{path}: its state.json names files outside of it: save it again")
    return [path / name for name in names]


def _plain_rows(name: str, rows: Any) -> Iterator[RawRow]:
    for number, columns in enumerate(rows, 1):
        place = f"{name} row {number}"
        columns |= {column: as_uris(columns[column]) for column in (IMAGES, IMAGE) if column in columns}
        plain = {column: _plain(value, f"{place}: column {column!r}") for column, value in columns.items()}
        yield place, without_filled(plain)


def _plain(value: Any, where: str) -> Any:
    """As JSON would have it: a row travels to the scorer as JSON. Dates and decimals become text, whole ones as
    integers have it."""
    if isinstance(value, bytes):
        raise ConfigError(f"{where} holds bytes, which a reward function cannot be given: leave the column out")
    if isinstance(value, dict):
        return {str(key): _plain(part, where) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part, where) for part in value]
    if isinstance(value, Decimal) and value.is_finite():
        return format(value.to_integral_value() if value == value.to_integral_value() else value.normalize(EXACT), "f")
    return value if value is None or isinstance(value, str | int | float) else str(value)

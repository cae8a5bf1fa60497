"""Files that somebody else may have made, opened as data and within limits: of kind, bytes, lines and nesting.

A run directory, a model or a data file may be anybody's. A pipe or a device in it would be waited for, and a sparse
file, a line without an end or a thousand nested lists would fill the memory. What a limit refuses is a ConfigError of
one line; what is not there, or may not be read, is an OSError as ever.

Left to others: Parquet and Arrow (data/storage/tables.py), a ledger's database (records/ledger/audit.py), DCP's
metadata (trainer/state/plain_state.py). Servers' answers are bounded where they are received
(environments/servers/http_session.py)."""

import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from titan_rl.config.errors import ConfigError

JSON_BYTES = 16 << 20
"""Of a file that is read whole. As Python objects it may take 25 times as much."""
TOKENIZER_BYTES = 128 << 20
"""Of a file that a tokenizer's own library reads."""
LINE_BYTES = 4 << 20
"""Of a line of a run's records."""
DEPTH = 100
"""Lists and objects within each other."""
_SPARSE_BYTES, _SPARSE_RATIO = 64 << 20, 64
"""A larger file, of which less than one part in so many is stored, is refused. Compressing file systems store more."""
_KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class RefusedFile(ConfigError):
    """A file that is none, or is beyond a limit; says which, and how to mend it."""


def open_file(path: str | Path, most: int | None = None, *, may_be_sparse: bool = False) -> IO[bytes]:
    """A plain file of at most ``most`` bytes. Links are followed. Errors: RefusedFile; OSError."""
    _check_kind(path, os.stat(path).st_mode)  # opening a device may do something
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        status = os.fstat(descriptor)
        _check_kind(path, status.st_mode)
        if most is not None and status.st_size > most:
            raise _too_large(path, f"{status.st_size / 1e6:,.0f} MB", most)
        if not may_be_sparse and _is_sparse(descriptor, status):
            size, stored = status.st_size / 1e6, status.st_blocks * 512 / 1e6
            raise RefusedFile(f"{path} is sparse: of {size:,.0f} MB only {stored:,.1f} are stored; copy it again")
        return open(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _check_kind(path: str | Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "of another kind")
        raise RefusedFile(f"{path} is {kind}, not a plain file: put one there, or move it away")


def _is_sparse(descriptor: int, status: os.stat_result) -> bool:
    """Where a file system does not tell of holes, it is not."""
    if status.st_size <= max(_SPARSE_BYTES, status.st_blocks * 512 * _SPARSE_RATIO):
        return False
    hole = os.lseek(descriptor, 0, os.SEEK_HOLE)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return hole < status.st_size


def _too_large(path: str | Path, size: str, most: int) -> RefusedFile:
    return RefusedFile(f"{path} has {size}, and at most {most >> 20} MiB are read: it is damaged, or something else")


def read_bytes(path: str | Path, most: int = JSON_BYTES) -> bytes:
    """Errors: RefusedFile; OSError."""
    with open_file(path, most) as file:
        data = file.read(most + 1)  # some files have no size, and one may grow
    if len(data) > most:
        raise _too_large(path, f"more than {len(data) / 1e6:,.0f} MB", most)
    return data


def read_text(path: str | Path, most: int = JSON_BYTES, *, errors: str = "strict") -> str:
    """UTF-8. Errors: RefusedFile; OSError; UnicodeDecodeError unless ``errors`` says otherwise."""
    return read_bytes(path, most).decode(errors=errors)


def read_json(path: str | Path, most: int = JSON_BYTES, *, pairs: Callable[[list], Any] | None = None) -> Any:
    """``pairs``: makes an object of its keys and values. Errors: as ``read_bytes``, and those of ``parse_json``."""
    return parse_json(read_bytes(path, most), pairs=pairs)


def parse_json(data: bytes | str, *, pairs: Callable[[list], Any] | None = None) -> Any:
    """Errors: ValueError for what is not JSON, or nests too deeply to be handed on."""
    try:
        value = json.loads(data, object_pairs_hook=pairs)
    except RecursionError:
        raise ValueError(_DEEP) from None
    level = [value]
    for _ in range(DEPTH):
        containers = [each for each in level if isinstance(each, dict | list)]
        if not containers:
            return value
        level = [inner for each in containers for inner in (each.values() if isinstance(each, dict) else each)]
    if any(isinstance(each, dict | list) for each in level):
        raise ValueError(_DEEP)
    return value


def json_fault(error: ValueError) -> str:
    """What is wrong with JSON of one line, without a line number of its own beside that of the file."""
    return f"{error.msg} at character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else str(error)


class KeyTwice(ValueError):
    """A key stands twice in an object of JSON."""


def each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Object of JSON. Errors: KeyTwice for a key that stands there twice, of which Python would take the last."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise KeyTwice(f"the key {twice!r} stands there twice: keep one of them")
    return fields


_DEEP = f"it nests more than {DEPTH} deep"


def read_lines(path: str | Path, most: int = LINE_BYTES, start: int = 0) -> Iterator[bytes]:
    """Lines with their ends, from byte ``start`` on. Errors: RefusedFile, also for a line longer than ``most``."""
    with open_file(path) as file:
        file.seek(start)
        number = 0
        while line := file.readline(most + 1):
            number += 1
            if len(line) > most:
                where = f"line {number}" if not start else f"the line at byte {start}"
                raise RefusedFile(
                    f"{path} {where} is longer than {most >> 20} MiB: it is damaged, or something else; end lines "
                    f"with a line feed"
                )
            yield line


def check_file(path: str | Path, most: int | None = None) -> None:
    """For a file that a library will open by its path. Errors: RefusedFile; OSError."""
    open_file(path, most).close()

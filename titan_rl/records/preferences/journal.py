"""Journal of judgements, or of other entries: JSON lines, each on disk before anybody is told that it is saved.

A process that is killed leaves at most one torn line at the end, of an entry that nobody was told was saved; it is cut
off when the journal is opened again. Any other line that is no entry is damage, and is refused by its number.
"""

import json
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from titan_rl.config.io.bounded_files import check_file, each_once, parse_json, read_lines
from titan_rl.config.load import ConfigError
from titan_rl.data.storage.files import wanting
from titan_rl.records.preferences.judgements import Judgement, RefusedJudgement, judgement_of
from titan_rl.records.run_directory.rundir import sync_path

_LINE_BYTES = 4 << 20
"""An edit takes at most six bytes a character."""
Latest = dict[tuple[str, str], Judgement]
"""Judgement that counts, by item and labeller."""


class Entry(Protocol):
    """Entry of a journal, by an id that no other has."""

    @property
    def id(self) -> str: ...

    def as_dict(self) -> dict[str, Any]: ...


E = TypeVar("E", bound=Entry)


class EntryJournal(Generic[E]):
    """The only writer of a file of entries."""

    CHANGED: type[Exception] = ConfigError
    """Error of a file that something else changed."""

    def __init__(self, path: Path, parse: Callable[[Any], E], kind: str) -> None:
        """Open it, and cut a torn last line off. ``parse``: of an entry's fields; raises ValueError. ``kind``: what an
        entry is, for messages. Errors: ConfigError for damage; OSError."""
        if path.exists():
            check_file(path)
        self._path = path
        self.entries, whole = _read(path, parse, kind)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._size = whole
        os.ftruncate(self._descriptor, whole)
        self._end_last_line()
        os.fsync(self._descriptor)
        sync_path(path.parent)

    def _end_last_line(self) -> None:
        """A last line that lacks its end alone is an entry."""
        if self._size and not _ends(self._path):
            self._size += os.write(self._descriptor, b"\n")

    def append(self, entry: E) -> None:
        """Append an entry; when this comes back it is on disk.

        Errors: DiskFull, OSError; ``CHANGED`` if something else wrote to the file: it is no entry."""
        data = json.dumps(entry.as_dict(), ensure_ascii=False).encode() + b"\n"
        self._check_size()
        with wanting(self._path, len(data)):
            try:
                _write_all(self._descriptor, data)
                os.fsync(self._descriptor)
            except OSError:
                os.ftruncate(self._descriptor, self._size)  # half a line
                raise
        self._size += len(data)
        self.entries.append(entry)

    def _check_size(self) -> None:
        if os.fstat(self._descriptor).st_size != self._size:
            raise self.CHANGED(f"something else changed {self._path.name}: end the command, and begin it again")

    def close(self) -> None:
        os.close(self._descriptor)


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _ends(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


class Journal(EntryJournal[Judgement]):
    """The only writer of a collection's judgements."""

    CHANGED = RefusedJudgement

    def __init__(self, path: Path, choices: Sequence[str]) -> None:
        super().__init__(path, partial(judgement_of, choices=choices), "judgement")

    @property
    def judgements(self) -> list[Judgement]:
        return self.entries


def read_journal(path: Path, choices: Sequence[str]) -> list[Judgement]:
    """Judgements in order, of a journal that may be written meanwhile; each id once. Errors: ConfigError; OSError."""
    return _read(path, partial(judgement_of, choices=choices), "judgement")[0]


def _read(path: Path, parse: Callable[[Any], E], kind: str) -> tuple[list[E], int]:
    """Entries, and the bytes that they take up: without a torn last line."""
    entries: dict[str, E] = {}
    whole = 0
    for number, line in enumerate(read_lines(path, _LINE_BYTES) if path.exists() else (), 1):
        try:
            fields = parse_json(line, pairs=each_once)
        except ValueError:
            if not line.endswith(b"\n"):
                break
            raise _damage(path, number, kind, "it is not JSON") from None
        try:
            entry = parse(fields)
        except ValueError as error:
            raise _damage(path, number, kind, error) from None
        entries.setdefault(entry.id, entry)
        whole += len(line)
    return list(entries.values()), whole


def _damage(path: Path, number: int, kind: str, why: object) -> ConfigError:
    return ConfigError(f"{path} line {number} is no {kind} ({why}): restore or remove the line")


def latest(judgements: Iterable[Judgement]) -> Latest:
    """Judgements that count: of one labeller and item the last."""
    return {(judgement.item, judgement.who): judgement for judgement in judgements}

"""Journal of judgements: JSON lines, each on disk before anybody is told that it is saved.

A process that is killed leaves at most one torn line at the end, of a judgement that nobody was told was saved; it is
cut off when the journal is opened again. Any other line that is no judgement is damage, and is refused by its number.
"""

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from titan_rl.config.io.bounded_files import check_file, each_once, parse_json, read_lines
from titan_rl.config.load import ConfigError
from titan_rl.data.storage.files import wanting
from titan_rl.records.preferences.judgements import Judgement, RefusedJudgement, judgement_of
from titan_rl.records.run_directory.rundir import sync_path

_LINE_BYTES = 4 << 20
"""An edit takes at most six bytes a character."""
Latest = dict[tuple[str, str], Judgement]
"""Judgement that counts, by item and labeller."""


class Journal:
    """The only writer of a collection's judgements."""

    def __init__(self, path: Path, choices: Sequence[str]) -> None:
        """Open it, and cut a torn last line off. Errors: ConfigError for damage; OSError."""
        if path.exists():
            check_file(path)
        self._path = path
        self.judgements, whole = _read(path, choices)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._size = whole
        os.ftruncate(self._descriptor, whole)
        self._end_last_line()
        os.fsync(self._descriptor)
        sync_path(path.parent)

    def _end_last_line(self) -> None:
        """A last line that lacks its end alone is a judgement."""
        if self._size and not _ends(self._path):
            self._size += os.write(self._descriptor, b"\n")

    def append(self, judgement: Judgement) -> None:
        """Append a judgement; when this comes back it is on disk.

        Errors: DiskFull, OSError; RefusedJudgement if something else wrote to the file: it is none."""
        data = json.dumps(judgement.as_dict(), ensure_ascii=False).encode() + b"\n"
        self._check_size()
        with wanting(self._path, len(data)):
            try:
                _write_all(self._descriptor, data)
                os.fsync(self._descriptor)
            except OSError:
                os.ftruncate(self._descriptor, self._size)  # half a line
                raise
        self._size += len(data)
        self.judgements.append(judgement)

    def _check_size(self) -> None:
        if os.fstat(self._descriptor).st_size != self._size:
            raise RefusedJudgement(f"something else changed {self._path.name}: end the page, and begin it again")

    def close(self) -> None:
        os.close(self._descriptor)


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _ends(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def read_journal(path: Path, choices: Sequence[str]) -> list[Judgement]:
    """Judgements in order, of a journal that may be written meanwhile; each id once. Errors: ConfigError; OSError."""
    return _read(path, choices)[0]


def _read(path: Path, choices: Sequence[str]) -> tuple[list[Judgement], int]:
    """Judgements, and the bytes that they take up: without a torn last line."""
    judgements: dict[str, Judgement] = {}
    whole = 0
    for number, line in enumerate(read_lines(path, _LINE_BYTES) if path.exists() else (), 1):
        try:
            judgement = judgement_of(parse_json(line, pairs=each_once), choices)
        except ValueError as error:
            if not line.endswith(b"\n") and not isinstance(error, RefusedJudgement):
                break
            why = str(error) if isinstance(error, RefusedJudgement) else "it is not JSON"
            raise ConfigError(f"{path} line {number} is no judgement ({why}): restore or remove the line") from None
        judgements.setdefault(judgement.id, judgement)
        whole += len(line)
    return list(judgements.values()), whole


def latest(judgements: Iterable[Judgement]) -> Latest:
    """Judgements that count: of one labeller and item the last."""
    return {(judgement.item, judgement.who): judgement for judgement in judgements}

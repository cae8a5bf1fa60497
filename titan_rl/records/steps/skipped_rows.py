"""Skipped rows of data as JSON lines: which, why, and from which step on.

    {"row": "pairs.jsonl line 7", "why": "too long: 900 tokens"}
    {"row": "pairs.jsonl line 9", "why": "loss", "from_step": 12}

A row that is too long is out from the beginning. One whose numbers were not finite is out from the step on that met it,
so that a step still follows from its number and this record, whenever it is done again.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from titan_rl.config.io.bounded_files import read_lines
from titan_rl.data.rows.datasets import TooLong
from titan_rl.data.storage.files import LineFile, replace_text


class SkippedRows:
    """Owns the record: nobody else writes it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._from_step: dict[str, int] = {}
        for record in _read(path):
            self._record_step(record["row"], record["from_step"])

    def _record_step(self, row: str, step: int) -> None:
        self._from_step[row] = min(step, self._from_step.get(row, step))

    def is_out(self, row: str, step: int) -> bool:
        """Whether a row, by its place, was non-finite at this step or before."""
        return row in self._from_step and self._from_step[row] <= step

    def list_too_long(self, rows: Sequence[TooLong]) -> None:
        """Record the rows that are too long, once: a run that goes on has the same rows. Errors: DiskFull."""
        if rows and not self._path.exists():
            replace_text(self._path, "".join(json.dumps(_record(row)) + "\n" for row in rows))

    def leave_out(self, why: dict[str, str], step: int) -> None:
        """Skip rows from this step on. ``why``: by a row's place, what of it was not finite. Errors: DiskFull."""
        file = LineFile(self._path)
        try:
            for row, reason in why.items():
                file.write(json.dumps({"row": row, "why": reason, "from_step": step}))
                self._record_step(row, step)
        finally:
            file.close()


def _record(row: TooLong) -> dict[str, Any]:
    record = {"row": row.place, "why": f"too long: {row.num_tokens} tokens"}
    return record | ({"held_out": True} if row.is_held_out else {})


def _read(path: Path) -> Iterator[dict[str, Any]]:
    """Of rows that met non-finite values. A line that is no record is passed over, such as one that the process died
    in: what it was to say will be met again."""
    for line in read_lines(path) if path.exists() else ():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and isinstance(record.get("row"), str) and type(record.get("from_step")) is int:
            yield record

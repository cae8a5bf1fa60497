"""Evaluations of a run, read back: their names, a suite's estimates, its answers.

The files may be anybody's: links are not followed, sizes are bounded, and what cannot be read is one line.
"""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from titan_rl.config.io.bounded_files import RefusedFile, check_file, read_json
from titan_rl.config.io.printable import printable
from titan_rl.data.storage.tables import check_table, read_table
from titan_rl.records.evaluations.estimators import Estimate
from titan_rl.records.evaluations.files import SCHEMA
from titan_rl.records.steps.step_names import step_of

MOST_BYTES = 512 << 20
"""Of a suite's answers in memory; of a file of nearly as many bytes, up to twice that."""
MOST_NAMES = 2000
"""Evaluations of a run, the newest; and suites of an evaluation."""
_MOST_ENTRIES = 100_000
"""Entries of a folder that are looked at."""
_LONGEST_NAME = 150
_MOST_TRIED = 20
"""Files that are read to tell what a folder is."""
_NEEDED = ("question_id", "sample", "correct", "status")
_OVERVIEW = "evaluation.json"
"""Of an evaluation alone, beside its suites' files."""
_SHOWN = 200
"""Characters of another library's message."""

Stamp = tuple[tuple[int, int] | None, ...]
"""Time and size of a suite's JSON and of its Parquet; None for what is no plain file."""


class EvaluationError(ValueError):
    """A file of an evaluation that cannot be read; one line that names it."""


@dataclass(frozen=True)
class SuiteRecord:
    """Content of a suite's JSON."""

    num_questions: int
    num_samples: int
    estimates: dict[str, Estimate]
    truncated: float | None
    response_length: float | None
    unscored: dict[str, str]
    left_out: int
    settings: dict[str, Any]


def evaluation_names(folder: Path) -> list[str]:
    """Names of the folders of a run's evaluations, in order. Links are passed over."""
    names = sorted(_entries(folder, lambda entry: entry.is_dir(follow_symlinks=False)), key=order_of)
    return names[-MOST_NAMES:]


def is_name(text: str) -> bool:
    """Whether a name can be shown."""
    return text.isprintable() and 0 < len(text) <= _LONGEST_NAME


def is_evaluation(folder: Path) -> bool:
    """Whether a folder is one that ``titan-rl eval`` wrote, or writes: it has an overview, or a suite's estimates."""
    if _stamp(folder / _OVERVIEW) is not None:
        return True
    return any(_is_suite(folder, suite) for suite in suite_names(folder.parent, folder.name)[:_MOST_TRIED])


def _is_suite(folder: Path, suite: str) -> bool:
    try:
        read_record(folder.parent, folder.name, suite)
    except EvaluationError:
        return False
    return True


def order_of(evaluation: str) -> tuple[int, str]:
    """Sort key of an evaluation's name: others by their names, then steps."""
    step = step_of(evaluation)
    return (-1, evaluation) if step is None else (step, "")


def suite_names(folder: Path, evaluation: str) -> list[str]:
    """Suites of an evaluation that have a plain file. ``evaluation``: one of ``evaluation_names``."""
    files = _entries(folder / evaluation, lambda entry: entry.is_file(follow_symlinks=False))
    stems = (Path(name) for name in files if name != _OVERVIEW)
    return sorted({path.stem for path in stems if path.suffix in (".json", ".parquet")})[:MOST_NAMES]


def _entries(folder: Path, is_wanted: Callable[[os.DirEntry[str]], bool]) -> list[str]:
    """Names that can be shown. Nothing of what is no folder, or a link to one."""
    try:
        if folder.is_symlink():
            return []
        with os.scandir(folder) as entries:
            names = [entry.name for entry in islice(entries, _MOST_ENTRIES) if is_wanted(entry)]
    except OSError:
        return []
    return [name for name in names if is_name(name)]


def stamp_of(folder: Path, evaluation: str, suite: str) -> Stamp:
    """What tells a suite's files from those that were there before."""
    return tuple(_stamp(_path(folder, evaluation, suite, suffix)) for suffix in ("json", "parquet"))


def _path(folder: Path, evaluation: str, suite: str, suffix: str) -> Path:
    return folder / evaluation / f"{suite}.{suffix}"


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        status = path.lstat()
        is_plain = path.is_file() and not path.is_symlink() and not path.parent.is_symlink()
    except OSError:
        return None
    return (status.st_mtime_ns, status.st_size) if is_plain else None


def read_record(folder: Path, evaluation: str, suite: str) -> SuiteRecord:
    """Estimates and settings of a suite. Errors: EvaluationError."""
    path = _plain(folder, evaluation, suite, "json")
    try:
        return _record(read_json(path))
    except RefusedFile as error:
        raise EvaluationError(_line(error)) from None
    except (OSError, ValueError, TypeError, OverflowError, KeyError, AttributeError) as error:
        raise _unreadable(path, f"the field {error}" if isinstance(error, KeyError) else error) from None


def read_answers(folder: Path, evaluation: str, suite: str) -> pa.Table:
    """Every answer, as SCHEMA has it; texts are UTF-8. Errors: EvaluationError."""
    path = _plain(folder, evaluation, suite, "parquet")
    try:
        check_file(path)
        _check_size(path)
        table = read_table(path, SCHEMA)
        table.validate(full=True)
    except RefusedFile as error:
        raise EvaluationError(_line(error)) from None
    except (pa.ArrowException, OSError, ValueError, TypeError, OverflowError) as error:
        raise _unreadable(path, error) from None
    if (missing := next((name for name in _NEEDED if table.column(name).null_count), None)) is not None:
        raise _unreadable(path, f"the column {missing} lacks values")
    return table


def _check_size(path: Path) -> None:
    """Errors: RefusedFile for more than MOST_BYTES in memory; pyarrow.ArrowException; OSError."""
    size = max(path.stat().st_size, 1)
    try:
        if size <= MOST_BYTES:
            return check_table(path, SCHEMA.names, ratio=-(-MOST_BYTES // size))
    except RefusedFile:
        pass
    raise RefusedFile(
        f"{path} would take more than {MOST_BYTES >> 20} MiB of memory: it is damaged, or too large to be shown here; "
        f"DuckDB and pandas read it in parts"
    )


def _plain(folder: Path, evaluation: str, suite: str, suffix: str) -> Path:
    """Path of a plain file, reached by no link below the run. Errors: EvaluationError."""
    path = _path(folder, evaluation, suite, suffix)
    if _stamp(path) is None:
        raise EvaluationError(_line(f"{path} is not there, or is a link or another kind of file: evaluate again"))
    return path


def _unreadable(path: Path, why: object) -> EvaluationError:
    return EvaluationError(_line(f"{path} cannot be read: {' '.join(str(why).split())[:_SHOWN]}; evaluate again"))


def _line(message: object) -> str:
    return printable(str(message))


def _record(content: dict[str, Any]) -> SuiteRecord:
    """Errors: KeyError, TypeError, ValueError, OverflowError, AttributeError for what no suite's JSON has."""
    if not isinstance(content["settings"], dict):
        raise TypeError("settings is no object")
    return SuiteRecord(
        int(_number(content["questions"])),
        int(_number(content["samples"])),
        {name: _estimate(each["value"], *each["interval_95"]) for name, each in content["metrics"].items()},
        _mean(content["truncated"]),
        _mean(content["response_length"]),
        {name: str(why) for name, why in content["unscored"].items()},
        int(_number(content["left_out"])),
        content["settings"],
    )


def _estimate(value: Any, low: Any, high: Any) -> Estimate:
    return Estimate(_number(value), _number(low), _number(high))


def _mean(value: Any) -> float | None:
    return None if value is None else _number(value)


def _number(value: Any) -> float:
    """Errors: ValueError for anything else; OverflowError."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{str(value)[:20]!r} is no number")
    return float(value)

"""Audit of a ledger from its file: the chain of entries, and every row against their sum.

    entries (chained) ── folded ──▶ what each prompt and sample must be ══ compared ══ tables ``prompts``, ``samples``

What this shows: damage, and rows or entries that were deleted, changed or added, each by its name. What it cannot
show: a file that somebody rewrote as a whole, with hashes computed anew, since no key is involved; and an end that was
cut off together with the rows that it made, for which the run's other files must be asked (cross_checks.py).

Nothing is written, and one snapshot is read, so the run may be active.
"""

import json
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

from titan_rl.config.io.bounded_files import RefusedFile, check_file
from titan_rl.records.ledger.ledger import SCHEMA, UNCHAINED, entry_hash, is_unchained

T = TypeVar("T")
_MAX_SAMPLES = 1 << 16
"""Of a prompt; an entry that says more is damaged."""
_SUFFIXES = ("", "-wal", "-shm", "-journal")
"""Of the files that SQLite opens."""
_MOST_BYTES = 16 << 20
"""Of a value."""
_SECONDS, _BYTES_A_SECOND, _OPERATIONS = 3.0, 4 << 20, 500
"""Of this thread's computing, in which a database of no size, and each MiB more, must be read."""
_MOST_FLAWS = 10_000
"""That are told of one kind; a small file may have billions."""
_MOST_WORK = 30_000_000
"""Prompts that may be pending when an entry goes back, for all such entries together: it takes seconds."""


class UnreadableLedger(ValueError):
    """Missing ledger, or one with unreadable rows; the message is one line."""


@dataclass
class Proved:
    """State of a prompt according to the entries. All its samples are settled at once."""

    samples: int
    retries: int = 0
    reasons: list[str | None] | None = None
    """Of each sample, None if it was trained; None for all while they are pending."""
    step: int | None = None
    has_rows: bool = False
    """Whether any of its samples' rows was found."""

    def row(self, sample: int) -> tuple[str, int | None, str | None]:
        """State, step and reason of a sample's row."""
        if self.reasons is None:
            return "pending", None, None
        reason = self.reasons[sample]
        return ("trained" if reason is None else "discarded"), self.step, reason


def flaws(path: Path) -> list[str]:
    """Flaws of a ledger file, a line each with its row; empty if it holds. Nothing is raised."""
    try:
        return read(path, flaws_of)
    except UnreadableLedger as error:
        return [str(error)]


def read(path: Path, look: Callable[[sqlite3.Connection], T]) -> T:
    """Result of ``look`` on one snapshot of a ledger. Errors: UnreadableLedger."""
    if not path.exists():
        raise UnreadableLedger(f"{path} is not there: the run has no ledger")
    try:
        for suffix in _SUFFIXES:
            if (part := Path(f"{path}{suffix}")).exists():
                check_file(part)
        if not path.stat().st_size:
            raise UnreadableLedger(f"{path} is empty: it holds no ledger")
    except (OSError, RefusedFile) as error:
        raise UnreadableLedger(str(error)) from None
    log = Path(f"{path}-wal")
    if log.exists():
        return _read(path, look, "mode=ro")
    try:  # nobody has it open, so it is read without the files that SQLite makes to share it
        result = _read(path, look, "immutable=1")
    except UnreadableLedger:
        if not log.exists():
            raise
    else:
        if not log.exists():
            return result
    return _read(path, look, "mode=ro")  # a run has begun meanwhile


def _read(path: Path, look: Callable[[sqlite3.Connection], T], mode: str) -> T:
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", uri=True)) as connection:
            connection.text_factory = partial(str, encoding="utf-8", errors="backslashreplace")
            _bound(path, connection)
            connection.execute("begin")
            _check_readable(path, connection)
            return look(connection)
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise UnreadableLedger(
            f"{path} cannot be read as a ledger ({error}): it is damaged, or something else"
        ) from None


def _bound(path: Path, connection: sqlite3.Connection) -> None:
    """A database is a program: its tables may be views that never end, and its values compressed to nothing."""
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MOST_BYTES)
    connection.setlimit(sqlite3.SQLITE_LIMIT_SQL_LENGTH, 1 << 16)
    connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    connection.execute("pragma trusted_schema = off")
    end = time.thread_time() + _SECONDS + path.stat().st_size / _BYTES_A_SECOND
    connection.set_progress_handler(lambda: time.thread_time() > end, _OPERATIONS)


def _check_tables(path: Path, connection: sqlite3.Connection) -> None:
    """Errors: UnreadableLedger for what would compute what it shows."""
    for kind, name, sql in connection.execute("select type, name, sql from sqlite_master"):
        is_virtual = " ".join(str(sql).lower().split()).startswith("create virtual")
        if kind not in ("table", "index", "trigger") or is_virtual:  # no trigger runs where nothing is written
            raise UnreadableLedger(f"{path} holds no ledger: its {name} is a view, and no table")


def _check_readable(path: Path, connection: sqlite3.Connection) -> None:
    """Errors: UnreadableLedger for a file of another kind, and for one whose pages are damaged."""
    _check_tables(path, connection)
    missing = {"prompts", "samples"} - _objects(connection).keys()
    if missing:
        raise UnreadableLedger(f"{path} holds no ledger: it has no table {' and no table '.join(sorted(missing))}")
    for (line,) in connection.execute("pragma integrity_check(20)"):
        # a row that breaks a rule can be read, and is named where it is compared
        if line != "ok" and "constraint failed" not in line and "NULL value in" not in line:
            raise UnreadableLedger(f"{path} is damaged: {' '.join(line.split())}")


def flaws_of(connection: sqlite3.Connection) -> list[str]:
    """Flaws, as of ``flaws``, of an open ledger."""
    if is_unchained(connection):
        return [UNCHAINED]
    flaws = _schema_flaws(connection)
    if "entries" not in _objects(connection):
        return flaws
    entries = connection.execute("select number, content, hash from entries order by number").fetchall()
    proved, impossible = fold(entries)
    [(last,)] = connection.execute("select max(seq) from sqlite_sequence where name = 'entries'")
    flaws += _chain_flaws(entries, last or 0) + impossible
    flaws += _prompt_flaws(proved, connection.execute("select id, samples, retries from prompts order by id"))
    rows = connection.execute("select prompt_id, sample, state, step, reason from samples order by prompt_id, sample")
    return flaws + _sample_flaws(proved, rows)


# the schema


def _objects(connection: sqlite3.Connection) -> dict[str, str]:
    """Tables, indexes and triggers, and how each was made."""
    rows = connection.execute("select name, sql from sqlite_master where name not like 'sqlite_%'")
    return {name: sql for name, sql in rows}


def _schema_flaws(connection: sqlite3.Connection) -> list[str]:
    with closing(sqlite3.connect(":memory:")) as fresh:
        fresh.executescript(SCHEMA)
        expected, actual = _objects(fresh), _objects(connection)
    return [f"{name} is missing from the database" for name in expected.keys() - actual.keys()] + [
        f"{name} of the database is not as this release makes it"
        for name in sorted(actual)
        if actual[name] != expected.get(name)
    ]


# the chain

Entry = tuple[int, str, str]
"""Number, content, hash."""


def _chain_flaws(entries: Iterable[Entry], last: int) -> list[str]:
    """``last``: the highest number that the database ever gave to an entry, which it keeps in a table of its own."""
    flaws, expected, before = [], 1, {""}
    for number, content, stored in entries:
        if number < 1:
            flaws.append(f"entry {number} was added: entries are numbered from 1")
            continue
        if number > expected:
            flaws += _missing(expected, number)
            before = set()
        # also from what the hash before should have been, so that a changed hash does not accuse the entry after it
        computed = {entry_hash(previous, number, content) for previous in before}
        if before and stored not in computed:
            flaws.append(f"entry {number} was changed or added: its hash does not follow from it and the entry before")
        expected, before = number + 1, {stored} if stored in computed else {stored, *computed}
    if last < expected - 1:
        flaws.append(
            f"entry {expected - 1} is there, but the database counts {last} entries: it was added, or the count changed"
        )
    return flaws + _missing(expected, last + 1)


def _missing(first: int, end: int) -> list[str]:
    if end - first > 1:
        return [f"entries {first} to {end - 1} are missing: their rows were deleted"]
    return [f"entry {first} is missing: its row was deleted"] if end > first else []


# what the entries add up to


@dataclass
class _Account:
    """What the entries up to one add up to."""

    prompts: dict[str, Proved] = field(default_factory=dict)
    pending: set[str] = field(default_factory=set)
    settled: dict[int, list[str]] = field(default_factory=dict)
    """By the step that they were trained or discarded in."""


def fold(entries: Iterable[Entry]) -> tuple[dict[str, Proved], list[str]]:
    """State of every prompt after all entries, and the impossible entries, a line each."""
    account = _Account()
    impossible: list[str] = []
    work = 0
    for number, content, _ in entries:
        try:
            entry = json.loads(content)
            work += len(account.pending) if "rewind" in entry else 0
            objections = ["is one too many to be carried out"] if work > _MOST_WORK else _carry_out(entry, account)
        except (ValueError, TypeError, KeyError, AttributeError, StopIteration, RecursionError, OverflowError):
            objections = ["cannot be read"]
        impossible += [f"entry {number} {objection}" for objection in objections[: _MOST_FLAWS - len(impossible)]]
    return account.prompts, impossible


def _carry_out(content: dict[str, Any], account: _Account) -> list[str]:
    kind = next(iter(content))
    return _KINDS[kind](account, *content.values())


def _issue(account: _Account, names: list[str], num_samples: int) -> list[str]:
    _check_count(num_samples)
    again = [name for name in names if name in account.prompts]
    issued = {name: Proved(num_samples) for name in names if name not in account.prompts}
    account.prompts |= issued
    account.pending |= issued.keys()
    return [f"issues {name} again" for name in again]


def _settle(account: _Account, outcomes: dict[str, list[str | None]], step: int | None) -> list[str]:
    objections = []
    for name, reasons in outcomes.items():
        _check_reasons(reasons)
        prompt = account.prompts.get(name)
        if prompt is None or prompt.reasons is not None or len(reasons) != prompt.samples:
            objections.append(f"settles {len(reasons)} samples of {name}, which are not pending then")
        else:
            prompt.reasons, prompt.step = reasons, step
            account.pending.discard(name)
            if step is not None:
                account.settled.setdefault(step, []).append(name)
    return objections


def _retry(account: _Account, name: str) -> list[str]:
    if name not in account.prompts:
        return [f"samples {name} again, which was not issued before"]
    account.prompts[name].retries += 1
    return []


def _rewind(account: _Account, step: int, num_samples: int) -> list[str]:
    _check_count(num_samples)
    for later in [settled for settled in account.settled if settled > step]:
        for name in account.settled.pop(later):
            prompt = account.prompts[name]
            prompt.reasons = prompt.step = None
            account.pending.add(name)
    for name in account.pending:
        account.prompts[name].samples = num_samples
    return []


def _check_count(num_samples: int) -> None:
    if not isinstance(num_samples, int) or not 0 < num_samples < _MAX_SAMPLES:
        raise ValueError(num_samples)


def _check_reasons(reasons: list[str | None]) -> None:
    if not isinstance(reasons, list):
        raise ValueError(reasons)


_KINDS = {"issue": _issue, "settle": _settle, "retry": _retry, "rewind": _rewind}


# the tables


def _prompt_flaws(proved: dict[str, Proved], rows: Iterable[tuple[Any, ...]]) -> list[str]:
    flaws, seen = [], set()
    for name, samples, retries in rows:
        seen.add(name)
        if (prompt := proved.get(name)) is None:
            flaws.append(f"prompt {name} was added: no entry issued it")
            continue
        for what, stored, expected in (("samples", samples, prompt.samples), ("retries", retries, prompt.retries)):
            if stored != expected:
                flaws.append(f"prompt {name} was changed: its row says {stored} {what}, the entries {expected}")
    return flaws + [f"prompt {name} is missing: its row was deleted" for name in proved.keys() - seen]


def _sample_flaws(proved: dict[str, Proved], rows: Iterable[tuple[Any, ...]]) -> list[str]:
    """``rows``: in the order of their prompts. At most _MOST_FLAWS."""
    return list(islice(_sample_differences(proved, rows), _MOST_FLAWS))


def _sample_differences(proved: dict[str, Proved], rows: Iterable[tuple[Any, ...]]) -> Iterator[str]:
    for name, own in groupby(rows, key=itemgetter(0)):
        prompt, seen = proved.get(name), set()
        for _, sample, *row in own:
            if prompt is None or not isinstance(sample, int) or not 0 <= sample < prompt.samples:
                yield f"{name} sample {sample} was added: no entry issued it"
                continue
            seen.add(sample)
            if (expected := prompt.row(sample)) != tuple(row):
                yield f"{name} sample {sample} was changed: its row says {_text(row)}, the entries {_text(expected)}"
        if prompt is not None:
            prompt.has_rows = True
            yield from _missing_samples(name, prompt, seen)
    for name, prompt in proved.items():
        if not prompt.has_rows:
            yield from _missing_samples(name, prompt, set())


def _missing_samples(name: str, prompt: Proved, seen: set[int]) -> Iterator[str]:
    if len(seen) < prompt.samples:
        missing = (sample for sample in range(prompt.samples) if sample not in seen)
        yield from (f"{name} sample {sample} is missing: its row was deleted" for sample in missing)


def _text(row: Iterable) -> str:
    """``trained at step 3``, ``discarded at step 3 (timeout)``."""
    state, step, reason = row
    return f"{state}{'' if step is None else f' at step {step}'}{'' if reason is None else f' ({reason})'}"

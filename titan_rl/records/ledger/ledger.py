"""Every sample's outcome, on disk: pending, trained at a step, or discarded for a named reason.

A prompt is issued with all its samples and settled with all of them, in one transaction. So the account

    issued = trained + discarded + pending

holds at every moment, also after a crash. A trigger of the database refuses to settle a sample twice.

What is done is entered first: ``entries`` only grows, and each entry's hash covers the hash before it. ``prompts`` and
``samples`` are the state to which the entries lead, written in the same transaction. So ``issued`` is what was entered
when prompts were issued, not a count of the rows that it is compared with, and a reader can prove every row
(audit.py).

A power cut may lose the commits since the last ``sync``. Every checkpoint calls it before it becomes visible, so the
ledger on disk is never behind the newest checkpoint, and a resumed run rewinds the ledger to that checkpoint anyway.
"""

import hashlib
import json
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from titan_rl.data.storage.files import wanting
from titan_rl.records.run_directory.rundir import sync_path

SCHEMA = """
create table if not exists entries (
    number integer primary key autoincrement,
    content text not null,
    hash text not null
);
create trigger if not exists entries_stay before delete on entries
begin select raise(abort, 'an entry cannot be taken back'); end;
create trigger if not exists entries_stay_as_they_are before update on entries
begin select raise(abort, 'an entry cannot be changed'); end;
create table if not exists prompts (
    id text primary key,
    samples integer not null,
    retries integer not null default 0
) without rowid;
create table if not exists samples (
    prompt_id text not null references prompts,
    sample integer not null,
    state text not null default 'pending' check (state in ('pending', 'trained', 'discarded')),
    step integer,
    reason text,
    primary key (prompt_id, sample),
    check (state != 'pending' or (step is null and reason is null)),
    check (state != 'trained' or (step is not null and reason is null)),
    check (state != 'discarded' or reason is not null)
) without rowid;
create index if not exists samples_by_step on samples (step) where step is not null;
create index if not exists samples_pending on samples (prompt_id) where state = 'pending';
create trigger if not exists settled_once before update of state on samples
when old.state != 'pending' and new.state != 'pending'
begin select raise(abort, 'a sample that is settled cannot be settled again'); end;
"""
_LOG_BYTES = 1000 * 4096
"""To which SQLite's write-ahead log grows before its pages go into the file."""
_STATES = ("trained", "discarded", "pending")

Outcomes = dict[str, list[str | None]]
"""For each prompt's samples, in order: None for one that was trained, or the reason why it was discarded."""


UNCHAINED = "it is from a release without the chain of entries, and cannot be proved"


def is_unchained(connection: sqlite3.Connection) -> bool:
    """Whether an earlier release wrote it, whose prompts do not say with how many samples they were issued."""
    columns = {name for _, name, *_ in connection.execute("pragma table_info(prompts)")}
    return bool(columns) and "samples" not in columns


def entry_hash(previous: str, number: int, content: str) -> str:
    """SHA-256, in hexadecimal, of an entry; ``previous`` is the hash of the one before it, and empty for number 1."""
    return hashlib.sha256(f"{previous}\n{number}\n{content}".encode()).hexdigest()


class LedgerError(RuntimeError):
    """The account does not add up: an error of this program, never of the run's data."""


class Ledger:
    """Written by the controller alone. The file outlives its process."""

    def __init__(self, path: Path) -> None:
        """Errors: LedgerError if an earlier release wrote the file."""
        self.path = path
        self._connection = sqlite3.connect(path, isolation_level=None)
        self._connection.execute("pragma journal_mode = wal")
        self._connection.execute("pragma synchronous = normal")
        if is_unchained(self._connection):
            raise LedgerError(f"{path}: {UNCHAINED}, so it is not continued")
        with wanting(path, _LOG_BYTES):
            self._connection.executescript(SCHEMA)
        self._counts = self._count()

    def _count(self) -> Counter[str]:
        return Counter(dict(self._connection.execute("select state, count(*) from samples group by state")))

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """All or nothing; no transaction stays open after an error. Errors: DiskFull."""
        with wanting(self.path, _LOG_BYTES):
            self._connection.execute("begin immediate")
            try:
                yield
                self._connection.execute("commit")
            except BaseException:  # a cancellation must not leave half a transaction either
                if self._connection.in_transaction:  # a full disk may have ended it already
                    self._connection.execute("rollback")
                raise

    def _enter(self, **content: Any) -> None:
        """What the transaction at hand does, as the next entry."""
        last = self._connection.execute("select number, hash from entries order by number desc limit 1").fetchone()
        number, previous = (last[0] + 1, last[1]) if last else (1, "")
        text = json.dumps(content, separators=(",", ":"))
        self._connection.execute(
            "insert into entries values (?, ?, ?)", (number, text, entry_hash(previous, number, text))
        )

    def issue(self, prompt_ids: list[str], num_samples: int) -> None:
        """Issue new prompts: all their samples become pending. Errors: sqlite3.IntegrityError for an issued one."""
        with self._transaction():
            self._enter(issue=prompt_ids, samples=num_samples)
            prompts = ((name, num_samples) for name in prompt_ids)
            self._connection.executemany("insert into prompts (id, samples) values (?, ?)", prompts)
            rows = ((name, sample) for name in prompt_ids for sample in range(num_samples))
            self._connection.executemany("insert into samples (prompt_id, sample) values (?, ?)", rows)
        self._counts["pending"] += len(prompt_ids) * num_samples

    def settle(self, outcomes: Outcomes, step: int | None = None) -> None:
        """Settle prompts, each with all its samples. ``step``: the step whose batch they were in, if they were trained.

        Errors: LedgerError, and nothing is written, if a sample is not pending or a prompt's list is incomplete.
        """
        rows = [
            ("trained" if reason is None else "discarded", step, reason, prompt_id, sample)
            for prompt_id, reasons in outcomes.items()
            for sample, reason in enumerate(reasons)
        ]
        if not rows:
            return
        statement = "update samples set state = ?, step = ?, reason = ? where prompt_id = ? and sample = ?"
        with self._transaction():
            self._enter(settle=outcomes, step=step)
            for prompt_id, reasons in outcomes.items():
                if (pending := self._num_pending(prompt_id)) != len(reasons):
                    raise LedgerError(f"{prompt_id} has {pending} pending samples, so {len(reasons)} cannot be settled")
            changed = self._connection.executemany(statement, rows).rowcount
            if changed != len(rows):
                raise LedgerError(f"{changed} samples were settled instead of {len(rows)}")
        settled = Counter(row[0] for row in rows)
        self._counts += settled
        self._counts["pending"] -= settled.total()

    def _num_pending(self, prompt_id: str) -> int:
        statement = "select count(*) from samples where state = 'pending' and prompt_id = ?"
        return self._connection.execute(statement, (prompt_id,)).fetchone()[0]

    def count_retry(self, prompt_id: str) -> None:
        """The prompt is sampled again after a failure of the machinery. One that is held out has no account."""
        with self._transaction():
            update = "update prompts set retries = retries + 1 where id = ?"
            if self._connection.execute(update, (prompt_id,)).rowcount:
                self._enter(retry=prompt_id)

    def rewind(self, step: int, num_samples: int) -> list[str]:
        """Rewind to a checkpoint's mark: samples of later steps' batches are pending again.

        Returns all pending prompts, in order; each has ``num_samples`` samples from now on.
        """
        change, num_before = self._connection.execute, self._connection.total_changes
        with self._transaction():
            change("update samples set state = 'pending', step = null, reason = null where step > ?", (step,))
            rows = change(
                "select distinct prompt_id from samples where state = 'pending' order by prompt_id"
            ).fetchall()
            # the resumed run may have another group size
            change("delete from samples where state = 'pending' and sample >= ?", (num_samples,))
            pending = [(prompt_id, sample) for (prompt_id,) in rows for sample in range(num_samples)]
            self._connection.executemany("insert or ignore into samples (prompt_id, sample) values (?, ?)", pending)
            resized = ((num_samples, prompt_id, num_samples) for (prompt_id,) in rows)
            self._connection.executemany("update prompts set samples = ? where id = ? and samples != ?", resized)
            if self._connection.total_changes > num_before:
                self._enter(rewind=step, samples=num_samples)
        self._counts = self._count()
        return [prompt_id for (prompt_id,) in rows]

    def last_trained_step(self) -> int:
        return last_trained_step(self._connection)

    def last_issued(self) -> str | None:
        """The id that is last in the stream's order; None if nothing was issued."""
        [(prompt_id,)] = self._connection.execute("select max(id) from prompts")
        return prompt_id

    def sync(self) -> None:
        """Everything that was committed is on disk and survives a power cut. Any thread may call it."""
        for path in (self.path, Path(f"{self.path}-wal"), self.path.parent):
            if path.exists():
                sync_path(path)

    def check(self, num_pending: int) -> None:
        """Called after each step. Errors: LedgerError unless exactly ``num_pending`` samples are pending.

        The other two states grow only by what leaves ``pending``, so a lost sample shows here.
        """
        [(pending,)] = self._connection.execute("select count(*) from samples where state = 'pending'")
        if not pending == num_pending == self._counts["pending"]:
            raise LedgerError(
                f"the ledger holds {pending} pending samples and counted {self._counts['pending']}, "
                f"but {num_pending} are in progress"
            )

    def verify(self) -> None:
        """Count every row again. Errors: LedgerError if the result differs from the running counts."""
        if any(self._count()[state] != self._counts[state] for state in _STATES):
            raise LedgerError(f"the ledger holds {dict(self._count())} samples, but {dict(self._counts)} were counted")

    def account(self) -> dict[str, int]:
        """Samples: ``issued``, ``trained`` and ``pending``, and ``discarded (reason)`` for each reason."""
        return read_account(self._connection)

    def close(self) -> None:
        self._connection.close()


def last_trained_step(connection: sqlite3.Connection) -> int:
    """Last step with a trained sample; 0 without one."""
    [(step,)] = connection.execute("select max(step) from samples where state = 'trained'")
    return step or 0


def read_account(connection: sqlite3.Connection) -> dict[str, int]:
    """Account of a ledger: numbers of samples by outcome.

    ``issued`` is what the prompts say that they were issued with, whatever rows there are; in a ledger of an earlier
    release, whose prompts do not say it, the number of rows.
    """
    rows = connection.execute("select state, reason, count(*) from samples group by state, reason").fetchall()
    issued = sum(count for *_, count in rows)
    if not is_unchained(connection):
        [(issued,)] = connection.execute("select coalesce(sum(samples), 0) from prompts")
    account = {"issued": issued, "trained": 0, "pending": 0}
    for state, reason, count in rows:
        account[f"discarded ({reason})" if state == "discarded" else str(state)] = count
    return account

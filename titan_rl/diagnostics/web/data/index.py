"""DuckDB table of a run's rollouts in memory, from Parquet files and ledger, kept current.

Nothing is written anywhere. A file is read once, and again if it has changed. DuckDB may read the run's own two folders
and nothing else, no link is followed, and a file that cannot be read is named instead.
"""

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from titan_rl.config.io.bounded_files import RefusedFile
from titan_rl.data.storage.tables import check_table
from titan_rl.diagnostics.web.data.selection import COLUMNS, Selection
from titan_rl.records.ledger.audit import UnreadableLedger, read
from titan_rl.records.run_directory.rundir import RunDir
from titan_rl.records.steps.rollouts import RATIO
from titan_rl.records.steps.step_names import step_name, step_of

_FILES_AT_ONCE = 200
_TEXT, _QUESTION = 4000, 1000
"""Characters of an answer and of a prompt that are searched; the whole is read when a rollout is shown."""
_PARTS = {
    "prompt_id": "prompt_id",
    "sample": "sample",
    "status": "status",
    "reward": "reward",
    "length": "len(list_filter(provenance, lambda who: who = 1))",
    "version": "list_max(versions)",
    "staleness": "step - 1 - list_min(list_filter(versions, lambda version: version >= 0))",
    "text": f"left(text, {_TEXT})",
    "question": f"left(question, {_QUESTION})",
    "true_reward": "coalesce(task_reward, reward)",
    "task": "coalesce(task, '')",
    "seat": "coalesce(seat, '')",
}
_NEEDS = {"length": "provenance", "version": "versions", "staleness": "versions", "true_reward": "task_reward"}
_WITHOUT = {"true_reward": "reward"}
"""What stands in the place of a column whose file has not what it needs."""
_TABLE = """create table rollouts (step integer, prompt_id varchar, sample integer, status varchar, reward double,
length integer, version integer, staleness integer, text varchar, question varchar,
true_reward double, task varchar, seat varchar,
disagreement double, advantage double)"""
_STEP = "cast(regexp_extract(filename, 'step-([0-9]+)[.]parquet$', 1) as integer)"

Stamp = tuple[int, int] | None
"""Time and size of a plain file; None where there is none."""


@dataclass(frozen=True)
class Page:
    """Page of a selection."""

    rows: list[dict[str, Any]]
    count: int
    """Of all rollouts that are selected, or of their groups."""
    reward: float | None
    """Their means."""
    length: float | None


class RolloutIndex:
    """Owns the table. Any thread may call it; ``refresh`` does nothing while another call of it goes on."""

    def __init__(self, run_dir: RunDir) -> None:
        self.run_dir = run_dir
        folders = [str(folder.resolve()) for folder in (run_dir.rollouts, run_dir.trained)]
        self._db = duckdb.connect(":memory:", config={"threads": 2, "autoinstall_known_extensions": False})
        self._db.execute("set autoload_known_extensions = false")
        self._db.execute(f"set allowed_directories = [{', '.join(map(_quoted, folders))}]")
        self._db.execute("set enable_external_access = false")
        self._db.execute("set lock_configuration = true")
        self._db.execute(_TABLE)
        self._db.execute("create table reasons (prompt_id varchar, sample integer, why varchar)")
        self._seen: dict[int, tuple[Stamp, Stamp]] = {}
        self._ledger_seen: tuple[Stamp, Stamp] | None = None
        self._refreshing = threading.Lock()
        self.damaged: dict[str, str] = {}
        """File to why it cannot be read."""
        self.is_ready = False
        """Whether all files of the beginning are in it."""

    def refresh(self) -> bool:
        """Index new files. Returns whether anything is new."""
        if not self._refreshing.acquire(blocking=False):
            return False
        try:
            changed = self._changed()
            for start in range(0, len(changed), _FILES_AT_ONCE):
                self._take(changed[start : start + _FILES_AT_ONCE])
            return bool(changed) | self._take_reasons()
        finally:
            self.is_ready = True
            self._refreshing.release()

    # reading

    def _changed(self) -> list[int]:
        """Steps whose files are new, or others than before."""
        steps = sorted(filter(None, (step_of(path.stem) for path in self.run_dir.rollouts.glob("step-*.parquet"))))
        changed, is_active = [], self.run_dir.is_in_use()
        for step in steps:
            rollouts, trained = (_stamp(path) for path in self._paths(step))
            if rollouts is None or (trained is None and step == steps[-1] and is_active):
                continue  # it is being trained
            if self._seen.get(step) != (rollouts, trained):
                self._seen[step] = (rollouts, trained)
                changed.append(step)
        return changed

    def _paths(self, step: int) -> tuple[Path, Path]:
        name = f"{step_name(step)}.parquet"
        return self.run_dir.rollouts.resolve() / name, self.run_dir.trained.resolve() / name

    def _take(self, steps: list[int], with_trained: bool = True) -> None:
        """Errors: none; a file that cannot be read is noted, and the others are taken."""
        cursor = self._db.cursor()
        cursor.begin()
        cursor.execute("delete from rollouts where step in (select unnest(?))", [steps])
        try:
            self._insert(cursor, steps, with_trained)
            cursor.commit()
        except (duckdb.Error, pa.ArrowException, RefusedFile, OSError) as error:
            cursor.rollback()
            if len(steps) > 1:
                for step in steps:
                    self._take([step])
                return
            path = self._paths(steps[0])[1 if with_trained else 0]
            self.damaged[f"{path.parent.name}/{path.name}"] = str(error).splitlines()[0][:200]
            if with_trained:
                self._take(steps, with_trained=False)

    def _insert(self, cursor: duckdb.DuckDBPyConnection, steps: list[int], with_trained: bool) -> None:
        for path in (path for step in steps for path in self._paths(step)[: 1 + with_trained]):
            if _stamp(path) is not None:
                check_table(path, with_text=False, ratio=RATIO)
        files = [str(self._paths(step)[0]) for step in steps]
        trained = [str(path) for step in steps if with_trained and _stamp(path := self._paths(step)[1]) is not None]
        there = {row[0] for row in cursor.execute(f"describe select * from {_parquet(files)}").fetchall()}
        parts = [sql if _NEEDS.get(name, name) in there else _WITHOUT.get(name, "null") for name, sql in _PARTS.items()]
        own = ", ".join(f"{sql} as {name}" for name, sql in zip(_PARTS, parts, strict=True))
        of_trained = "select null::integer as step, '' as prompt_id, 0 as sample, null::double as d, null::double as a"
        if trained:
            of_trained = f"select {_STEP} as step, prompt_id, sample, disagreement as d, advantage as a from "
            of_trained += _parquet(trained)
        cursor.execute(
            f"insert into rollouts select o.*, t.d, t.a from (select step, {own} from "
            f"(select *, {_STEP} as step from {_parquet(files)})) o "
            f"left join ({of_trained}) t on o.step = t.step and o.prompt_id = t.prompt_id and o.sample = t.sample"
        )

    def _take_reasons(self) -> bool:
        """Why samples of batches were not trained on, from the ledger."""
        path = self.run_dir.ledger
        stamp = (_stamp(path), _stamp(Path(f"{path}-wal")))
        if stamp == self._ledger_seen:
            return False
        query = "select prompt_id, sample, reason from samples where reason is not null and step is not null"
        try:
            rows = read(path, lambda connection: connection.execute(query).fetchall())
        except UnreadableLedger:
            return False
        self._ledger_seen = stamp
        names, samples, whys = ([str(row[n]) if n != 1 else int(row[n]) for row in rows] for n in range(3))
        table = pa.table({"p": pa.array(names, pa.string()), "s": pa.array(samples, pa.int32()), "w": whys or []})
        cursor = self._db.cursor()
        cursor.begin()
        cursor.execute("delete from reasons")
        if rows:
            cursor.register("found_reasons", table)
            cursor.execute("insert into reasons select p, s, w from found_reasons")
        cursor.commit()
        return True

    # asking

    def page(self, selection: Selection, first: int, count: int) -> Page:
        """Page of a selection: ``count`` rows from the ``first`` on. Groups with a matching rollout are whole."""
        where, values = selection.where()
        cursor = self._db.cursor()
        source = f"from rollouts left join reasons using (prompt_id, sample) where {where}"
        if selection.by_group:
            source = f"from rollouts where (step, prompt_id) in (select (step, prompt_id) {source})"
        means = cursor.execute(f"select count(*), avg(reward), avg(length) {source}", values)
        total, reward, length = _only_row(means)
        grouped = " group by step, prompt_id" if selection.by_group else ""
        if grouped:
            [total] = _only_row(cursor.execute(f"select count(*) from (select 1 {source}{grouped})", values))
        columns = ", ".join(f"{sql} as {name}" for name, sql in selection.columns.items())
        query = f"select {columns} {source}{grouped} order by {selection.order()} limit ? offset ?"
        return Page(_rows(cursor.execute(query, [*values, count, first])), total, reward, length)

    def group(self, step: int, prompt_id: str) -> list[dict[str, Any]]:
        """Answers to a prompt in a step, the best first, with the indexed fields."""
        columns = ", ".join(f"{sql} as {name}" for name, sql in (COLUMNS | _WHOLE).items())
        query = (
            f"select {columns} from rollouts left join reasons using (prompt_id, sample) "
            "where step = ? and prompt_id = ? order by reward desc nulls last, length, sample"
        )
        return _rows(self._db.cursor().execute(query, [step, prompt_id]))

    def choices(self, name: str) -> list[str]:
        """Distinct values of ``status``, ``task`` or ``why``."""
        assert name in ("status", "task", "why")
        source = "reasons" if name == "why" else "rollouts"
        rows = self._db.cursor().execute(
            f"select distinct {name} from {source} where {name} <> '' order by 1 limit 100"
        )
        return [row[0] for row in rows.fetchall()]

    @property
    def num_rollouts(self) -> int:
        return _only_row(self._db.cursor().execute("select count(*) from rollouts"))[0]


_WHOLE = {"text": "text", "question": "question", "true_reward": "true_reward"}


def _rows(cursor: duckdb.DuckDBPyConnection) -> list[dict[str, Any]]:
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


def _only_row(cursor: duckdb.DuckDBPyConnection) -> tuple[Any, ...]:
    """Row of a query that has exactly one, such as a count."""
    row = cursor.fetchone()
    assert row is not None, "an aggregate without groups has a row"
    return row


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _parquet(files: list[str]) -> str:
    return f"read_parquet([{', '.join(map(_quoted, files))}], filename = true, union_by_name = true)"


def _stamp(path: Path) -> Stamp:
    """What tells a plain file from the one that was there before; None for a link, and where there is none."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return (status.st_mtime_ns, status.st_size) if path.is_file() and not path.is_symlink() else None

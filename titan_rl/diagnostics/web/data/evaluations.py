"""Evaluations for the page: answers to a suite, selected, and compared with those of another evaluation.

Files are read by records/evaluations/reading.py; DuckDB has its tables in memory, and may open nothing. The answers
that were read last are kept, and read again where the file has changed.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import duckdb
import numpy as np
import pyarrow as pa

from titan_rl.config.io.printable import printable
from titan_rl.diagnostics.web.data.answer_selection import QUESTION_ID, STATUS, AnswerSelection
from titan_rl.records.evaluations.estimators import Estimate, estimate
from titan_rl.records.evaluations.reading import (
    EvaluationError,
    Stamp,
    SuiteRecord,
    evaluation_names,
    order_of,
    read_answers,
    read_record,
    stamp_of,
    suite_names,
)

_Read = TypeVar("_Read")
MOST_SAMPLES = 128
"""Answers to a question that are shown at once."""
_KEPT = 2
"""Tables of answers: that which is shown, and that beside it."""
_SHOWN = 200
"""Characters of another library's message."""
_ALONE = "select *, null::boolean as correct_beside, null::integer as change from shown"
_BESIDE = """select s.*, b.correct_beside, (s.correct::integer - b.correct_beside::integer) * {sign} as change
from shown s left join (select question_id, sample, any_value(question) as question,
any_value(correct) as correct_beside from beside group by question_id, sample) b
on s.question_id = b.question_id and s.sample = b.sample and s.question is not distinct from b.question"""
"""Answers by their question and sample: a file that names one twice is joined with one of them."""


Signature = tuple[list[str], list[str], tuple[Stamp, ...]]
"""Names of evaluations and suites, and stamps of the files that are shown."""


class Place(NamedTuple):
    """A suite of an evaluation."""

    evaluation: str
    suite: str


@dataclass(frozen=True)
class AnswersPage:
    """Page of a selection."""

    rows: list[dict[str, Any]]
    count: int
    """Of all answers that are selected, or of their questions."""
    num_answers: int
    num_right: int


@dataclass(frozen=True)
class Comparison:
    """Answers of the later of two evaluations against the same samples of the earlier one."""

    num_answers: int
    """In both."""
    became_right: int
    became_wrong: int
    num_better: int
    """Questions with more right answers."""
    num_worse: int
    difference: Estimate | None
    """Of the share of right answers, with its interval over the questions; None without a common question."""


@dataclass(frozen=True)
class Overview:
    """What there is of a suite, but for its answers."""

    names: list[str]
    """Of the evaluations; without any, the rest is empty."""
    evaluation: str = ""
    suites: list[str] = field(default_factory=list)
    """Of the evaluation."""
    place: Place | None = None
    """None where there is no suite."""
    beside: Place | None = None
    """None where nothing is chosen, or its answers cannot be read."""
    record: SuiteRecord | None = None
    record_beside: SuiteRecord | None = None
    comparison: Comparison | None = None
    statuses: list[str] | None = None
    """Of the answers; None where they cannot be read."""
    has_finals: bool = False
    """Whether any answer has a final one, as a majority counts it."""
    notices: tuple[str, ...] = ()
    """A line for each file that cannot be read."""
    read: tuple[Place, ...] = ()
    """Whose files were read, or should have been."""
    stamps: tuple[Stamp, ...] = ()
    """Of these files, before they were read."""

    @property
    def signature(self) -> Signature:
        return self.names, self.suites, self.stamps


class Evaluations:
    """Reader of evaluations. Any thread may call it. Errors of reading answers: EvaluationError."""

    def __init__(self, folder: Path, names: Sequence[str] = ()) -> None:
        """``names``: of the evaluations in the folder that are shown; without any, all."""
        self.folder, self._names = folder, names
        self._db = duckdb.connect(":memory:", config={"threads": 2, "autoinstall_known_extensions": False})
        for setting in ("autoload_known_extensions = false", "temp_directory = ''", "enable_external_access = false"):
            self._db.execute(f"set {setting}")
        self._db.execute("set lock_configuration = true")
        self._kept: OrderedDict[Place, tuple[Stamp, pa.Table]] = OrderedDict()
        self._reading = threading.Lock()

    def signature(self, overview: Overview) -> Signature:
        """The overview's, as it would be now: another where there is something new to show."""
        suites = suite_names(self.folder, overview.evaluation) if overview.evaluation else []
        return self.names(), suites, self._stamps(overview.read)

    def names(self) -> list[str]:
        """Names of the evaluations that are there, in order."""
        if not self._names:
            return evaluation_names(self.folder)
        paths = [self.folder / name for name in self._names]
        return sorted((path.name for path in paths if path.is_dir() and not path.is_symlink()), key=order_of)

    def _stamps(self, places: Iterable[Place]) -> tuple[Stamp, ...]:
        return tuple(stamp_of(self.folder, *place) for place in places)

    def overview(self, evaluation: str, suite: str, beside: str) -> Overview:
        """Overview of a suite; what is not there gives way to the newest evaluation, its first suite, and nothing
        beside. Errors: none, but notices."""
        names = self.names()
        if not names:
            return Overview([])
        notices: dict[str, None] = {}
        if evaluation and evaluation not in names:
            notices[f"{evaluation} is not among the evaluations: this is {names[-1]}"] = None
        evaluation = evaluation if evaluation in names else names[-1]
        suites = suite_names(self.folder, evaluation)
        if not suites:
            return Overview(names, evaluation, notices=(*notices, f"{evaluation} holds no suite yet"))
        place = Place(evaluation, suite if suite in suites else suites[0])
        other = Place(beside, place.suite) if beside in names and beside != evaluation else None
        read = tuple(each for each in (place, other) if each is not None)
        stamps = self._stamps(read)

        def tried(read: Callable[..., _Read], *places: Place | None) -> _Read | None:
            if None in places:
                return None
            try:
                return read(*places)
            except EvaluationError as error:
                notices[str(error)] = None
                return None

        record, of_other = tried(self._record, place), tried(self._record, other)
        statuses, comparison = tried(self.statuses, place), tried(self.comparison, place, other)
        other, has_finals = other if comparison else None, bool(tried(self._has_finals, place))
        found = record, of_other, comparison, statuses, has_finals, tuple(notices), read, stamps
        return Overview(names, evaluation, suites, place, other, *found)

    def _record(self, place: Place) -> SuiteRecord:
        return read_record(self.folder, *place)

    # answers

    def page(
        self, place: Place, beside: Place | None, selection: AnswerSelection, first: int, count: int
    ) -> AnswersPage:
        """Page of a selection: ``count`` rows from the ``first`` on. Questions with a matching answer are whole."""
        cursor, joined = self._joined(place, beside)
        where, values = selection.where()
        source = f"from ({joined}) where {where} and {selection.has_become}"
        if selection.by_question:
            source = (
                f"from (select *, sum(change) over (partition by question_id) as question_change, "
                f"bool_or({where}) over (partition by question_id) as is_selected from ({joined})) "
                f"where is_selected and {selection.has_become.replace('change', 'question_change')}"
            )
        counted = "count(distinct question_id)" if selection.by_question else "count(*)"
        [totals] = _fetched(cursor, f"select {counted}, count(*), count(*) filter (correct) {source}", values)
        with_beside = beside is not None
        columns = ", ".join(f"{sql} as {name}" for name, sql in selection.columns(with_beside=with_beside).items())
        grouped = "group by question_id" if selection.by_question else ""
        order = selection.order(with_beside=with_beside)
        query = f"select {columns} {source} {grouped} order by {order} limit ? offset ?"
        rows = _fetched(cursor, query, [*values, count, first])
        names = [column[0] for column in cursor.description]
        return AnswersPage([dict(zip(names, row, strict=True)) for row in rows], *totals)

    def statuses(self, place: Place) -> list[str]:
        """Distinct statuses, at most a hundred."""
        cursor, _ = self._joined(place, None)
        query = f"select distinct {STATUS} from shown where status <> '' order by 1 limit 100"
        return [row[0] for row in _fetched(cursor, query)]

    def _has_finals(self, place: Place) -> bool:
        cursor, _ = self._joined(place, None)
        return bool(_fetched(cursor, "select 1 from shown where final <> '' limit 1"))

    def comparison(self, place: Place, beside: Place) -> Comparison:
        cursor, joined = self._joined(place, beside)
        rows = _fetched(
            cursor,
            "select count(change), sum(change), count(*) filter (change > 0), count(*) filter (change < 0) "
            f"from ({joined}) group by question_id having count(change) > 0 order by min(place)",
        )
        counts, changes = [row[0] for row in rows], [int(row[1]) for row in rows]
        shares = [change / count for change, count in zip(changes, counts, strict=True)]
        return Comparison(
            sum(counts),
            sum(row[2] for row in rows),
            sum(row[3] for row in rows),
            sum(change > 0 for change in changes),
            sum(change < 0 for change in changes),
            estimate(shares, "difference") if shares else None,
        )

    def answer(self, place: Place, question_id: str, sample: int) -> dict[str, Any] | None:
        """Whole row of an answer, as records/evaluations/files.py has it; None if there is none."""
        found = self._whole(place, f"{QUESTION_ID} = ? and sample = ?", [question_id, sample], 1)
        return found[0] if found else None

    def question(self, place: Place, question_id: str) -> list[dict[str, Any]]:
        """Whole rows of a question's answers, at most MOST_SAMPLES and one."""
        return self._whole(place, f"{QUESTION_ID} = ?", [question_id], MOST_SAMPLES + 1)

    def _whole(self, place: Place, where: str, values: list[Any], most: int) -> list[dict[str, Any]]:
        table = self._table(place)
        query = f"select place from shown where {where} order by place limit {most}"
        rows = _fetched(self._cursor(shown=table), query, values)
        return table.take(pa.array([row[0] for row in rows], pa.int64())).to_pylist()

    def _joined(self, place: Place, beside: Place | None) -> tuple[duckdb.DuckDBPyConnection, str]:
        """Connection with the tables, and the query of answers with those of the other evaluation."""
        if beside is None:
            return self._cursor(shown=self._table(place)), _ALONE
        sign = 1 if order_of(place.evaluation) >= order_of(beside.evaluation) else -1
        return self._cursor(shown=self._table(place), beside=self._table(beside)), _BESIDE.format(sign=sign)

    def _cursor(self, **tables: pa.Table) -> duckdb.DuckDBPyConnection:
        """Connection of its own with these tables."""
        cursor = self._db.cursor()
        for name, table in tables.items():
            place = pa.array(np.arange(len(table)))
            cursor.register(name, table.drop_columns(["readings"]).append_column("place", place))
        return cursor

    def _table(self, place: Place) -> pa.Table:
        with self._reading:
            stamp = stamp_of(self.folder, *place)
            kept = self._kept.pop(place, None)
            if kept is None or kept[0] != stamp:
                while len(self._kept) >= _KEPT:
                    self._kept.popitem(last=False)
                kept = stamp, read_answers(self.folder, *place)
            self._kept[place] = kept
            return kept[1]


def _fetched(cursor: duckdb.DuckDBPyConnection, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
    """Errors: EvaluationError, such as for too little memory."""
    try:
        return cursor.execute(query, list(values)).fetchall()
    except duckdb.Error as error:
        raise EvaluationError(f"answers cannot be selected: {printable(str(error), _SHOWN)}") from None

"""Selection and order of a suite's answers as SQL with parameters and a list of allowed names.

Pure. The tables are those of data/evaluations.py: ``shown``, joined with the answers of another evaluation, ``beside``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from titan_rl.diagnostics.web.data.selection import text_of

STATUS = "left(status, 40)"
QUESTION_ID = "left(question_id, 120)"
_EXCERPT = 160
COLUMNS = {
    "question_id": QUESTION_ID,
    "sample": "sample",
    "correct": "correct",
    "correct_beside": "correct_beside",
    "question": f"left(question, {_EXCERPT})",
    "final": "left(final, 80)",
    "expected": "left(expected, 80)",
    "answer": f"left(answer, {_EXCERPT})",
    "status": STATUS,
    "num_tokens": "num_tokens",
}
"""Of a row that is shown, each with what it is in the table."""
QUESTION_COLUMNS = {
    "question_id": "left(any_value(question_id), 120)",
    "question": f"left(any_value(question), {_EXCERPT})",
    "expected": "left(any_value(expected), 80)",
    "right": "count(*) filter (correct)",
    "right_beside": "count(*) filter (correct_beside)",
    "change": "sum(change)",
    "count": "count(*)",
    "num_tokens": "avg(num_tokens)",
}
"""Of a question, over its answers."""
_ORDERS = {"question_id": "place"}
"""What a column is sorted by, where it is not the column: questions have the order of the file."""
SEARCHED = ("answer", "question", "question_id", "final", "expected")
_VERDICTS = ("right", "wrong")
_OF_BESIDE = ("correct_beside", "right_beside", "change")


@dataclass(frozen=True)
class AnswerSelection:
    text: str = ""
    """In the answer, the question or what was expected; capitals do not matter."""
    correct: str = ""
    """``right`` or ``wrong``; empty: any."""
    status: str = ""
    became: str = ""
    """``right`` or ``wrong``: from the earlier of two evaluations to the later."""
    sort: str = "question_id"
    descending: bool = False
    by_question: bool = False
    """Whether answers to one question are one row."""

    def where(self) -> tuple[str, list[Any]]:
        """Condition on an answer, but for ``became``, and its values."""
        terms: list[tuple[str, list[Any]]] = []
        if self.text:
            matches = " or ".join(f"contains(lower({name}), lower(?))" for name in SEARCHED)
            terms.append((f"coalesce({matches}, false)", [self.text] * len(SEARCHED)))
        if self.correct:
            terms.append((f"{'' if self.correct == 'right' else 'not '}correct", []))
        if self.status:
            terms.append((f"{STATUS} = ?", [self.status]))
        return " and ".join(term for term, _ in terms) or "true", [value for _, values in terms for value in values]

    @property
    def has_become(self) -> str:
        """Condition on ``change``: 1 of what became right, -1 of what became wrong, 0 or null of others."""
        return {"right": "change > 0", "wrong": "change < 0"}.get(self.became, "true")

    def columns(self, *, with_beside: bool) -> dict[str, str]:
        columns = QUESTION_COLUMNS if self.by_question else COLUMNS
        return {name: sql for name, sql in columns.items() if with_beside or name not in _OF_BESIDE}

    def order(self, *, with_beside: bool) -> str:
        """Order clause of ``columns``. A column that is not there orders as none does."""
        columns, way = self.columns(with_beside=with_beside), "desc" if self.descending else "asc"
        sort = self.sort if self.sort in columns else "question_id"
        place = "min(place)" if self.by_question else "place"
        return f"{place if sort in _ORDERS else columns[sort]} {way} nulls last, {place}"

    def as_query(self) -> dict[str, str]:
        """Query parameters of all fields that differ from the defaults."""
        names = ("text", "correct", "status", "became")
        query = {name: getattr(self, name) for name in names if getattr(self, name)}
        if (self.sort, self.descending) != ("question_id", False):
            query["sort"] = f"{'-' if self.descending else ''}{self.sort}"
        return query | ({"questions": "1"} if self.by_question else {})


def answer_selection_of(query: Mapping[str, str]) -> AnswerSelection:
    """Selection of these query parameters; unknown ones, and values that are none, are ignored."""
    correct, became = (value if (value := query.get(name, "")) in _VERDICTS else "" for name in ("correct", "became"))
    by_question = query.get("questions") == "1"
    text, status = text_of(query, "text"), text_of(query, "status")
    selection = AnswerSelection(text, correct, status, became, by_question=by_question)
    sort = query.get("sort", "question_id")
    if (column := sort.removeprefix("-")) in selection.columns(with_beside=True):
        return replace(selection, sort=column, descending=sort.startswith("-"))
    return selection

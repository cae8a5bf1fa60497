"""The view of evaluations: a suite's estimates, and its answers, fifty at a time, beside those of another step."""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from nicegui import run as nicegui_run
from nicegui import ui
from nicegui.events import GenericEventArguments

from titan_rl.config.io.printable import printable
from titan_rl.diagnostics.web.data.answer_selection import AnswerSelection, answer_selection_of
from titan_rl.diagnostics.web.data.evaluations import AnswersPage, Evaluations, Overview
from titan_rl.diagnostics.web.data.selection import text_of, whole_number
from titan_rl.diagnostics.web.views import estimates as html
from titan_rl.diagnostics.web.views.answer import open_answer, open_question
from titan_rl.records.evaluations.reading import EvaluationError

_NONE = (
    '<span class="soft">No suite was evaluated yet: give the run\'s TOML an <code>[[eval.suites]]</code> table, or '
    "evaluate its model with <code>titan-rl eval RUN/model --suite gsm8k --out RUN/evaluations/NAME</code>.</span>"
)
_ROWS = 50
_LOOK = 3.0
"""Seconds between two looks at whether there is something new."""
_LABELS = {
    **{"question_id": "question", "correct": "counts as", "question": "asked", "num_tokens": "tokens"},
    "count": "answers",
}
_WIDTHS = {
    **{"question_id": 92, "sample": 64, "correct": 78, "correct_beside": 78, "final": 96, "expected": 96, "status": 84},
    **{"num_tokens": 70, "right": 70, "right_beside": 78, "change": 70, "count": 74},
}
"""Pixels; what has none (texts) shares the rest."""
_NUMBERS = ("sample", "num_tokens", "right", "right_beside", "change", "count")
_WIDE_ONLY = ("question", "answer", "num_tokens", "count")
"""Columns that a phone has no room for."""
_VERDICTS = ("correct", "correct_beside")
_VERDICT_LOOK = "row => ({{right: 'good', wrong: 'bad'}})[row.{name}] || 'soft'"


class EvaluationsView:
    """Evaluations on one browser page, at first the newest. What is shown stays when another comes."""

    def __init__(self, source: Evaluations, query: Mapping[str, str], moved: Callable[[dict[str, str]], None]) -> None:
        """``query``: parameters of the address. ``moved``: is told them when they are others."""
        self.source, self.selection, self._moved = source, answer_selection_of(query), moved
        self._chosen = {name: text_of(query, name) for name in ("evaluation", "suite", "beside")}
        self._opened = {name: text_of(query, name) for name in ("answer", "question") if name in query}
        self._first_page, self._newest = whole_number(query, "page") or 1, 0
        self._overview, self._num_loading = Overview([]), 0
        self.notices = ui.html(sanitize=False).classes("w-full")
        self._head()
        self._answers()
        ui.timer(0.05, self._begin, once=True)
        ui.timer(_LOOK, self._look)

    # what there is to see

    def _head(self) -> None:
        with ui.element("div").classes("card") as self.head:
            with ui.element("div").classes("filters q-mb-md"):
                self.boxes = {
                    name: self._choice(title, partial(self._choose, name))
                    for name, title in (("evaluation", "evaluation"), ("suite", "suite"), ("beside", "beside"))
                }
            with ui.element("div").classes("two"):
                self.estimates, self.facts = ui.html(sanitize=False), ui.html(sanitize=False)
            self.comparison = ui.html(sanitize=False).classes("q-mt-sm")
            with ui.expansion("questions that were not scored").classes("group") as self.unscored_group:
                self.unscored = ui.html(sanitize=False)
            with ui.expansion("settings").classes("group") as self.settings_group:
                self.settings = ui.html(sanitize=False)
        self.head.set_visibility(False)

    def _answers(self) -> None:
        chosen = self.selection
        with ui.element("div").classes("card") as self.body:
            with ui.element("div").classes("filters q-mb-sm"):
                ways = ui.toggle(
                    {False: "answers", True: "questions"}, value=chosen.by_question, on_change=self._arrange
                )
                ways.props("dense flat no-caps")
                search = ui.input("search questions and answers", value=chosen.text)
                search.on_value_change(lambda e: self._select(text=e.value or ""))
                search.props('dense clearable debounce="180"').classes("wide")
                self.correct = self._choice("counts as", lambda value: self._select(correct=value))
                self.status = self._choice("status", lambda value: self._select(status=value))
                self.became = self._choice("became", lambda value: self._select(became=value))
            self.correct.set_options({"": "any", "right": "right", "wrong": "wrong"}, value=chosen.correct)
            self.summary = ui.label("reading the answers …").classes("soft")
            pagination = {"rowsPerPage": _ROWS, "page": 1, "rowsNumber": 0}
            self.table = ui.table(columns=[], rows=[], row_key="key", pagination=pagination)
            self.table.classes("rollouts").props("flat dense binary-state-sort :rows-per-page-options='[50]'")
            self.table.on("request", self._on_request)
            self.table.on("rowClick", lambda event: self._open(event.args[1]), [[], None, None])
        self.body.set_visibility(False)

    def _choice(self, title: str, chosen: Callable[[str], Awaitable[None]]) -> ui.select:
        box = ui.select({"": "any"}, value="", label=title)
        box.on_value_change(lambda event: chosen(event.value or ""))
        return box.props("dense options-dense").style("min-width: 110px")

    # what is asked

    async def _choose(self, name: str, value: str) -> None:
        """Another evaluation or suite, or another beside it."""
        if value != self._chosen[name]:
            self._chosen[name] = value
            await self._load(page=1)

    async def _select(self, **changes: Any) -> None:
        if (selection := replace(self.selection, **changes)) != self.selection:
            self.selection = selection
            await self._show(page=1)

    async def _arrange(self, event: Any) -> None:
        """By answer, or by question."""
        changed = replace(self.selection, by_question=bool(event.value))
        if changed.sort not in changed.columns(with_beside=True):
            changed = replace(changed, sort=AnswerSelection.sort, descending=False)
        self.selection = changed
        await self._show(page=1)

    async def _on_request(self, event: GenericEventArguments) -> None:
        """Another page, or another order."""
        pagination = event.args["pagination"]
        sort = pagination.get("sortBy") or AnswerSelection.sort
        if sort in self.selection.columns(with_beside=True):
            self.selection = replace(self.selection, sort=sort, descending=bool(pagination.get("descending")))
        await self._show(page=max(int(pagination.get("page") or 1), 1))

    async def _open(self, row: dict[str, Any]) -> None:
        """An answer, or all answers to a question, in a sheet."""
        question_id = str(row.get("id"))
        if self.selection.by_question:
            await self._open_at({"question": question_id})
        else:
            await self._open_at({"answer": f"{question_id}/{row.get('sample')}"})

    async def _open_at(self, opened: dict[str, str]) -> None:
        """What an address tells is opened: ``question``, or ``answer`` as QUESTION/SAMPLE."""
        places = tuple(place for place in (self._overview.place, self._overview.beside) if place is not None)
        self._opened = opened
        self._notify_moved()
        if "question" in opened:
            await open_question(self.source, places, opened["question"], self._closed)
        elif "answer" in opened:
            question_id, _, sample = opened["answer"].rpartition("/")
            number = whole_number({"sample": sample}, "sample")
            await open_answer(self.source, places, question_id, -1 if number is None else number, self._closed)

    def _closed(self) -> None:
        self._opened = {}
        self._notify_moved()

    def _notify_moved(self) -> None:
        page = int(self.table.pagination["page"])
        more = ({"page": str(page)} if page > 1 else {}) | self._opened
        self._moved({name: value for name, value in self._chosen.items() if value} | self.selection.as_query() | more)

    # what is shown

    async def _begin(self) -> None:
        opened = self._opened
        await self._load(page=self._first_page)
        if opened and self._overview.statuses is not None:
            await self._open_at(opened)

    async def _look(self) -> None:
        """Read again what has changed."""
        if self._num_loading:
            return
        overview = self._overview
        if await nicegui_run.io_bound(self.source.signature, overview) != overview.signature:
            await self._load(page=int(self.table.pagination["page"]))

    async def _load(self, page: int) -> None:
        """Read the chosen suite, and show it."""
        self._newest = number = self._newest + 1
        self._num_loading += 1
        try:
            overview = await nicegui_run.io_bound(self.source.overview, **self._chosen)
        finally:
            self._num_loading -= 1
        if number != self._newest or overview is None:
            return  # something else was asked meanwhile
        self._overview = overview
        self._draw()
        await self._show(page)

    def _draw(self) -> None:
        overview, record = self._overview, self._overview.record
        self.notices.set_content(html.notices(overview.notices) if overview.names else _NONE)
        self.head.set_visibility(bool(overview.names))
        self.body.set_visibility(overview.statuses is not None)
        if not overview.names:
            return  # what the address asks for may come
        self._set_choices()
        self.estimates.set_content(html.estimates(overview))
        self.comparison.set_content(html.comparison(overview))
        self.facts.set_content(html.facts(record) if record else "")
        self.unscored.set_content(html.unscored(record) if record else "")
        self.unscored_group.set_visibility(bool(record and record.unscored))
        self.settings.set_content(html.settings(record) if record else "")
        self.settings_group.set_visibility(record is not None)

    def _set_choices(self) -> None:
        overview = self._overview
        names = {name: html.label(name) for name in reversed(overview.names)}
        others = {name: title for name, title in names.items() if name != overview.evaluation}
        suite, beside = overview.place.suite if overview.place else "", self._chosen["beside"]
        self._chosen = {"evaluation": overview.evaluation, "suite": suite, "beside": beside if beside in others else ""}
        suites = {name: name for name in overview.suites}
        for name, options in (("evaluation", names), ("suite", suites), ("beside", {"": "nothing"} | others)):
            self.boxes[name].set_options(options or {"": "none"}, value=self._chosen[name])
        status = self.selection.status
        statuses = {name: printable(name) for name in (*(overview.statuses or []), status) if name}
        self.status.set_options({"": "any"} | statuses, value=status)
        became = {"right": "became right", "wrong": "became wrong"}
        self.became.set_options({"": "any"} | became, value=self.selection.became)
        self.became.set_visibility(overview.beside is not None)

    async def _show(self, page: int) -> None:
        overview = self._overview
        if overview.place is None or overview.statuses is None:
            return self._notify_moved()
        if overview.beside is None and self.selection.became:
            self.selection = replace(self.selection, became="")
            self.became.set_value("")
        selection = self.selection
        self._newest = number = self._newest + 1
        rows = (page - 1) * _ROWS, _ROWS
        try:
            places = overview.place, overview.beside
            result = await nicegui_run.io_bound(self.source.page, *places, selection, *rows)
        except EvaluationError as error:
            self.notices.set_content(html.notices([str(error)]))
            return
        if number != self._newest or result is None:
            return  # something else was asked meanwhile
        self.summary.set_text(summary(result, by_question=selection.by_question))
        self.table.columns = columns(overview, selection)
        order = {"sortBy": selection.sort, "descending": selection.descending}
        self.table.pagination |= {"page": page, "rowsNumber": result.count} | order
        self.table.rows = [shown_row(row, overview.place.suite) for row in result.rows]
        self.table.update()
        self._notify_moved()


def columns(overview: Overview, selection: AnswerSelection) -> list[dict[str, Any]]:
    """Columns of the table; those of the other evaluation have its name."""
    return list(_columns(overview, selection.columns(with_beside=overview.beside is not None)))


def _columns(overview: Overview, names: Iterable[str]) -> Iterable[dict[str, Any]]:
    labels = dict(_LABELS)
    if overview.place is not None and overview.beside is not None:
        shown, beside = html.label(overview.place.evaluation), html.label(overview.beside.evaluation)
        labels |= {"correct": shown, "correct_beside": beside, "right": f"right, {shown}"}
        labels |= {"right_beside": f"right, {beside}"}
    wide_only = (*_WIDE_ONLY, "expected", "status") if overview.beside else _WIDE_ONLY
    for name in (name for name in names if overview.has_finals or name != "final"):
        hidden = "wide-only" if name in wide_only else ""
        look = f"said-short {hidden}" if name in ("question", "answer", "final", "expected") else hidden
        yield {
            **{"name": name, "field": name, "label": labels.get(name, name), "sortable": True},
            "align": "right" if name in _NUMBERS else "left",
            "headerStyle": f"width: {_WIDTHS[name]}px" if name in _WIDTHS else "",
            "headerClasses": hidden,
            **({":classes": _VERDICT_LOOK.format(name=name)} if name in _VERDICTS else {"classes": look}),
        }


def shown_row(row: dict[str, Any], suite: str) -> dict[str, Any]:
    """Row as the table has it: ``id`` is the whole name of its question."""
    words = {True: "right", False: "wrong", None: "–"}
    shown = row | {name: words[row[name]] for name in _VERDICTS if name in row}
    for name in ("question", "answer", "final", "expected", "status"):
        if name in row:
            shown[name] = printable(row[name] or "")
    if isinstance(row["num_tokens"], float):
        shown["num_tokens"] = f"{row['num_tokens']:.1f}"
    if row.get("change") is not None:
        shown["change"] = f"{row['change']:+d}" if row["change"] else "0"
    name = row["question_id"]
    return shown | {
        "id": name,
        "question_id": printable(name.removeprefix(f"eval/{suite}/")),
        "key": f"{name}/{row.get('sample', '')}",
    }


def summary(page: AnswersPage, *, by_question: bool) -> str:
    if not page.count:
        return f"no {'question' if by_question else 'answer'} is like that"
    share = f"{page.num_right:,} of {page.num_answers:,} answers right ({page.num_right / page.num_answers:.1%})"
    return f"{page.count:,} questions · {share}" if by_question else share

"""The view of all rollouts, or of their groups: searched, filtered and sorted in DuckDB, fifty at a time."""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from nicegui import run as nicegui_run
from nicegui import ui
from nicegui.events import GenericEventArguments

from titan_rl.diagnostics.web.data.index import Page
from titan_rl.diagnostics.web.data.selection import COLUMNS, GROUP_COLUMNS, RANGES, selection_of, whole_number
from titan_rl.diagnostics.web.data.watched_run import Watched
from titan_rl.diagnostics.web.views.group import open_group
from titan_rl.diagnostics.web.views.rollout import open_sheet

_ROWS = 50
_DEBOUNCE = 'debounce="180"'
_LABELS = {
    "prompt_id": "prompt",
    "question": "asked",
    "text": "answer",
    "why": "discarded for",
    "task": "environment",
    "pass_rate": "pass rate",
    "count": "answers",
}
_TEXTS = ("prompt_id", "question", "text", "status", "why", "task")
_FORMS = {
    **{"reward": ".3f", "advantage": ".3f", "disagreement": ".2g", "pass_rate": ".0%", "spread": ".3g"},
    "length": ".4g",
}
_WIDTHS = {
    **{"step": 62, "prompt_id": 106, "sample": 64, "reward": 70, "advantage": 78, "length": 62, "disagreement": 102},
    **{"staleness": 74, "status": 78, "why": 84, "task": 96, "pass_rate": 76, "spread": 74, "count": 76},
}
"""Pixels; what has none (texts) shares the rest."""


def _columns(names: Iterable[str]) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "field": name,
            "label": _LABELS.get(name, name),
            "sortable": True,
            "align": "left" if name in _TEXTS else "right",
            "headerStyle": f"width: {_WIDTHS[name]}px" if name in _WIDTHS else "",
            "classes": "said-short" if name in ("question", "text") else "",
        }
        for name in names
    ]


class RolloutsView:
    """Table of rollouts on one browser page."""

    def __init__(self, run: Watched, query: Mapping[str, str], moved: Callable[[dict[str, str]], None]) -> None:
        """``query``: parameters of the address. ``moved``: is told them when they are others."""
        self.run, self.selection, self._newest, self._moved = run, selection_of(query), 0, moved
        self._opened = {name: query[name] for name in ("rollout", "group") if name in query}
        self._hidden: set[str] = set()
        """Columns that say nothing of this run."""
        self._first_page = whole_number(query, "page") or 1
        with ui.element("div").classes("card"):
            self._filters()
        with ui.element("div").classes("card"):
            self.summary = ui.label("reading the rollouts …").classes("soft")
            pagination = {"rowsPerPage": _ROWS, "page": 1, "rowsNumber": 0, "sortBy": "step", "descending": True}
            columns = _columns(self.selection.columns)
            self.table = ui.table(columns=columns, rows=[], row_key="key", pagination=pagination)
            self.table.classes("rollouts").props("flat dense binary-state-sort :rows-per-page-options='[50]'")
            self.table.on("request", self._on_request)
            self.table.on("rowClick", lambda event: self._open(event.args[1]), [[], None, None])
        ui.timer(0.05, self._begin, once=True)
        ui.timer(3.0, self._refresh)

    def _filters(self) -> None:
        chosen = self.selection
        with ui.element("div").classes("filters"):
            ways = ui.toggle({False: "rollouts", True: "groups"}, value=chosen.by_group, on_change=self._arrange)
            ways.props("dense flat no-caps")
            search = ui.input("search answers and prompts", value=chosen.text)
            search.on_value_change(lambda e: self._select(text=e.value or ""))
            search.props(f"dense clearable {_DEBOUNCE}").classes("wide")
            for name in RANGES:
                with ui.element("div").classes("range"):
                    for place, what in enumerate(("least", "most")):
                        end = chosen.ranges.get(name, (None, None))[place]
                        box = ui.input(name if what == "least" else "to", value="" if end is None else f"{end:g}")
                        box.on_value_change(lambda e, n=name, p=place: self._range(n, p, e.value))
                        box.props(f'dense {_DEBOUNCE} aria-label="{what} {name}"').classes("short")
            self.status = self._choice("status", chosen.status, lambda value: self._select(status=value))
            self.outcome = self._choice("outcome", chosen.outcome, lambda value: self._select(outcome=value))
            self.task = self._choice("environment", chosen.task, lambda value: self._select(task=value))

    def _choice(self, label: str, value: str, chosen: Callable[[str], Awaitable[None]]) -> ui.select:
        box = ui.select({"": "any", value: value or "any"}, value=value, label=label)
        box.on_value_change(lambda event: chosen(event.value or ""))
        return box.props("dense options-dense").style("min-width: 110px")

    # what is asked

    async def _range(self, name: str, place: int, value: str | None) -> None:
        try:
            number = float(value) if value else None
        except ValueError:
            return  # it is still being typed
        ends = list(self.selection.ranges.get(name, (None, None)))
        ends[place] = number
        await self._select(ranges=self.selection.ranges | {name: tuple(ends)})

    async def _select(self, **changes: Any) -> None:
        self.selection = replace(self.selection, **changes)
        await self._show(page=1)

    async def _arrange(self, event: Any) -> None:
        """By rollout, or by group."""
        by_group = bool(event.value)
        sort = self.selection.sort if self.selection.sort in (GROUP_COLUMNS if by_group else COLUMNS) else "step"
        self.selection = replace(self.selection, by_group=by_group, sort=sort)
        self._set_columns()
        await self._show(page=1)

    async def _on_request(self, event: GenericEventArguments) -> None:
        """Another page, or another order."""
        pagination = event.args["pagination"]
        sort = pagination.get("sortBy") or "step"
        if sort in self.selection.columns:
            self.selection = replace(self.selection, sort=sort, descending=bool(pagination.get("descending")))
        await self._show(page=max(int(pagination.get("page") or 1), 1))

    async def _open(self, row: dict[str, Any]) -> None:
        """A rollout, or a group of them, in a sheet."""
        place = f"{row.get('step')}/{row.get('prompt_id')}"
        if self.selection.by_group:
            self._opened = {"group": place}
            await open_group(self.run, row, self._closed)
        else:
            self._opened = {"rollout": f"{place}/{row.get('sample')}"}
            await open_sheet(self.run, row, self._closed)
        self._notify_moved()

    def _closed(self) -> None:
        self._opened = {}
        self._notify_moved()

    def _notify_moved(self) -> None:
        page = int(self.table.pagination["page"])
        self._moved(self.selection.as_query() | ({"page": str(page)} if page > 1 else {}) | self._opened)

    # what is shown

    async def _begin(self) -> None:
        index = self.run.index
        if not index.is_ready:
            await nicegui_run.io_bound(index.refresh)
        self._set_choices()
        opened = self._opened
        await self._show(page=self._first_page)
        if "group" in opened:
            await open_group(self.run, _row_of(opened["group"]), self._closed)
        elif "rollout" in opened:
            place, _, sample = opened["rollout"].rpartition("/")
            await open_sheet(self.run, _row_of(place) | {"sample": sample}, self._closed)

    async def _refresh(self) -> None:
        if await nicegui_run.io_bound(self.run.index.refresh):
            self._set_choices()
            await self._show(page=int(self.table.pagination["page"]))

    def _set_choices(self) -> None:
        index = self.run.index
        whys = {why: f"discarded: {why}" for why in index.choices("why")}
        for box, choices in (
            (self.status, {name: name for name in index.choices("status")}),
            (self.outcome, {"trained": "trained on", "discarded": "discarded"} | whys),
            (self.task, {name: name for name in index.choices("task")}),
        ):
            current = {} if box.value in choices or not box.value else {box.value: box.value}
            box.set_options({"": "any"} | choices | current)
        has_tasks, has_whys = len(self.task.options) > 1, bool(whys)
        self.task.set_visibility(has_tasks)
        self._hidden = {name for name, is_there in (("task", has_tasks), ("why", has_whys)) if not is_there}
        self._set_columns()

    def _set_columns(self) -> None:
        self.table.columns = _columns([name for name in self.selection.columns if name not in self._hidden])

    async def _show(self, page: int) -> None:
        self._newest = number = self._newest + 1
        result = await nicegui_run.io_bound(self.run.index.page, self.selection, (page - 1) * _ROWS, _ROWS)
        if number != self._newest or result is None:
            return  # something else was asked meanwhile
        self.summary.set_text(_summary(result, self.run, by_group=self.selection.by_group))
        self.table.pagination |= {
            "page": page,
            "rowsNumber": result.count,
            "sortBy": self.selection.sort,
            "descending": self.selection.descending,
        }
        self.table.rows = [_row(row) for row in result.rows]
        self.table.update()
        self._notify_moved()


def _row_of(place: str) -> dict[str, Any]:
    """Of an address: ``12/train/0000001``."""
    step, _, prompt_id = place.partition("/")
    return {"step": whole_number({"step": step}, "step"), "prompt_id": prompt_id}


def _row(row: dict[str, Any]) -> dict[str, Any]:
    shown = row | {"key": f"{row['step']}/{row['prompt_id']}/{row.get('sample', '')}"}
    for name in shown.keys() & _FORMS.keys():
        shown[name] = "" if row[name] is None else format(row[name], _FORMS[name])
    return shown


def _summary(page: Page, run: Watched, *, by_group: bool) -> str:
    damaged = run.index.damaged
    more = f" · {len(damaged)} files cannot be read: {', '.join(list(damaged)[:3])}" if damaged else ""
    what = "groups" if by_group else "rollouts"
    if not page.count:
        return f"no rollout is like that{more}"
    means = f"mean reward {page.reward or 0:.3f} · mean length {page.length or 0:.1f} tokens"
    return f"{page.count:,} {what} · {means}{more}"

"""The view of all rollouts: searched, filtered and sorted in DuckDB, fifty at a time."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from nicegui import run as nicegui_run
from nicegui import ui
from nicegui.events import GenericEventArguments

from titan_rl.diagnostics.web.index import Page
from titan_rl.diagnostics.web.rollout_sheet import open_sheet
from titan_rl.diagnostics.web.selection import RANGES, Selection
from titan_rl.diagnostics.web.watched import Watched

_ROWS = 50
_DEBOUNCE = 'debounce="180"'
_LABELS = {"prompt_id": "prompt", "text": "answer", "why": "discarded for", "task": "environment"}
_NUMBERS = ("step", "sample", "reward", "advantage", "length", "disagreement", "staleness")
_COLUMNS = [
    {
        "name": name,
        "field": name,
        "label": _LABELS.get(name, name),
        "sortable": True,
        "align": "right" if name in _NUMBERS else "left",
    }
    for name in (
        *("step", "prompt_id", "sample", "text", "reward", "advantage", "length", "disagreement", "staleness"),
        *("status", "why", "task"),
    )
]


class RolloutsView:
    """Of one browser's page."""

    def __init__(self, run: Watched) -> None:
        self.run, self.selection, self._newest = run, Selection(), 0
        with ui.element("div").classes("card"):
            self._filters()
        with ui.element("div").classes("card"):
            self.told = ui.label("reading the rollouts …").classes("soft")
            pagination = {"rowsPerPage": _ROWS, "page": 1, "rowsNumber": 0, "sortBy": "step", "descending": True}
            self.table = ui.table(columns=_COLUMNS, rows=[], row_key="key", pagination=pagination)
            self.table.classes("rollouts").props("flat dense binary-state-sort :rows-per-page-options='[50]'")
            self.table.on("request", self._asked)
            self.table.on("rowClick", lambda event: open_sheet(run, event.args[1]), [[], None, None])
        ui.timer(0.05, self._begin, once=True)
        ui.timer(3.0, self._refresh)

    def _filters(self) -> None:
        with ui.element("div").classes("filters"):
            search = ui.input("search answers and prompts", on_change=lambda e: self._select(text=e.value or ""))
            search.props(f"dense clearable {_DEBOUNCE}").classes("wide")
            for name in RANGES:
                with ui.element("div").classes("range"):
                    for place, what in enumerate(("least", "most")):
                        told = name if what == "least" else "to"
                        box = ui.input(told, on_change=lambda e, n=name, p=place: self._range(n, p, e.value))
                        box.props(f'dense {_DEBOUNCE} aria-label="{what} {name}"').classes("short")
            self.status = self._choice("status", lambda value: self._select(status=value))
            self.outcome = self._choice("outcome", lambda value: self._select(outcome=value))
            self.task = self._choice("environment", lambda value: self._select(task=value))

    def _choice(self, label: str, chosen: Callable[[str], Awaitable[None]]) -> ui.select:
        box = ui.select({"": "any"}, value="", label=label, on_change=lambda event: chosen(event.value or ""))
        return box.props("dense options-dense").style("min-width: 120px")

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

    async def _asked(self, event: GenericEventArguments) -> None:
        """Another page, or another order."""
        wanted = event.args["pagination"]
        sort = wanted.get("sortBy") or "step"
        if sort in {column["name"] for column in _COLUMNS}:
            self.selection = replace(self.selection, sort=sort, descending=bool(wanted.get("descending")))
        await self._show(page=max(int(wanted.get("page") or 1), 1))

    # what is shown

    async def _begin(self) -> None:
        index = self.run.index
        if not index.is_ready:
            await nicegui_run.io_bound(index.refresh)
        self._set_choices()
        await self._show(page=1)

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
            box.set_options({"": "any"} | choices)
        self.task.set_visibility(len(self.task.options) > 1)

    async def _show(self, page: int) -> None:
        self._newest = mine = self._newest + 1
        found = await nicegui_run.io_bound(self.run.index.page, self.selection, (page - 1) * _ROWS, _ROWS)
        if mine != self._newest or found is None:
            return  # something else was asked meanwhile
        self.told.set_text(_told(found, self.run))
        self.table.pagination |= {
            "page": page,
            "rowsNumber": found.count,
            "sortBy": self.selection.sort,
            "descending": self.selection.descending,
        }
        self.table.rows = [_row(row) for row in found.rows]
        self.table.update()


def _row(row: dict[str, Any]) -> dict[str, Any]:
    shown = row | {"key": f"{row['step']}/{row['prompt_id']}/{row['sample']}"}
    for name, form in {"reward": ".3f", "advantage": ".3f", "disagreement": ".2g"}.items():
        shown[name] = "" if row[name] is None else format(row[name], form)
    return shown


def _told(page: Page, run: Watched) -> str:
    damaged = run.index.damaged
    more = f" · {len(damaged)} files cannot be read: {', '.join(list(damaged)[:3])}" if damaged else ""
    if not page.count:
        return f"no rollout is like that{more}"
    return f"{page.count:,} rollouts · mean reward {page.reward:.3f} · mean length {page.length or 0:.1f} tokens{more}"

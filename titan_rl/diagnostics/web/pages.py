"""The page as a whole: which run, which view."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from urllib.parse import urlencode

from nicegui import ui

from titan_rl.diagnostics.web.data.facts import state_of
from titan_rl.diagnostics.web.data.selection import whole_number
from titan_rl.diagnostics.web.data.watched_run import Watched, WatchedEvaluations
from titan_rl.diagnostics.web.html.style import CSS
from titan_rl.diagnostics.web.views.evaluations import EvaluationsView
from titan_rl.diagnostics.web.views.mesh import mesh
from titan_rl.diagnostics.web.views.overview import Overview
from titan_rl.diagnostics.web.views.rollouts import RolloutsView
from titan_rl.diagnostics.web.views.steps import StepsView

_VIEWS = {
    **{"curves": "Curves", "steps": "Steps", "rollouts": "Rollouts", "evaluations": "Evaluations"},
    "mesh": "Mesh and faults",
}


class Pages:
    """Content of one browser page. The address tells what is shown, so that it can be kept and passed on."""

    def __init__(self, runs: list[Watched | WatchedEvaluations], query: Mapping[str, str]) -> None:
        """``runs``: those that are watched, and evaluations without one. ``query``: parameters of the address; what is
        none of ours is passed over."""
        number = whole_number(query, "run") or 0
        self.runs, self.run = runs, runs[number if number < len(runs) else 0]
        self.view = query["view"] if query.get("view") in _VIEWS else "curves"
        ui.add_css(CSS)
        ui.colors(primary="#2f7d8c")
        self.dark = ui.dark_mode(None)
        with ui.element("header").classes("top"):
            self._top()
        self.body = ui.column().classes("page")
        self.show(self.view, query)
        ui.timer(2.0, self._show_state)

    def _top(self) -> None:
        ui.label("titan_rl").classes("brand")
        if len(self.runs) > 1:
            names = {number: run.name for number, run in enumerate(self.runs)}
            ui.select(names, value=self.runs.index(self.run), on_change=lambda e: self._choose(e.value)).props(
                "dense borderless options-dense aria-label=run"
            )
        else:
            ui.label(self.run.name).classes("soft")
        self.state = ui.label()
        self._show_state()
        ui.element("div").classes("grow")
        with ui.element("nav").classes("nav"):
            self.buttons = {name: self._button(name, title) for name, title in _VIEWS.items()}
        dark = ui.button(icon="contrast", on_click=self._switch).props("flat dense round aria-label='light or dark'")
        dark.tooltip("light or dark")

    def _button(self, name: str, title: str) -> ui.element:
        button = ui.element("button").props(f"id=view-{name}")
        with button:
            ui.label(title)
        return button.on("click", lambda: self.show(name))

    async def _switch(self) -> None:
        is_dark = await ui.run_javascript("document.body.classList.contains('body--dark')")
        self.dark.set_value(not is_dark)

    def _choose(self, number: int) -> None:
        self.run = self.runs[number]
        self._show_state()
        self.show(self.view)

    def _show_state(self) -> None:
        self.state.set_visibility(isinstance(self.run, Watched))
        if not isinstance(self.run, Watched):
            return
        state, detail = state_of(self.run.run_dir)
        self.state.set_text(f"{state}: {detail}")
        self.state.classes(replace=f"pill {state}")

    def _moved(self, parameters: dict[str, str]) -> None:
        """The view shows something else: so does the address."""
        if not ui.context.client.has_socket_connection:
            return  # it has just been opened by that address
        number = self.runs.index(self.run)
        own = {"run": str(number)} if number else {}
        ui.navigate.history.replace(f"?{urlencode(own | {'view': self.view} | parameters)}")

    def show(self, view: str, query: Mapping[str, str] = MappingProxyType({})) -> None:
        """Switch to a view, of those that there are. ``query``: what of the view is to be seen."""
        draw = self._drawings(query)
        self.view = view = view if view in draw else next(iter(draw))
        for name, button in self.buttons.items():
            button.set_visibility(name in draw)
            button.classes(add="on") if name == view else button.classes(remove="on")
        self.body.clear()
        self._moved({})
        with self.body:
            draw[view]()

    def _drawings(self, query: Mapping[str, str]) -> dict[str, Callable[[], object]]:
        """Views of what is shown, by their names: of evaluations without a run, the evaluations."""
        run = self.run
        if not isinstance(run, Watched):
            return {"evaluations": lambda: EvaluationsView(run.evaluations, query, self._moved)}
        beside = [other for other in self.runs if other is not run and isinstance(other, Watched)]
        return {
            "curves": lambda: Overview(run, beside),
            "steps": lambda: StepsView(run, query, self._moved),
            "rollouts": lambda: RolloutsView(run, query, self._moved),
            "evaluations": lambda: EvaluationsView(run.evaluations, query, self._moved),
            "mesh": lambda: mesh(run),
        }

"""The view of one step as a time line across actors."""

from collections.abc import Callable, Mapping

from nicegui import ui

from titan_rl.diagnostics.web.data.selection import whole_number
from titan_rl.diagnostics.web.data.watched_run import Watched
from titan_rl.diagnostics.web.html.timeline import draw
from titan_rl.records.steps.trace import Trace, read_trace, trace_size

_NONE = (
    '<span class="soft">There is no trace yet: it is kept of each step whose weights went out, by runs of this release '
    "with a generator.</span>"
)
_MEANING = (
    '<span class="soft">Where an actor does nothing, its row is hatched: a bubble. "busy" is the share of the time '
    "in which it does something. <code>titan-rl trace RUN</code> exports the same for Perfetto.</span>"
)
_LOOK = 2.0
"""Seconds between two looks at whether the run went on."""


class StepsView:
    """Timeline view; follows the newest step, or stays at a chosen one."""

    def __init__(self, run: Watched, query: Mapping[str, str], moved: Callable[[dict[str, str]], None]) -> None:
        """``query``: parameters of the address. ``moved``: is told them when they are others."""
        self.root, self._moved = run.run_dir.root, moved
        self._requested = whole_number(query, "step")
        self.size, self.trace = 0, Trace()
        self.place, self.together = -1, 1
        with ui.element("div").classes("card"):
            with ui.row().classes("items-center w-full no-wrap q-mb-sm"):
                self.title = ui.html("<h2>Step by step</h2>", sanitize=False)
                ui.element("div").classes("grow")
                self._controls()
            self.picture = ui.html(_NONE, sanitize=False)
        ui.html(_MEANING, sanitize=False)
        self._look()
        ui.timer(_LOOK, self._look)

    def _controls(self) -> None:
        ui.button(icon="chevron_left", on_click=lambda: self._go(-1)).props("flat dense round aria-label='step before'")
        self.slider = ui.slider(min=0, max=0, value=0).props("dense").style("width: 260px")
        ui.button(icon="chevron_right", on_click=lambda: self._go(1)).props("flat dense round aria-label='next step'")
        ui.toggle({1: "1 step", 2: "2", 4: "4"}, value=1, on_change=lambda e: self._show(together=e.value)).props(
            "dense flat no-caps"
        )
        self.slider.on_value_change(lambda event: self._show(place=int(event.value or 0)))

    def _look(self) -> None:
        """Read what was written since the last look, if anything was."""
        if (size := trace_size(self.root)) == self.size:
            return
        was_newest = self.place == len(self.trace) - 1
        self.size, self.trace = size, read_trace(self.root)
        newest = len(self.trace) - 1
        self.slider.props(f"max={max(newest, 0)}")
        steps = list(self.trace)
        if self._requested in steps:
            place, self._requested = steps.index(self._requested), None
        elif newest >= 0 and (was_newest or self.place > newest):
            place = newest
        else:
            return
        self.slider.set_value(place)
        self._show(place=place)

    def _show(self, *, place: int | None = None, together: int | None = None) -> None:
        self.place = self.place if place is None else min(max(place, 0), len(self.trace) - 1)
        self.together = together or self.together
        if not self.trace:
            return
        steps = list(self.trace)
        shown = steps[max(self.place - self.together + 1, 0) : self.place + 1]
        number = str(shown[0]) if len(shown) == 1 else f"{shown[0]} to {shown[-1]}"
        self.title.set_content(f"<h2>Step {number}: who did what when</h2>")
        self._moved({"step": str(steps[self.place])} if self.place < len(steps) - 1 else {})
        self.picture.set_content(draw([span for step in shown for span in self.trace[step]]))

    def _go(self, by: int) -> None:
        self.slider.set_value(min(max(self.place + by, 0), max(len(self.trace) - 1, 0)))

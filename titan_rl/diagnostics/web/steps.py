"""The view of one step as a time line across actors."""

from nicegui import ui

from titan_rl.diagnostics.web.timeline import draw
from titan_rl.diagnostics.web.watched import Watched
from titan_rl.records.trace import read_trace

_NONE = (
    '<span class="soft">There is no trace yet: it is kept of each step whose weights went out, by runs of this release '
    "with a generator.</span>"
)


def steps(run: Watched) -> None:
    trace = read_trace(run.run_dir.root)
    if not trace:
        with ui.element("div").classes("card"):
            ui.html(f"<h2>Step by step</h2>{_NONE}", sanitize=False)
        return
    known = list(trace)
    at = {"place": len(known) - 1, "together": 1}
    with ui.element("div").classes("card"):
        with ui.row().classes("items-center w-full no-wrap q-mb-sm"):
            title = ui.html(sanitize=False)
            ui.element("div").classes("grow")
            ui.button(icon="chevron_left", on_click=lambda: go(-1)).props("flat dense round aria-label='step before'")
            slider = ui.slider(min=0, max=len(known) - 1, value=at["place"]).props("dense").style("width: 260px")
            ui.button(icon="chevron_right", on_click=lambda: go(1)).props("flat dense round aria-label='next step'")
            ui.toggle({1: "1 step", 2: "2", 4: "4"}, value=1, on_change=lambda e: show(together=e.value)).props(
                "dense flat no-caps"
            )
        picture = ui.html(sanitize=False)
    ui.html(
        '<span class="soft">Where an actor does nothing, its row is hatched: a bubble. "busy" is the share of the time '
        "in which it does something. <code>titan-rl trace RUN</code> exports the same for Perfetto.</span>",
        sanitize=False,
    )

    def show(place: int | None = None, together: int | None = None) -> None:
        at["place"] = at["place"] if place is None else min(max(place, 0), len(known) - 1)
        at["together"] = together or at["together"]
        first = max(at["place"] - at["together"] + 1, 0)
        wanted = known[first : at["place"] + 1]
        number = str(wanted[0]) if len(wanted) == 1 else f"{wanted[0]} to {wanted[-1]}"
        title.set_content(f"<h2>Step {number}: who did what when</h2>")
        picture.set_content(draw([span for step in wanted for span in trace[step]]))

    def go(by: int) -> None:
        slider.set_value(min(max(at["place"] + by, 0), len(known) - 1))

    slider.on_value_change(lambda event: show(place=int(event.value)))
    show()

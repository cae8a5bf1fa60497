"""The view of the mesh: its processes and their health, faults and what mended them."""

from html import escape

from nicegui import ui

from titan_rl.diagnostics.web.data.facts import Actor, Fault, actors_of, faults_of, plain_events, when
from titan_rl.diagnostics.web.data.watched_run import Watched

_SECONDS = 2.0


def mesh(run: Watched) -> None:
    health, faults = ui.html(sanitize=False).classes("card"), ui.html(sanitize=False).classes("card")

    def draw() -> None:
        events = plain_events(run.run_dir)
        for element, content in (
            (health, _health(actors_of(run.run_dir, events))),
            (faults, _faults(faults_of(events))),
        ):
            if element.content != content:
                element.set_content(content)

    draw()
    ui.timer(_SECONDS, draw)


def _health(actors: list[Actor]) -> str:
    rows = "".join(
        f'<tr><td>{escape(actor.name)}</td><td class="{"bad" if actor.state == "stopped" else ""}">'
        f"{escape(actor.state)}</td>"
        f'<td class="n">{actor.pid or "–"}</td><td class="n">{f"{actor.memory_mib:,}" if actor.pid else "–"}</td>'
        f'<td class="n">{actor.starts}</td><td class="n {"bad" if actor.deaths else ""}">{actor.deaths}</td>'
        "</tr>"
        for actor in actors
    )
    head = "<th>actor</th><th>state</th>" + "".join(
        f'<th class="n">{n}</th>' for n in ("pid", "MiB", "starts", "deaths")
    )
    none = '<tr><td class="soft">No process was recorded.</td></tr>'
    return f'<h2>The mesh</h2><table class="plain"><tr>{head}</tr>{rows or none}</table>'


def _faults(faults: list[Fault]) -> str:
    rows = "".join(
        f"<tr><td>{when(fault.time)}</td><td>{escape(fault.what)}</td><td>{escape(fault.why)}</td>"
        f'<td class="{"good" if fault.mended else "bad"}">{escape(fault.mended or "not recorded")}</td></tr>'
        for fault in faults
    )
    if not rows:
        return '<h2>Faults, and what mended them</h2><span class="soft">None was recorded.</span>'
    head = "".join(f"<th>{name}</th>" for name in ("when", "what", "why", "mended"))
    return f'<h2>Faults, and what mended them</h2><table class="plain"><tr>{head}</tr>{rows}</table>'

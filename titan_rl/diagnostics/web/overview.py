"""The first view: curves of the run with others beside it, alarms, and the ledger's account."""

from html import escape
from typing import Any

from nicegui import ui

from titan_rl.diagnostics.web.facts import account_of, alarms_of, plain_events
from titan_rl.diagnostics.web.style import PANEL_COLOURS
from titan_rl.diagnostics.web.watched import Watched
from titan_rl.records.plot import Curves, curves_of, is_logarithmic

_MOST_POINTS = 2000
"""Of a line; of a longer one each so-manieth is drawn."""
_SOFT = "#8b95a0"


def overview(run: Watched, beside: list[Watched]) -> None:
    """``beside``: other runs, whose curves are drawn, too."""
    runs = [run, *beside]
    all_curves = [curves_of(one.records()) for one in runs]
    panels = {title: _options(title, runs, all_curves) for title in all_curves[0]}
    with ui.element("div").classes("panels"):
        charts = {title: _panel(title, options) for title, options in panels.items()}
    with ui.element("div").classes("two"):
        alarms, account = ui.html(sanitize=False).classes("card"), ui.html(sanitize=False).classes("card")
    drawn: list[Any] = []

    def draw() -> None:
        state = [one.records()[-1:] for one in runs]
        if drawn == state:
            return
        drawn[:] = state
        alarms.set_content(_alarms(run))
        account.set_content(_account(run))
        curves = [curves_of(one.records()) for one in runs]
        for title, chart in charts.items():
            chart.options.update(_options(title, runs, curves))
            chart.update()

    drawn[:] = [one.records()[-1:] for one in runs]
    alarms.set_content(_alarms(run))
    account.set_content(_account(run))
    ui.timer(2.0, draw)


def _panel(title: str, options: dict[str, Any]) -> ui.echart:
    with ui.element("div").classes("card"):
        ui.html(f"<h2>{escape(title)}</h2>", sanitize=False)
        return ui.echart(options).style("height: 215px; width: 100%")


def _options(title: str, runs: list[Watched], all_curves: list[Curves]) -> dict[str, Any]:
    series = []
    for number, (run, curves) in enumerate(zip(runs, all_curves, strict=True)):
        lines = {name: points for name, points in curves.get(title, {}).items() if points}
        for place, (name, points) in enumerate(lines.items()):
            colour = PANEL_COLOURS[(number if len(runs) > 1 else place) % len(PANEL_COLOURS)]
            label = name.removeprefix("seconds_").replace("_", " ")
            told = f"{run.name} · {label}" if len(lines) > 1 and len(runs) > 1 else run.name
            line = _line(label if len(runs) == 1 else told, points, colour)
            dashes = ("solid", "dashed", "dotted", [6, 2, 1, 2])
            line["lineStyle"]["type"] = dashes[place % len(dashes)] if len(runs) > 1 else "solid"
            series.append(line)
    axis = {"axisLabel": {"color": _SOFT}, "nameTextStyle": {"color": _SOFT}}
    grid = {"left": 8, "right": 14, "top": 30 if len(series) > 1 else 12, "bottom": 4, "containLabel": True}
    split = {"splitLine": {"lineStyle": {"color": "rgba(128,140,150,.18)"}}}
    return {
        "animation": False,
        "grid": grid,
        "legend": {"show": len(series) > 1, "top": 0, "textStyle": {"color": _SOFT, "fontSize": 11}, "type": "scroll"},
        "tooltip": {"trigger": "axis", "confine": True},
        "xAxis": {"type": "value", **axis, "splitLine": {"show": False}, "min": "dataMin", "max": "dataMax"},
        "yAxis": {"type": "log" if is_logarithmic(all_curves[0][title]) else "value", "scale": True, **axis, **split},
        "series": series,
    }


def _line(name: str, points: list[tuple[float, float]], colour: str) -> dict[str, Any]:
    step = -(-len(points) // _MOST_POINTS)
    kept = points[::step] + (points[-1:] if (len(points) - 1) % step else [])
    return {
        "type": "line",
        "name": name,
        "data": [[x, float(f"{y:.6g}")] for x, y in kept],
        "showSymbol": len(kept) < 20,
        "symbolSize": 5,
        "lineStyle": {"width": 1.6},
        "itemStyle": {"color": colour},
    }


def _alarms(run: Watched) -> str:
    found = alarms_of(run.records(), plain_events(run.run_dir))
    rows = [
        f'<div class="alarm {"" if alarm["stands"] else "past"}"><b>{escape(alarm["name"].replace("_", " "))}</b> '
        f"from step {escape(str(alarm['step']))}{' on, and it stands' if alarm['stands'] else '; it is over'}: "
        f"{escape(alarm['says'])}</div>"
        for alarm in found
    ]
    none = '<span class="soft">None was raised. They look for a reward that is gamed.</span>'
    return f"<h2>Alarms</h2>{''.join(rows) or none}"


def _account(run: Watched) -> str:
    rows = account_of(run.run_dir)
    if not rows:
        return '<h2>Ledger</h2><span class="soft">This run has no ledger: it samples nothing, or has not begun.</span>'
    whole = max(rows[0][1], 1)
    cells = "".join(
        f'<tr><td>{escape(name)}</td><td class="n">{count:,}</td><td class="n">{count / whole:.1%}</td>'
        f'<td style="width:40%"><div class="bar" style="width:{100 * count / whole:.2f}%"></div></td></tr>'
        for name, count in rows
    )
    return f'<h2>Ledger: what became of every sample</h2><table class="plain">{cells}</table>'

"""The first view: curves of the run with others beside it, alarms, and the ledger's account."""

from collections.abc import Iterable
from html import escape
from itertools import groupby
from typing import Any

from nicegui import ui

from titan_rl.diagnostics.web.data.facts import account_of, alarms_of, plain_events
from titan_rl.diagnostics.web.data.watched_run import Watched
from titan_rl.diagnostics.web.html.style import PANEL_COLOURS
from titan_rl.records.alarms.alarms import NAMES
from titan_rl.records.plot import OTHERS, Panel, Points, curves_of, panels_of

_MOST_POINTS = 2000
"""Of a line; of a longer one each so-manieth is drawn."""
_SECONDS = 2.0
_SOFT = "#8b95a0"
_SMALL = "(v => v !== 0 && Math.abs(v) < 1e-3 || Math.abs(v) >= 1e6 ? v.toExponential() : String(+v.toPrecision(6)))"
"""JavaScript: a number of an axis, in few characters."""
_DASHES = ("solid", "dashed", "dotted", [6, 2, 1, 2])
_LEGEND = {"type": "scroll", "top": 0, "itemWidth": 14, "itemGap": 8, "textStyle": {"color": _SOFT, "fontSize": 11}}
Curves = dict[str, Points]


class Overview:
    """Overview of one browser page. Panels are those of the metrics that are there, and follow them."""

    def __init__(self, run: Watched, beside: list[Watched]) -> None:
        """``beside``: other runs, whose curves are drawn, too."""
        self.run, self.runs = run, [run, *beside]
        self.charts: dict[Panel, ui.echart] = {}
        self.drawn: list[Any] | None = None
        self.panels = ui.column().classes("w-full").style("gap: 16px")
        with ui.element("div").classes("two"):
            self.alarms, self.account = (ui.html(sanitize=False).classes("card") for _ in range(2))
        self.draw()
        ui.timer(_SECONDS, self.draw)

    def draw(self) -> None:
        """Draw new records, if there are any."""
        records = [one.records() for one in self.runs]
        state = [its[-1:] for its in records]
        if self.drawn == state:
            return
        self.drawn = state
        self.alarms.set_content(_alarms(self.run))
        self.account.set_content(_account(self.run))
        curves = [curves_of(its) for its in records]
        panels = panels_of(name for each in curves for name in each)
        if panels != list(self.charts):
            self._arrange(panels, curves)
            return
        for panel, chart in self.charts.items():
            chart.options.update(options(panel, self.runs, curves))
            chart.update()

    def _arrange(self, panels: list[Panel], curves: list[Curves]) -> None:
        self.panels.clear()
        self.charts = {}
        with self.panels:
            if not panels:
                ui.html(
                    '<span class="soft">No step was recorded yet: curves come with the first.</span>', sanitize=False
                )
            for group, its in groupby(panels, key=lambda panel: panel.group):
                own = list(its)
                title = f"{len(own)} more metrics" if group == OTHERS else group
                with (
                    ui.expansion(title, value=group != OTHERS).classes("group w-full"),
                    ui.element("div").classes("panels"),
                ):
                    for panel in own:
                        self.charts[panel] = self._chart(panel, curves)

    def _chart(self, panel: Panel, curves: list[Curves]) -> ui.echart:
        with ui.element("div").classes("card"):
            ui.html(f"<h2>{escape(panel.title)}</h2>", sanitize=False)
            return ui.echart(options(panel, self.runs, curves)).style("height: 200px; width: 100%")


def options(panel: Panel, runs: list[Watched], all_curves: list[Curves]) -> dict[str, Any]:
    """ECharts options of a chart."""
    series = list(_series(panel, runs, all_curves))
    label = {"color": _SOFT, "hideOverlap": True}
    axis = {"axisLabel": label, "nameTextStyle": {"color": _SOFT}, "axisTick": {"show": False}}
    values = {**axis, "axisLabel": label | {":formatter": _SMALL}, "splitNumber": 4}
    split = {"splitLine": {"lineStyle": {"color": "rgba(128,140,150,.18)"}}}
    return {
        "animation": False,
        "grid": {"left": 8, "right": 18, "top": 30 if len(series) > 1 else 12, "bottom": 4, "containLabel": True},
        "legend": _LEGEND | {"show": len(series) > 1},
        "tooltip": {"trigger": "axis", "confine": True},
        "xAxis": {"type": "value", **axis, "splitLine": {"show": False}, **_steps(series)},
        "yAxis": {**values, **split, **_values(panel, series)},
        "series": series,
    }


def _steps(series: list[dict[str, Any]]) -> dict[str, Any]:
    """The axis of steps: whole numbers, with room about a single one."""
    steps = [x for line in series for x, _ in (line["data"][0], line["data"][-1])]
    first, last = min(steps, default=0), max(steps, default=1)
    return {"min": first - (first == last), "max": last + (first == last), "minInterval": 1, "splitNumber": 5}


def _values(panel: Panel, series: list[dict[str, Any]]) -> dict[str, Any]:
    """The axis of values; a logarithmic one goes from a power of ten to a power of ten."""
    if not panel.is_logarithmic:
        return {"type": "value", "scale": True}
    exponents = [f"{y:e}".partition("e")[2] for line in series for _, y in line["data"] if y > 0]
    least, most = min(map(int, exponents), default=-7), max(map(int, exponents), default=-1) + 1
    return {"type": "log", "min": 10.0**least, "max": 10.0**most}


def _series(panel: Panel, runs: list[Watched], all_curves: list[Curves]) -> Iterable[dict[str, Any]]:
    for number, (run, curves) in enumerate(zip(runs, all_curves, strict=True)):
        for place, name in enumerate(panel.names):
            if not (points := curves.get(name)):
                continue
            label = _label(name)
            labels = [run.name] * (len(runs) > 1) + [label] * (len(panel.names) > 1 or len(runs) == 1)
            line = _line(" · ".join(labels), points, PANEL_COLOURS[(number if len(runs) > 1 else place) % 6])
            line["lineStyle"]["type"] = _DASHES[place % len(_DASHES)] if len(runs) > 1 else "solid"
            yield line


def _label(name: str) -> str:
    """A metric's in a legend, without what the panel's title says."""
    for prefix in ("seconds_", "tokens_per_second_", "reward_part/", "reward/", "accuracy/", "prompts/"):
        name = name.removeprefix(prefix)
    return name.replace("_", " ")


def _line(name: str, points: Points, colour: str) -> dict[str, Any]:
    step = -(-len(points) // _MOST_POINTS)
    sampled = points[::step] + (points[-1:] if (len(points) - 1) % step else [])
    return {
        "type": "line",
        "name": name,
        "data": [[x, float(f"{y:.6g}")] for x, y in sampled],
        "showSymbol": len(sampled) < 20,
        "symbolSize": 5,
        "lineStyle": {"width": 1.6},
        "itemStyle": {"color": colour},
    }


def _alarms(run: Watched) -> str:
    alarms = alarms_of(run.records(), plain_events(run.run_dir))
    rows = [
        f'<div class="alarm {"" if alarm["stands"] else "past"}"><b>{escape(alarm["name"].replace("_", " "))}</b> '
        f"from step {escape(str(alarm['step']))}{' on, and it stands' if alarm['stands'] else '; it is over'}: "
        f"{escape(alarm['says'])}</div>"
        for alarm in alarms
    ]
    names = ", ".join(name.replace("_", " ") for name in NAMES)
    none = f'<span class="soft">None was raised. Looked for: {names}.</span>'
    return f"<h2>Alarms</h2>{''.join(rows) or none}"


def _account(run: Watched) -> str:
    rows = account_of(run.run_dir)
    if not rows:
        return '<h2>Ledger</h2><span class="soft">This run has no ledger: it samples nothing, or has not begun.</span>'
    total = max(rows[0][1], 1)
    cells = "".join(
        f'<tr><td>{escape(name)}</td><td class="n">{count:,}</td><td class="n">{count / total:.1%}</td>'
        f'<td style="width:40%"><div class="bar" style="width:{100 * count / total:.2f}%"></div></td></tr>'
        for name, count in rows
    )
    return f'<h2>Ledger: what became of every sample</h2><table class="plain">{cells}</table>'

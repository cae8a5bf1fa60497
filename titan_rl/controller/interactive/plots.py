"""Pictures of a run for a notebook's cell: curves, and where the time of its steps goes."""

from dataclasses import dataclass
from functools import cached_property
from html import escape
from io import BytesIO
from typing import Any

import pandas as pd

_PHASES = {
    "seconds_generate": "#74a9cf",
    "seconds_score": "#fdbf6f",
    "seconds_forward_backward": "#b2df8a",
    "seconds_optimizer": "#cab2d6",
    "seconds_publish": "#fb9a99",
}
"""Of a step, one after the other; what is left of it is waiting."""


@dataclass(frozen=True)
class Picture:
    """A matplotlib figure that shows itself in a cell, whatever backend there is."""

    figure: Any

    def _repr_png_(self) -> bytes:
        return self._png

    @cached_property
    def _png(self) -> bytes:
        buffer = BytesIO()
        self.figure.savefig(buffer, format="png", dpi=110, bbox_inches="tight")
        return buffer.getvalue()


@dataclass(frozen=True)
class TimeBar:
    """Bar of the average time of a step by phase."""

    seconds: dict[str, float]
    """By phase; ``seconds_step`` is the whole."""

    def _repr_html_(self) -> str:
        whole = self.seconds["seconds_step"]
        phases = {name: self.seconds[name] for name in _PHASES if self.seconds.get(name)}
        parts = [(name.removeprefix("seconds_"), value, _PHASES[name]) for name, value in phases.items()]
        parts.append(("waiting", max(whole - sum(phases.values()), 0.0), "#dddddd"))
        scale = max(whole, sum(phases.values()))
        bars = "".join(_part(*part, scale) for part in parts)
        return f'<div style="color: #111; background: #fff">{whole:.2f} s a step<br>{bars}</div>'


def _part(name: str, seconds: float, colour: str, whole: float) -> str:
    share, label = seconds / whole, escape(f"{name.replace('_', ' ')} {seconds:.2f} s")
    text = label if share > 0.12 else "&nbsp;"
    style = f"display: inline-block; overflow: hidden; white-space: nowrap; width: {98 * share:.1f}%"
    return f'<span style="{style}; background: {colour}" title="{label}">{text}</span>'


def time_bar(metrics: pd.DataFrame, last: int = 20) -> TimeBar | None:
    """Time bar of the last steps of a run; None before the first."""
    if "seconds_step" not in metrics:
        return None
    columns = [name for name in (*_PHASES, "seconds_step") if name in metrics]
    means = metrics[columns].dropna(how="all").tail(last).mean()
    return TimeBar({str(name): float(value) for name, value in means.items()})

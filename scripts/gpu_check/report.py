"""A row's outcome and the verdict over all of them: pure."""

import math
from collections.abc import Sequence
from typing import Any

from gpu_check.thresholds import ROWS


def outcome(row: str, answer: dict[str, Any], seconds: float, on_gpu: bool) -> dict[str, Any]:
    """Outcome of a row against its bars.

    ``answer``: ``figures`` that the row found, or ``failed``, why it did not. ``holds``: no bar is broken, and on a GPU
    none is left unmeasured.
    """
    figures = answer.get("figures", {})
    bars = [bar.judge(figures, on_gpu) for bar in ROWS[row].bars]
    failed = answer.get("failed", "")
    met = [bar["met"] for bar in bars]
    holds = not failed and False not in met and not (on_gpu and None in met)
    result = _rounded({"row": row, "holds": holds, "seconds": round(seconds, 1), "bars": bars, "figures": figures})
    return result | ({"failed": failed} if failed else {})


def verdict(outcomes: Sequence[dict[str, Any]], on_gpu: bool, machine: dict[str, Any]) -> dict[str, Any]:
    fallen = [one["row"] for one in outcomes if not one["holds"]]
    unmeasured = [f"{one['row']}: {bar['bar']}" for one in outcomes for bar in one["bars"] if bar["met"] is None]
    words = "holds" if on_gpu else "rehearsed, nothing is measured"
    return {
        "verdict": "does not hold" if fallen or not outcomes else words,
        "rows": len(outcomes),
        "fallen": fallen,
        "not_measured": unmeasured,
        "seconds": round(sum(one["seconds"] for one in outcomes), 1),
        **machine,
    }


def exit_code(verdict: dict[str, Any]) -> int:
    return 1 if verdict["fallen"] or not verdict["rows"] else 0


def _rounded(value: Any) -> Any:
    """Four figures; JSON has neither NaN nor infinity."""
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else str(value)
    return value

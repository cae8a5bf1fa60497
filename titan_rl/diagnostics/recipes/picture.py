"""Picture of a recipe's run with its reference curves."""

from pathlib import Path
from typing import Any

from titan_rl.diagnostics.recipes.recipe import Curve
from titan_rl.diagnostics.recipes.report import RecipeRun


def plot_report(run: RecipeRun, out: Path) -> bool:
    """Draw the variant's metric over steps, with all curves; false without a point, or for numbers that no axis has.
    Errors: OSError."""
    try:
        return bool(run.points) and _draw(run, out)
    except (ValueError, OverflowError):
        return False


def _draw(run: RecipeRun, out: Path) -> bool:
    from matplotlib.figure import Figure  # without pyplot, as records/plot.py
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axis = figure.subplots()
    for label, curve in run.curves.items():
        axis.plot(*zip(*curve.points, strict=True), label=_label(label, curve), **style(curve))
    axis.plot(*zip(*run.points, strict=True), color="black", marker="o", markersize=3, label="this run")
    axis.set_title(_plain(f"{run.recipe.name}: {run.variant.name}"), fontsize=11)
    axis.set_xlabel("step")
    axis.set_ylabel(_plain(run.variant.metric))
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.savefig(out, dpi=110, format="png")
    return True


def _label(label: str, curve: Curve) -> str:
    return _plain(f"{label} (at least)" if curve.is_lower_bound else label)


def _plain(text: str) -> str:
    """Text that is not read as mathematics."""
    return text.replace("$", r"\$")


def style(curve: Curve) -> dict[str, Any]:
    """Line of a curve; lower bounds and single points are marks."""
    if curve.is_lower_bound:
        return {"marker": "^", "linestyle": "none"}
    return {"marker": "s", "linestyle": "--" if len(curve.points) > 1 else "none", "markersize": 4}

"""Picture of a recipe's run: the published curves beside the run's."""

from pathlib import Path

from titan_rl.diagnostics.recipes.recipe import Curve
from titan_rl.diagnostics.recipes.report import RecipeRun


def plot_report(run: RecipeRun, out: Path) -> bool:
    """Draw the variant's metric over steps, with all curves. Without a point of the run, no file is written."""
    if not run.points:
        return False
    from matplotlib.figure import Figure  # without pyplot, as records/plot.py
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axis = figure.subplots()
    for curve in (*run.variant.curves, *run.variant.ours):
        steps, values = zip(*curve.points, strict=True) if curve.points else ((), ())
        axis.plot(steps, values, label=_label(curve), **_style(curve))
    axis.plot(*zip(*run.points, strict=True), color="black", marker="o", markersize=3, label="this run")
    axis.set_title(f"{run.recipe.name}: {run.variant.name}", fontsize=11)
    axis.set_xlabel("step")
    axis.set_ylabel(run.variant.metric)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    figure.savefig(out, dpi=110, format="png")
    return True


def _label(curve: Curve) -> str:
    return f"{curve.label} (at least)" if curve.is_bound else curve.label


def _style(curve: Curve) -> dict:
    """Bounds and single points are marks, curves are lines."""
    if curve.is_bound:
        return {"marker": "^", "linestyle": "none"}
    return {"marker": "s", "linestyle": "--", "markersize": 4}

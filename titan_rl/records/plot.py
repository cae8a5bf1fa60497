"""The curves of a run as a PNG."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from titan_rl.records.metrics import read_metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PHASES = ("seconds_generate", "seconds_forward_backward", "seconds_weight_sync", "seconds_step")
_ON_DATA = {
    "loss": ("loss", "held_out_loss"),
    "held-out preferences": ("held_out_accuracy",),
    "rewards": ("rewards/chosen", "rewards/rejected", "rewards/margins"),
    "gradient norm": ("grad_norm",),
    "learning rate": ("learning_rate",),
    "seconds a step": ("seconds_forward_backward", "seconds_step"),
}
"""Of a run without rollouts."""
_PANELS = {
    "reward of the samples": ("reward",),
    "held-out accuracy": ("held_out_accuracy",),
    "entropy (nats)": ("entropy",),
    "trainer-sampler disagreement: mean of exp|Δ logprob| - 1": ("disagreement",),
    "share of groups with signal": ("groups_with_signal",),
    "seconds a step": _PHASES,
}
_LOGARITHMIC = "disagreement"
_SMALLEST_DISAGREEMENT = 1e-9


def _with_disagreement(record: dict[str, float]) -> dict[str, float]:
    if "agreement_mean" not in record:
        return record
    return record | {"disagreement": max(record["agreement_mean"] - 1, _SMALLEST_DISAGREEMENT)}


Curves = dict[str, dict[str, list[tuple[float, float]]]]
"""Of each panel, each metric's points (step, value)."""


def curves_of(records: list[dict[str, float]]) -> Curves:
    """What a run's panels show; a metric that was not recorded has no points."""
    records = [_with_disagreement(record) for record in records]
    panels = _PANELS if any("reward" in record for record in records) else _ON_DATA
    return {
        title: {name: [(record["step"], record[name]) for record in records if name in record] for name in names}
        for title, names in panels.items()
    }


def is_logarithmic(names: Iterable[str]) -> bool:
    """Whether these are drawn so."""
    return _LOGARITHMIC in names


def plot_curves(root: Path, out: Path) -> None:
    """Draw a run directory's metrics. Without a step, no file is written."""
    if (figure := figure_of(root)) is not None:
        figure.savefig(out, dpi=90)


def figure_of(root: Path) -> "Figure | None":
    """The same in memory; None without a step."""
    from matplotlib.figure import Figure  # without pyplot, whose backend belongs to whoever runs the notebook

    if not (records := list(read_metrics(root))):
        return None
    figure = Figure(figsize=(13, 6.5), layout="constrained")
    axes = figure.subplots(2, 3)
    for axis, (title, names) in zip(axes.flat, curves_of(records).items(), strict=True):
        for name, points in names.items():
            if points:
                axis.plot(*zip(*points, strict=True), marker="o" if len(points) < 20 else "", label=name)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        if is_logarithmic(names):
            axis.set_yscale("log")
        if len(names) > 1 and axis.lines:
            axis.legend(fontsize=8)
    return figure

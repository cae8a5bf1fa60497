"""The curves of a run: which of its metrics stand together, and how, for the page and for a PNG.

Panels are chosen from the metrics that were recorded. Those of ``GROUPS`` are known and have a place of their own; of
what is left (an algorithm's own, a user's, counts and bytes) each has a panel in ``OTHERS``.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from titan_rl.records.metrics import read_metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GROUPS: dict[str, dict[str, tuple[str, ...]]] = {
    "Learning": {
        "reward of the samples": ("reward", "task_reward"),
        "held-out accuracy": ("held_out_accuracy", "held_out_accuracy/*"),
        "suites": ("eval/*@*",),
        "held-out grade": ("held_out_grade", "grade"),
        "accuracy of the samples": ("accuracy",),
        "loss": ("loss", "held_out_loss"),
        "rewards": ("rewards/*",),
        "share of groups with signal": ("groups_with_signal",),
        "reward by task or seat": ("reward/*",),
        "accuracy by task": ("accuracy/*",),
        "parts of the reward": ("reward_part/*",),
    },
    "Update": {
        "gradient norm": ("grad_norm",),
        "learning rate": ("learning_rate", "*_learning_rate"),
        "entropy (nats)": ("entropy",),
        "KL divergence (kl_k3: of the sampler)": ("reference_kl", "kl_k3"),
        "share of tokens that were clipped": (
            "clip_fraction",
            "masked_fraction",
            "rejected_fraction",
            "*clip_fraction",
        ),
        "trainer-sampler disagreement: mean of exp|Δ logprob| - 1": ("disagreement",),
        "weight versions that samples lag behind": ("staleness_mean", "staleness_max"),
    },
    "Answers": {
        "tokens of an answer": ("response_length", "eval/*/response_length"),
        "share of answers that were cut short": ("truncated", "eval/*/truncated"),
        "different answers": ("effective_answers",),
        "turns": ("turns",),
        "calls of tools": ("tool_calls",),
        "share of calls that failed": ("tool_calls_*",),
        "share of prompts by task": ("prompts/*",),
    },
    "Speed": {
        "seconds a step": ("seconds_generate", "seconds_forward_backward", "seconds_weight_sync", "seconds_step"),
        "tokens a second": ("tokens_per_second_*",),
    },
}
"""Of each group's panels, its metrics as shell patterns; a metric stands in the first that it fits."""
OTHERS = "More"
_IN_PICTURE = ("Learning", "Update")
_COLUMNS = 4
_HIDDEN = ("step", "alarm_*", "agreement_mean")
"""Shown in another way: the alarms in words, the agreement as a disagreement."""
_LOGARITHMIC = ("disagreement",)
_SMALLEST_DISAGREEMENT = 1e-7
"""Of exact agreement, which has no logarithm: about what fp32 rounds away."""

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Panel:
    """Curves that are drawn into one picture."""

    group: str
    title: str
    names: tuple[str, ...]
    """Of its metrics, in order."""

    @property
    def is_logarithmic(self) -> bool:
        return any(name in _LOGARITHMIC for name in self.names)


def curves_of(records: Iterable[dict[str, float]]) -> dict[str, Points]:
    """Points (step, value) of each metric."""
    curves: dict[str, Points] = {}
    for record in records:
        for name, value in _with_disagreement(record).items():
            curves.setdefault(name, []).append((record["step"], value))
    return curves


def _with_disagreement(record: dict[str, float]) -> dict[str, float]:
    if "agreement_mean" not in record:
        return record
    return record | {"disagreement": max(record["agreement_mean"] - 1, _SMALLEST_DISAGREEMENT)}


def panels_of(names: Iterable[str]) -> list[Panel]:
    """Panels of the recorded metrics, in the order of the groups."""
    left = [name for name in dict.fromkeys(names) if not _fits(name, _HIDDEN)]
    panels = []
    for group, its in GROUPS.items():
        for title, patterns in its.items():
            own = [name for pattern in patterns for name in left if fnmatchcase(name, pattern)]
            left = [name for name in left if name not in own]
            panels += [Panel(group, title, tuple(dict.fromkeys(own)))] if own else []
    return panels + [Panel(OTHERS, name, (name,)) for name in sorted(left)]


def _fits(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def plot_curves(root: Path, out: Path) -> None:
    """Draw a run directory's metrics. Without a step, no file is written."""
    if (figure := figure_of(root)) is not None:
        figure.savefig(out, dpi=90)


def figure_of(root: Path) -> "Figure | None":
    """Figure in memory; None without a step."""
    from matplotlib.figure import Figure  # without pyplot, whose backend belongs to whoever runs the notebook
    from matplotlib.ticker import MaxNLocator

    curves = curves_of(read_metrics(root))
    panels = [panel for panel in panels_of(curves) if panel.group in _IN_PICTURE]
    if not panels:
        return None
    rows, columns = -(-len(panels) // _COLUMNS), min(len(panels), _COLUMNS)
    figure = Figure(figsize=(4.3 * columns, 3.2 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flat
    for axis, panel in zip(axes, panels, strict=False):
        for name in panel.names:
            points = curves[name]
            axis.plot(*zip(*points, strict=True), marker="o" if len(points) < 20 else "", label=name)
        axis.set_title(panel.title, fontsize=10)
        axis.set_xlabel("step")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axis.grid(alpha=0.3)
        if panel.is_logarithmic:
            axis.set_yscale("log")
        if len(panel.names) > 1:
            axis.legend(fontsize=8)
    for axis in list(axes):
        axis.set_axis_off()
    return figure

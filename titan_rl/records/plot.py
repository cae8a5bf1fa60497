"""The curves of a run as a PNG."""

from pathlib import Path

from titan_rl.records.metrics import read_metrics

_PHASES = ("seconds_generate", "seconds_forward_backward", "seconds_weight_sync", "seconds_step")
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


def plot_curves(root: Path, out: Path) -> None:
    """Draw a run directory's metrics. Without a step, no file is written."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    records = [_with_disagreement(record) for record in read_metrics(root)]
    if not records:
        return
    figure, axes = plt.subplots(2, 3, figsize=(13, 6.5), layout="constrained")
    for axis, (title, names) in zip(axes.flat, _PANELS.items(), strict=True):
        for name in names:
            points = [(record["step"], record[name]) for record in records if name in record]
            if points:
                axis.plot(*zip(*points, strict=True), marker="o" if len(points) < 20 else "", label=name)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        if _LOGARITHMIC in names:
            axis.set_yscale("log")
        if len(names) > 1:
            axis.legend(fontsize=8)
    figure.savefig(out, dpi=90)
    plt.close(figure)

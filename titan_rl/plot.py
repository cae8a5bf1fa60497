"""The curves of a run as a PNG."""

from pathlib import Path

from titan_rl.metrics import read_metrics

_PANELS = (
    ("reward", ("reward", "accuracy")),
    ("held-out accuracy", ("held_out_accuracy",)),
    ("entropy (nats)", ("entropy",)),
    ("agreement: mean of exp|Δ logprob|", ("agreement_mean",)),
    ("share of groups with signal", ("groups_with_signal",)),
    ("seconds a step", ("seconds_generate", "seconds_forward_backward", "seconds_weight_sync", "seconds_step")),
)


def plot_curves(root: Path, out: Path) -> None:
    """Draw a run directory's metrics; nothing if it has no step."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    records = list(read_metrics(root))
    if not records:
        return
    figure, axes = plt.subplots(2, 3, figsize=(13, 6.5), layout="constrained")
    for axis, (title, names) in zip(axes.flat, _PANELS, strict=True):
        for name in names:
            points = [(r["step"], r[name]) for r in records if name in r]
            axis.plot(
                *zip(*points, strict=True), marker="o" if len(points) < 20 else "", label=name
            ) if points else None
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        if len(names) > 1:
            axis.legend(fontsize=8)
    figure.suptitle(root.name)
    figure.savefig(out, dpi=110)
    plt.close(figure)

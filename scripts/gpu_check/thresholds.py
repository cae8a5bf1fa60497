"""What each row is held to, and how long it may take: the one table. Nothing here needs torch."""

from dataclasses import dataclass
from typing import Any

NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Bar:
    """A figure of a row and its limit."""

    figure: str
    limit: float
    at_least: bool = False
    on_gpu: bool = True
    """Whether it means something on a GPU alone."""

    def __str__(self) -> str:
        return f"{self.figure} {'>=' if self.at_least else '<='} {self.limit:g}"

    def judge(self, figures: dict[str, Any], on_gpu: bool) -> dict[str, Any]:
        """Verdict on a row's figure. ``met``: None where it was not measured."""
        value = figures.get(self.figure)
        verdict = {"bar": str(self), "value": value, "met": None}
        if self.on_gpu and not on_gpu:
            return verdict | {"value": NOT_MEASURED, "why": "no GPU"}
        if value is None:
            return verdict | {"value": NOT_MEASURED, "why": figures.get("why_not", "the row did not come to it")}
        return verdict | {"met": bool(value >= self.limit if self.at_least else value <= self.limit)}


@dataclass(frozen=True)
class Row:
    """Row of the check, with its bars.

    ``deadline``: seconds, on a GPU; ``alone``: whether it must have a process that has done nothing before.
    """

    bars: tuple[Bar, ...]
    deadline: float = 120
    alone: bool = False


REHEARSAL_DEADLINE = 60.0
"""Of each row, in seconds, on a loaded CPU."""
_EXACT, _ROUNDED = 1e-4, 3e-2
"""Relative errors of gradients against fp32: of other orders of addition, and of bf16."""


def _train(*bars: Bar) -> Row:
    return Row((Bar("loss_is_finite", 1, at_least=True, on_gpu=False), *bars))


def _kernel(*bars: Bar) -> Row:
    return Row(bars, deadline=180)


ROWS: dict[str, Row] = {
    # first, since cuBLAS is told before it has multiplied anything
    "deterministic": Row((Bar("same_bits", 1, at_least=True, on_gpu=False),), alone=True),
    "correctness": Row(
        (
            Bar("fp32_agreement", 1.0005, on_gpu=False),
            Bar("bf16_agreement", 1.03, on_gpu=False),
            Bar("fp32_gradient_error", _EXACT, on_gpu=False),
            Bar("bf16_gradient_error", 0.1, on_gpu=False),  # through all layers
        )
    ),
    "train 135m float32": _train(),
    "train 135m bfloat16": _train(),
    "train 1b float32": _train(),
    "train 1b bfloat16": _train(Bar("share_of_matrix_rate", 0.45, at_least=True)),
    "train 1b compiled": _train(Bar("share_of_matrix_rate", 0.55, at_least=True)),
    "kernel linear_logprob": _kernel(
        Bar("fp32_of_bound", 1.0, on_gpu=False),
        Bar("fp32_gradient_error", _EXACT, on_gpu=False),
        Bar("bf16_of_bound", 1.0, on_gpu=False),
        Bar("bf16_gradient_error", _ROUNDED, on_gpu=False),
    ),
    "kernel policy_loss": _kernel(Bar("loss_error", 1e-5, on_gpu=False), Bar("gradient_error", 1e-5, on_gpu=False)),
    "kernel discounted_scan": _kernel(Bar("error", 1e-5, on_gpu=False)),
    "kernel pack_cast": _kernel(Bar("same_bytes", 1, at_least=True, on_gpu=False)),
    "kernel batch_invariant": _kernel(
        Bar("same_bits", 1, at_least=True, on_gpu=False), Bar("error", 1e-2, on_gpu=False)
    ),
    "attention": Row(
        (
            Bar("blocks_error", 2e-2, on_gpu=False),
            Bar("packed_error", 2e-2, on_gpu=False),
            Bar("packed_seconds_of_blocks", 1.0),
            Bar("packed_peak_of_blocks", 1.0),
        )
    ),
    "compiled": Row((Bar("steps", 8, at_least=True), Bar("loss_error", 1e-2)), deadline=240),
    "snapshots": Row((Bar("share_of_step", 0.05),)),
    "publish": Row(
        (
            Bar("stamped", 1, at_least=True, on_gpu=False),
            Bar("publish_of_copy", 1.3),
            Bar("step_beside_of_step", 1.05),
        )
    ),
    "rejoin": Row((Bar("peak_of_one", 1.1), Bar("restored", 1, at_least=True, on_gpu=False))),
    "cuda ipc": Row((Bar("same_bytes", 1, at_least=True, on_gpu=False),)),
}

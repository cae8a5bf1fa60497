"""An update of a policy in two halves: gradients of rows, and what is made of them. Between them nothing has changed.

If a loss or gradient is not finite, weights, moments and schedules stay as they were, on all ranks.
"""

import math
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from titan_rl.data.nonfinite import BadNumbers
from titan_rl.data.types import Row, StepMetrics
from titan_rl.trainer.distributed.ranks import reduced
from titan_rl.trainer.objective.nonfinite import find_culprits
from titan_rl.trainer.objective.objective import step_metrics
from titan_rl.trainer.roles.learned_role import Taught, Told

if TYPE_CHECKING:  # which imports this
    from titan_rl.trainer.step.learner import Learner


@dataclass(frozen=True)
class Gradients:
    """They are in the parameters, clipped; here is what is known of them."""

    rows: list[Row]
    metrics: StepMetrics
    """Of all ranks together: the same on each."""
    taught: Taught | None
    """The role that has begun to learn from the rows, and is to end it."""


def make_gradients(learner: "Learner", rows: list[Row], *, taught: Taught | None) -> Gradients | BadNumbers:
    """``taught``: the role that is to learn from the rows meanwhile."""
    if taught is not None:
        taught.begin(rows)
    start = time.perf_counter()
    totals = reduced(learner.forward_backward(rows), is_counted=learner.is_counted)
    middle = time.perf_counter()
    try:
        if not math.isfinite(totals["loss"]):
            raise FloatingPointError(f"the loss is {totals['loss']}")
        if not learner.is_finite_everywhere(norm := learner.gradient_norm()):
            raise FloatingPointError(f"the gradient norm is {norm}")
    except FloatingPointError as error:
        learner.optimizer.zero_grad()
        if taught is not None:
            taught.forget()
        return find_culprits(learner, rows, str(error))
    seconds = dict(seconds_forward_backward=middle - start, seconds_optimizer=time.perf_counter() - middle)
    return Gradients(rows, replace(step_metrics(totals), grad_norm=norm, **seconds), taught)


def apply_gradients(
    learner: "Learner", made: Gradients, has_signal: bool, told: Told | None = None
) -> StepMetrics | BadNumbers:
    """``told``: what came of the role's own update on the rows, if that was made before."""
    start = time.perf_counter()
    if made.taught is not None:
        told = made.taught.learn(made.rows)
    if isinstance(told, BadNumbers):
        learner.optimizer.zero_grad()
        return told
    learning_rate = learner.optimizer_step(has_signal)
    return replace(
        made.metrics,
        loss_metrics=made.metrics.loss_metrics | (told or {}),
        learning_rate=learning_rate,
        seconds_optimizer=made.metrics.seconds_optimizer + time.perf_counter() - start,
    )

"""What a loss and its metrics are on rows that nothing is learned from: held-out data, and what a step must know first.

All ranks together; the model, its optimizer and its schedule stay as they are.
"""

import torch

from titan_rl.algorithms.base import Algorithm
from titan_rl.data.types import Row, StepMetrics
from titan_rl.trainer.learner import Learner
from titan_rl.trainer.objective import add_sums, loss_and_sums, step_metrics, zero_totals
from titan_rl.trainer.preparation import completed


@torch.no_grad()
def evaluate(learner: Learner, rows: list[Row], algorithm: Algorithm) -> StepMetrics:
    """Of this rank's rows with those of all others. ``algorithm``: the learner's, or one that needs no more roles and
    has the same head."""
    [prepared] = learner.prepare([rows])
    names = learner.found_names()
    prepared = completed(learner.policy.fit(prepared), names)
    totals = zero_totals(algorithm, names, learner.device)
    for row, statistics in zip(prepared, learner.policy.measure(prepared), strict=True):
        if statistics is not None:
            _, sums = loss_and_sums(algorithm, statistics, learner.policy.columns(row))
            add_sums(totals, sums)
    return step_metrics(learner.reduce(totals))

"""Losses and metrics of rows that are not trained on: held-out data, and passes before a step.

All ranks together; the model, its optimizer and its schedule stay as they are.
"""

from collections.abc import Sequence

import torch

from titan_rl.algorithms.base import Algorithm
from titan_rl.data.types import Row, StepMetrics
from titan_rl.trainer.distributed.ranks import reduced
from titan_rl.trainer.objective.objective import add_sums, loss_and_sums, step_metrics, zero_totals
from titan_rl.trainer.objective.preparation import RowColumns, completed, with_placed_columns
from titan_rl.trainer.step.learner import Learner


@torch.no_grad()
def evaluate(
    learner: Learner, rows: list[Row], algorithm: Algorithm, role_columns: Sequence[RowColumns] = ()
) -> StepMetrics:
    """Metrics of all ranks' rows, without an update.

    ``algorithm``: the learner's, or one with the same head and no further roles; ``role_columns``: computed by roles in
    other processes."""
    [prepared] = learner.prepare(with_placed_columns([rows], role_columns))
    prepared = completed(learner.policy.fit(prepared), learner.zero_columns)
    totals = zero_totals(algorithm, learner.zero_columns(1), learner.device)
    for row, statistics in zip(prepared, learner.policy.measure(prepared), strict=True):
        if statistics is not None:
            _, sums = loss_and_sums(algorithm, statistics, learner.policy.columns(row))
            add_sums(totals, sums)
    return step_metrics(reduced(totals, is_counted=learner.is_counted))

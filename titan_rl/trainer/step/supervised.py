"""The supervised steps before reinforcement learning, with an optimizer and a schedule of their own."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import nn

import titan_rl.models.device  # noqa: F401  isort: skip  (before any other torchtitan module)

from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer

from titan_rl.algorithms.base import Algorithm
from titan_rl.algorithms.offline.sft import SFT
from titan_rl.data.nonfinite import NonfiniteBatch
from titan_rl.data.types import Row, StepMetrics
from titan_rl.trainer.model.optimizer import build_sft_optimizer


class SupervisedLearner(Protocol):
    """Learner whose algorithm, optimizer and schedule can be replaced."""

    algorithm: Algorithm
    optimizer: OptimizersContainer
    scheduler: LRSchedulersContainer

    @property
    def model_parts(self) -> list[nn.Module]: ...

    def train(self, rows: list[Row], has_signal: bool) -> StepMetrics | NonfiniteBatch: ...


def supervised_steps(learner: SupervisedLearner, batches: list[list[Row]], lr: float) -> list[float]:
    """Run supervised steps; returns the loss of each. Errors: FloatingPointError (Learner.sft)."""
    losses = []
    with _instead(learner, SFT(), *build_sft_optimizer(learner.model_parts, lr, len(batches))):
        for rows in batches:
            metrics = learner.train(rows, True)
            if isinstance(metrics, NonfiniteBatch):
                raise FloatingPointError(f"SFT step {len(losses) + 1}: {metrics}")
            losses.append(metrics.loss)
    return losses


@contextmanager
def _instead(
    learner: SupervisedLearner, algorithm: Algorithm, optimizer: OptimizersContainer, scheduler: LRSchedulersContainer
) -> Iterator[None]:
    """Replace algorithm, optimizer and schedule inside the context."""
    before = learner.algorithm, learner.optimizer, learner.scheduler
    learner.algorithm, learner.optimizer, learner.scheduler = algorithm, optimizer, scheduler
    try:
        yield
    finally:
        learner.algorithm, learner.optimizer, learner.scheduler = before

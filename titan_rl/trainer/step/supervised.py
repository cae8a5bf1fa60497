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
from titan_rl.data.spans import Spans
from titan_rl.data.types import Row, StepMetrics
from titan_rl.trainer.model.optimizer import build_sft_optimizer


class SupervisedLearner(Protocol):
    """Learner whose algorithm, optimizer and schedule can be replaced."""

    algorithm: Algorithm
    optimizer: OptimizersContainer
    scheduler: LRSchedulersContainer
    spans: Spans

    @property
    def model_parts(self) -> list[nn.Module]: ...

    def train(self, rows: list[Row], has_signal: bool) -> StepMetrics | NonfiniteBatch: ...


class SupervisedSteps:
    """Supervised steps of a learner, in one call or several: optimizer and schedule stay."""

    def __init__(self, learner: SupervisedLearner, lr: float, num_steps: int):
        self._num_steps, self._num_done = num_steps, 0
        self._own = SFT(), *build_sft_optimizer(learner.model_parts, lr, num_steps)

    @property
    def is_over(self) -> bool:
        return self._num_done >= self._num_steps

    def take(self, learner: SupervisedLearner, batches: list[list[Row]]) -> list[float]:
        """Run the next steps; returns the loss of each. Errors: FloatingPointError (Learner.sft)."""
        losses = []
        with _instead(learner, *self._own):
            for rows in batches:
                metrics = learner.train(rows, True)
                self._num_done += 1
                if isinstance(metrics, NonfiniteBatch):
                    raise FloatingPointError(f"SFT step {self._num_done}: {metrics}")
                losses.append(metrics.loss)
        learner.spans.take()  # of no step of the run
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

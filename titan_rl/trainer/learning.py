"""Protocols of a trained model: the policy (step/learner.py) or a learned role (roles/learned_role.py).

Checkpoints and snapshots take its parameters, optimizer and schedule (``LearningModel``), the search for
non-finite samples its last pass and its gradients, too (``SearchedModel``).

Dimensions: K statistics of a token, S trained tokens of a row.
"""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import nn

import titan_rl.models.device  # noqa: F401  isort: skip  (before any other torchtitan module)

from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer

from titan_rl.data.types import Row
from titan_rl.trainer.titan_config import TitanConfig


class LearningModel(Protocol):
    """Trained model with its own optimizer and schedule."""

    @property
    def model_parts(self) -> list[nn.Module]: ...

    @property
    def optimizer(self) -> OptimizersContainer: ...

    @property
    def scheduler(self) -> LRSchedulersContainer: ...


class SearchedModel(LearningModel, Protocol):
    """Trained model, as the search for non-finite samples reads it (objective/nonfinite.py)."""

    @property
    def titan(self) -> TitanConfig: ...

    @property
    def statistics(self) -> dict[int, torch.Tensor]:
        """Head outputs [K, S] of each row of the last pass, on ranks that have the head."""
        ...

    @property
    def gives(self) -> str:
        """Name of the head's output, for messages."""
        ...

    @property
    def samples_per_loss(self) -> int:
        """Number of samples with a joint loss: 2 for preference pairs, else 1."""
        ...

    @property
    def names_rows(self) -> bool:
        """Whether a sample's prompt names the row of data that it comes from."""
        ...

    def forward_backward(self, rows: list[Row]) -> dict[str, torch.Tensor]:
        """Accumulate the gradients of rows; returns sums over their trained tokens."""
        ...

    def gradient_norm(self) -> float:
        """Norm of all ranks' gradients, before they are clipped."""
        ...

    def is_finite_everywhere(self, value: float) -> bool:
        """Whether a value is finite on all ranks."""
        ...

    def loss_of(self, row: Row, statistics_KS: torch.Tensor, /) -> float:
        """Loss of a row, computed from head outputs [K, S]."""
        ...

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Trained parameters, by name."""
        ...

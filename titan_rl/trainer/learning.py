"""What others may read of a model that learns: of the policy's learner (learner.py), of a role beside it
(learned_role.py).

Checkpoints and snapshots take its parameters, optimizer and schedule (``LearningModel``), the search for bad numbers
its last pass and its gradients, too (``SearchedModel``).

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
    """A model with an optimizer and a schedule of its own."""

    @property
    def model_parts(self) -> list[nn.Module]: ...

    @property
    def optimizer(self) -> OptimizersContainer: ...

    @property
    def scheduler(self) -> LRSchedulersContainer: ...


class SearchedModel(LearningModel, Protocol):
    """A model that learns from rows, as the search for bad numbers sees it (nonfinite.py)."""

    @property
    def titan(self) -> TitanConfig: ...

    @property
    def statistics(self) -> dict[int, torch.Tensor]:
        """Of each row of the last pass, what the head gave [K, S], where this rank saw it."""
        ...

    @property
    def gives(self) -> str:
        """What the head says of a token, for people."""
        ...

    @property
    def samples_per_loss(self) -> int:
        """2 where the answers of a pair have one loss, else 1."""
        ...

    @property
    def names_rows(self) -> bool:
        """Whether a sample's prompt names the row of data that it comes from."""
        ...

    def forward_backward(self, rows: list[Row]) -> dict[str, torch.Tensor]:
        """Add the rows' gradients up."""
        ...

    def gradient_norm(self) -> float:
        """The norm of all ranks' gradients, which are then clipped."""
        ...

    def is_finite_everywhere(self, value: float) -> bool:
        """Whether it is on all ranks."""
        ...

    def loss_of(self, row: Row, statistics_KS: torch.Tensor, /) -> float:
        """The loss that a row has where the head gives this."""
        ...

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters of all that learns, by name."""
        ...

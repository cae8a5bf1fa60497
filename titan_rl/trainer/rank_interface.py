"""Interface of a trainer actor to its rank: the policy, or a learned role with its own processes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import nn

import titan_rl.models.device  # noqa: F401  isort: skip  (before any other torchtitan module)

from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer

from titan_rl.config.sections.schema import Config
from titan_rl.data.nonfinite import NonfiniteBatch
from titan_rl.data.spans import Spans
from titan_rl.data.types import Row, StepMetrics
from titan_rl.models.weights.quantized_files import Quantizer
from titan_rl.trainer.model.sharded_model import ShardedModel
from titan_rl.trainer.objective.preparation import RowColumns
from titan_rl.trainer.titan_config import TitanConfig

T = TypeVar("T")


class LearningModel(Protocol):
    """Trained model with its own optimizer and schedule: the policy (step/learner.py) or a learned role."""

    @property
    def model_parts(self) -> list[nn.Module]: ...

    @property
    def optimizer(self) -> OptimizersContainer: ...

    @property
    def scheduler(self) -> LRSchedulersContainer: ...


class RoleModel(Protocol):
    """Role with a model whose weights can be replaced."""

    @property
    def model(self) -> ShardedModel: ...


class TrainerRank(ABC):
    """One trainer rank: of the policy, or of a learned role with its own processes.

    All ranks of the policy, or of the role, call each method together."""

    titan: TitanConfig
    device: torch.device
    before_update: Callable[[], None]
    """Callback before parameters change, which waits for copies under way."""
    spans: Spans
    """Timed spans of this rank, until its actor takes them."""
    step_values: list[dict[int, np.ndarray]]
    """Recorded values of this rank's rows, for each update of the last step (mesh/telemetry/step_record.py);
    empty where another rank reports them."""
    has_views: bool = False
    """Whether it keeps views of trained tensors, as adapters do; then these must not move."""

    # the steps of a run

    @abstractmethod
    def share(self, groups: Sequence[T]) -> Sequence[T]:
        """Items whose rows this rank takes, out of one for each group of the policy's ranks."""

    @abstractmethod
    def train_step(
        self, batches: list[list[Row]], has_signal: list[bool], role_columns: Sequence[RowColumns] = ()
    ) -> list[StepMetrics | NonfiniteBatch]:
        """Train on one step; ``batches[i]`` holds the rows of update i.

        Returns the result of each update; empty on ranks of a learned role."""

    @abstractmethod
    def sft(self, batches: list[list[Row]], lr: float, num_steps: int = 0) -> list[float]:
        """The next of ``num_steps`` supervised steps (0: all of them); returns their losses, empty on ranks of a
        learned role."""

    def take_settings(self, config: Config) -> None:  # noqa: B027  (of the policy; a role in ranks of its own has others)
        """Replace the policy's optimizer, schedule and algorithm settings between two updates."""

    # state

    @property
    @abstractmethod
    def roles(self) -> Mapping[str, RoleModel]:
        """Roles with replaceable weights on this rank, by name."""

    @abstractmethod
    def learning(self) -> dict[str, LearningModel]:
        """Trained models on this rank, by name, in the same order on all ranks."""

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [each for model in self.learning().values() for each in model.optimizer.optimizers]

    def schedulers(self) -> dict[str, LRSchedulersContainer]:
        return {name: model.scheduler for name, model in self.learning().items()}

    @abstractmethod
    def weights_changed(self) -> None:
        """Refresh copies of the weights after a change; all ranks call it."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Complete state of this rank, for a checkpoint."""

    @property
    @abstractmethod
    def part(self) -> str:
        """Checkpoint subfolder of this process group; empty for the policy's."""

    @abstractmethod
    def load_checkpoint(self, checkpoint: Path) -> None:
        """Load a checkpoint; all ranks call it. Errors: StateError."""

    @abstractmethod
    def digests(self) -> dict[str, str]:
        """Digests of this rank's frozen weights, by role."""

    @abstractmethod
    def save_hf(
        self,
        out: str | Path,
        adapter: str | Path = "",
        beside: str | Path = "",
        dtype: str = "auto",
        quantizer: Quantizer | None = None,
    ) -> None:
        """Write the policy as a Hugging Face directory ``out``.

        ``adapter``: directory for its LoRA adapters; ``beside``: parent folder for the learned role. Empty:
        not written. ``dtype``: as ``checkpoint.export_dtype``. ``quantizer``: of the policy; None: it is written as
        it is."""

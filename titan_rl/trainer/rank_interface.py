"""Interface of a trainer actor to its rank: the policy, or a learned role with its own processes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer

from titan_rl.config.sections.schema import Config
from titan_rl.data.nonfinite import BadNumbers
from titan_rl.data.spans import Spans
from titan_rl.data.types import Row, StepMetrics
from titan_rl.trainer.learning import LearningModel
from titan_rl.trainer.model.sharded_model import ShardedModel
from titan_rl.trainer.objective.preparation import RowColumns
from titan_rl.trainer.titan_config import TitanConfig

T = TypeVar("T")


class RoleModel(Protocol):
    """A role's model, which takes other weights when it is told to."""

    @property
    def model(self) -> ShardedModel: ...


class TrainerRank(ABC):
    """One rank of it. All ranks of a side are called together."""

    titan: TitanConfig
    device: torch.device
    before_update: Callable[[], None]
    """Called before parameters change: somebody may still be copying them."""
    spans: Spans
    """What this rank did, until its actor takes it."""
    step_values: list[dict[int, np.ndarray]]
    """For each update of the last step, what this rank found of its rows (mesh/telemetry/step_record.py); nothing where
    it does not speak for any."""
    has_views: bool = False
    """Whether it keeps views of what it trains, as adapters do, which so must stay where it is."""

    # the steps of a run

    @abstractmethod
    def share(self, groups: Sequence[T]) -> Sequence[T]:
        """Of what there is for each group of the policy's ranks: that of which this rank takes the rows."""

    @abstractmethod
    def train_step(
        self, batches: list[list[Row]], has_signal: list[bool], role_columns: Sequence[RowColumns] = ()
    ) -> list[StepMetrics | BadNumbers]:
        """A step of the run, ``batches[i]`` being the rows of an update; what came of each, if that is told here."""

    @abstractmethod
    def sft(self, batches: list[list[Row]], lr: float) -> list[float]:
        """Supervised steps; the losses, if they are told here."""

    def take_settings(self, config: Config) -> None:  # noqa: B027  (of the policy; a role in ranks of its own has others)
        """Other settings of the policy's optimizer, schedule and algorithm, between two updates."""

    # state

    @property
    @abstractmethod
    def roles(self) -> Mapping[str, RoleModel]:
        """Models here that take other weights when they are told to, by name."""

    @abstractmethod
    def learning(self) -> dict[str, LearningModel]:
        """All that learns here by name, each with an optimizer and a schedule; in an order that all ranks agree on."""

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [each for model in self.learning().values() for each in model.optimizer.optimizers]

    def schedulers(self) -> dict[str, LRSchedulersContainer]:
        return {name: model.scheduler for name, model in self.learning().items()}

    @abstractmethod
    def weights_changed(self) -> None:
        """Whoever changes what is trained calls this on all ranks."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """All of this rank's, for a checkpoint."""

    @property
    @abstractmethod
    def part(self) -> str:
        """The folder of a checkpoint that it is written into: two process groups cannot write into one."""

    @abstractmethod
    def load_checkpoint(self, checkpoint: Path) -> None:
        """All ranks call this together. Errors: StateError."""

    @abstractmethod
    def digests(self) -> dict[str, str]:
        """Of the weights that this rank holds and that must never change."""

    @abstractmethod
    def save_hf(self, out: str | Path, adapter: str | Path = "", beside: str | Path = "", dtype: str = "auto") -> None:
        """``out``: where the policy goes as a Hugging Face directory; ``adapter``: where its adapters go besides, if it
        has any; ``beside``: in which folder the role that learns beside it goes by its name, if there is one. Empty:
        that is not wanted. ``dtype``: of what is written, as ``checkpoint.export_dtype``."""

"""Model that learns beside the policy, with its own optimizer: critics and implicit reward models.

    find (of all rows, before a step's first update of the policy) ─▶ ... advantages ... ─▶ learn (an update)

It lives in the policy's processes and in their layout, or in processes of its own (worker.py), and learns from
the policy's rows. Its state is part of the rank's: in snapshots and in checkpoints (there under its name). An update
that is not finite is undone and reported before the policy's is made: so no batch with NaN or Inf is applied to either.
One that learns first, before advantages are made, is undone when the policy cannot apply it.

Dimensions: S trained tokens of a row.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torchtitan.distributed import ParallelDims

from titan_rl.config.sections.role_sections import LearnedRoleConfig
from titan_rl.config.sections.schema import Config
from titan_rl.data.nonfinite import NonfiniteBatch
from titan_rl.data.types import Row
from titan_rl.models.weights.shards import Shard
from titan_rl.trainer.distributed.ranks import (
    clipped_gradient_norm,
    is_finite_everywhere,
    is_first_of_rows,
    sum_over_ranks,
)
from titan_rl.trainer.model.optimizer import build_optimizer, load_schedule
from titan_rl.trainer.model.sharded_model import Columns, ShardedModel
from titan_rl.trainer.objective.nonfinite import find_nonfinite_samples
from titan_rl.trainer.objective.preparation import completed
from titan_rl.trainer.objective.whole_rollouts import joined_loss
from titan_rl.trainer.titan_config import TitanConfig, learned_titan

RoleResult = dict[str, float] | NonfiniteBatch
"""Result of a batch: metrics, or the non-finite samples for which no update was applied."""


@dataclass(frozen=True)
class RoleState:
    """Copy of a rank's part of a role's state."""

    tensors: list[torch.Tensor]
    schedule: dict[str, Any]


class LearnedRoleInterface(ABC):
    """Interface of a learned role, local or in its own processes."""

    settings: LearnedRoleConfig
    """Its section of the TOML."""

    @property
    @abstractmethod
    def learns_first(self) -> bool:
        """Whether it is updated on a step's rows before it scores them."""

    @property
    @abstractmethod
    def is_warming_up(self) -> bool:
        """Whether the policy is not updated yet (``warmup_steps``)."""

    @abstractmethod
    def init_from(self, policy: ShardedModel) -> None:
        """Copy the policy's weights."""

    @abstractmethod
    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters in this process, by name."""

    @abstractmethod
    def find(self, rows: list[Row]) -> list[dict[str, np.ndarray]]:
        """Columns of fitted rows; empty on pipeline stages but the last."""

    @abstractmethod
    def zero_columns(self, num_tokens: int) -> dict[str, np.ndarray]:
        """Zeros for all columns of the role."""

    @abstractmethod
    def learn(self, rows: list[Row]) -> RoleResult:
        """Apply the role's updates on a batch."""

    @abstractmethod
    def saved_state(self) -> RoleState:
        """A copy of what updates change."""

    @abstractmethod
    def restore(self, state: RoleState) -> None:
        """As it was when ``state`` was taken."""

    @abstractmethod
    def begin(self, rows: list[Row]) -> None:
        """Start learning concurrently with the policy's backward pass, if possible; ``learn`` or ``forget`` follows."""

    @abstractmethod
    def forget(self) -> None:
        """Discard the update that ``begin`` started, since the policy's is not applied."""

    @abstractmethod
    def end_step(self) -> None:
        """End the role's part of a training step."""


def _add(totals: dict[str, torch.Tensor], sums: dict[str, torch.Tensor]) -> None:
    for name, value in sums.items():
        totals[name] += value


class LearnedRole(LearnedRoleInterface):
    """Model with its own optimizer, trained on the policy's rows in this process."""

    name: ClassVar[str]
    """TOML section, name in ``Needs``, and prefix of metrics, weights and checkpoint keys."""
    gives: str
    """Name of the head's output, for messages."""
    head: ClassVar[Literal["vocabulary", "value"]]
    columns: ClassVar[tuple[str, ...]]
    """Columns, float32 [S] each, of the rows that it is trained on."""
    sums: ClassVar[tuple[str, ...]]
    """Names of the further sums of ``_loss``."""
    asks_of_whole_rollouts: ClassVar[bool] = False
    """Whether ``_loss`` asks something of all tokens of a rollout together."""
    settings: Any
    """``CriticConfig`` or ``ImplicitRewardConfig`` (config/sections/role_sections.py)."""
    samples_per_loss, names_rows = 1, False
    """For the search for non-finite samples (objective/nonfinite.py): one loss a sample, prompts are no data rows."""

    def __init__(
        self,
        config: Config,
        titan: TitanConfig,
        model: ShardedModel,
        parallel_dims: ParallelDims,
        before_update: Callable[[], None],
    ):
        """``before_update``: called before parameters change."""
        self.settings, self.model, self.parallel_dims = getattr(config, self.name), model, parallel_dims
        self.titan = learned_titan(config, titan, self.name)
        self.updates_per_step = config.algorithm.updates_per_batch
        self.model_parts, self.device = model.parts, model.device
        num_updates = titan.training.steps * self.updates_per_step
        self.optimizer, self.scheduler = build_optimizer(self.titan, model.parts, num_updates)
        self.before_update = before_update
        self.statistics: dict[int, torch.Tensor] = {}
        """Head outputs [K, S] of each row of the last pass, on ranks that have the head."""
        self._is_counted = is_first_of_rows(parallel_dims)

    # what a role is

    @abstractmethod
    def _loss(self, output_S: torch.Tensor, columns: Columns, /) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Of a row, by what the head gave: a sum over tokens; and ``sums``."""

    @abstractmethod
    def _metrics(self, first: dict[str, float], last: dict[str, float]) -> dict[str, float]:
        """Of the first and the last update on a batch: ``sums`` and ``count`` of all rows of all ranks."""

    @property
    def learns_first(self) -> bool:
        return False

    # the steps of a run

    @property
    def is_warming_up(self) -> bool:
        """Whether the run is still in the steps before the policy's first update. The schedule counts them."""
        return self.scheduler.schedulers[0].last_epoch < self.settings.warmup_steps * self.updates_per_step

    @torch.no_grad()
    def init_from(self, policy: ShardedModel) -> None:
        """Copy the policy's weights, adapters merged; a head that the policy lacks stays."""
        policy_shards = {(shard.name, shard.start): shard for shard in policy.shards()}
        names = {name for name, _ in policy_shards}
        for shard in self.shards():
            if shard.name in names:
                shard.tensor.copy_(policy_shards[shard.name, shard.start].merged())

    def begin(self, rows: list[Row]) -> None:
        """No-op: ``learn`` does all."""

    def forget(self) -> None:
        """No-op: nothing was started."""

    def end_step(self) -> None:
        """No-op: no process waits."""

    def learn(self, rows: list[Row], approves: Callable[[RoleResult], bool] = lambda result: True) -> RoleResult:
        """Apply the updates on a batch; loss, gradient norm and learning rate are those of the first.

        ``approves(result)``: called before the last update; if false, no update is applied."""
        state, totals = self.saved_state() if self.settings.updates > 1 else None, []
        try:
            for _ in range(self.settings.updates):
                if totals:
                    self._apply()
                totals.append(self._gradients(rows))
        except FloatingPointError as error:
            self._go_back(state)
            bad = find_nonfinite_samples(self, rows, f"{self.name}: {error}")
            approves(bad)
            return bad
        names = ("loss", "grad_norm", "learning_rate")
        result = {f"{self.name}_{name}": totals[0][name] for name in names} | self._metrics(totals[0], totals[-1])
        if not approves(result):
            self._go_back(state)
            return result
        self._apply()
        self.scheduler.step()
        return result

    def _go_back(self, state: RoleState | None) -> None:
        """Without the gradients at hand, and without the updates since ``state``."""
        self.optimizer.zero_grad()
        if state is not None:
            self.restore(state)

    def _gradients(self, rows: list[Row]) -> dict[str, float]:
        """Of an update, clipped. Errors: FloatingPointError for a loss or gradient that is not finite."""
        totals = sum_over_ranks(self.forward_backward(rows), is_counted=self._is_counted)
        if not math.isfinite(totals["loss"]):
            raise FloatingPointError(f"the loss is {totals['loss']}")
        norm, learning_rate = self.gradient_norm(), self.optimizer.optimizers[0].param_groups[0]["lr"]
        if not self.is_finite_everywhere(norm):
            raise FloatingPointError(f"the gradient norm is {norm}")
        return totals | {"grad_norm": norm, "learning_rate": float(learning_rate)}

    def _apply(self) -> None:
        self.before_update()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def zero_columns(self, num_tokens: int) -> dict[str, np.ndarray]:
        return {name: np.zeros(num_tokens, np.float32) for name in self.columns}

    def completed(self, rows: list[Row]) -> list[Row]:
        """Fitted rows with all columns of the role."""
        return completed(self.model.fit(rows), self.zero_columns)

    def forward_backward(self, rows: list[Row]) -> dict[str, torch.Tensor]:
        """Accumulate the gradients of rows; returns sums over their trained tokens."""
        names = ("loss", "count", *self.sums)
        totals = {name: torch.zeros((), dtype=torch.float64, device=self.device) for name in names}
        self.statistics.clear()
        rows = self.completed(rows)

        def loss(statistics: torch.Tensor, index: int, columns: Columns) -> torch.Tensor:
            statistics_KS = statistics.reshape(-1, statistics.shape[-1])
            self.statistics[index] = statistics_KS.detach()
            row_loss, sums = self._loss_and_sums(statistics_KS, columns)
            _add(totals, sums)
            return row_loss

        if not self.asks_of_whole_rollouts:
            self.model.forward_backward(rows, loss)
            return totals
        is_counted = self._is_counted and (self.model.pipeline is None or self.model.pipeline.has_last)
        joined = joined_loss(self.model, rows, self._loss_and_sums, is_counted=is_counted)
        _add(totals, joined.sums)
        self.model.forward_backward(joined.rows, joined.added_to(loss))
        return totals

    def _loss_and_sums(
        self, statistics_KS: torch.Tensor, columns: Columns
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss, sums = self._loss(statistics_KS[0], columns)
        return loss, sums | {"loss": loss.detach(), "count": (columns["weight_S"] > 0).sum()}

    # for the search for non-finite samples (objective/nonfinite.py)

    def gradient_norm(self) -> float:
        return clipped_gradient_norm(self.model_parts, self.titan.training.max_norm, self.parallel_dims)

    def is_finite_everywhere(self, value: float) -> bool:
        return is_finite_everywhere(value, self.device)

    def loss_of(self, row: Row, statistics_KS: torch.Tensor) -> float:
        """Loss of a row, computed from head outputs [K, S]."""
        return float(self._loss(statistics_KS[0], self.model.columns(row))[0])

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters by name."""
        for part in self.model_parts:
            for name, parameter in part.named_parameters():
                yield f"{self.name}.{name}", parameter

    # weights

    def shards(self) -> list[Shard]:
        return self.model.shards()

    def _state(self) -> Iterator[torch.Tensor]:
        """What an update changes."""
        for optimizer in self.optimizer.optimizers:
            for parameter, moments in optimizer.state.items():
                for tensor in (parameter.detach(), *moments.values()):
                    yield tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def saved_state(self) -> RoleState:
        """A copy of what updates change."""
        return RoleState([tensor.clone() for tensor in self._state()], self.scheduler.state_dict())

    @torch.no_grad()
    def restore(self, state: RoleState) -> None:
        """As it was when ``state`` was taken."""
        self.before_update()
        for tensor, before in zip(self._state(), state.tensors, strict=True):
            tensor.copy_(before)
        load_schedule(self.scheduler, state.schedule)

"""The critic: a model with a value head that learns beside the policy, with an optimizer and a schedule of its own.

    find (values of all rows, before a step's first update) ─▶ ... advantages and returns ... ─▶ learn (an update)

It lives in the trainer's processes, in the policy's layout, and takes the policy's rows. Its state is part of the
rank's: in snapshots and in checkpoints (there as ``critic.*``). An update of it that is not finite is taken back and
told, before the policy's is made: so of a batch with bad numbers nothing is applied to either.

Dimensions: S trained tokens of a row.
"""

import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from torchtitan.distributed import ParallelDims

from titan_rl.algorithms.values import VALUE_SUMS, explained_variance, value_loss
from titan_rl.config.model_directory.weight_checks import VALUE_HEAD
from titan_rl.config.schema import Config
from titan_rl.data.types import BadNumbers, Row
from titan_rl.models.shards import Shard
from titan_rl.trainer.bad_numbers import find_culprits
from titan_rl.trainer.optimizer import build_optimizer
from titan_rl.trainer.preparation import as_array, completed
from titan_rl.trainer.ranks import clipped_gradient_norm, is_finite_everywhere, is_first_of_rows, sum_over_ranks
from titan_rl.trainer.sharded_model import Columns, ShardedModel
from titan_rl.trainer.titan_config import TitanConfig, critic_titan

FOUND = ("value_S", "return_S")
"""Columns of its rows: what it said of them, and what it is to say."""


def _nothing_found(num_tokens: int) -> dict[str, np.ndarray]:
    return {name: np.zeros(num_tokens, np.float32) for name in FOUND}


class Critic:
    gives, samples_per_loss, names_rows = "value", 1, False

    def __init__(
        self,
        config: Config,
        titan: TitanConfig,
        model: ShardedModel,
        parallel_dims: ParallelDims,
        before_update: Callable[[], None],
    ):
        """``before_update``: called before parameters change."""
        self.settings, self.model, self.parallel_dims = config.critic, model, parallel_dims
        self.titan = critic_titan(config, titan)
        self.updates_per_step = config.algorithm.updates_per_batch
        self.model_parts, self.device = model.parts, model.device
        num_updates = titan.training.steps * self.updates_per_step
        self.optimizer, self.scheduler = build_optimizer(self.titan, model.parts, num_updates)
        self.before_update = before_update
        self.statistics: dict[int, torch.Tensor] = {}
        """Values [1, S] of each row of the last pass, where this rank saw them."""
        self._is_counted = is_first_of_rows(parallel_dims)

    # before a step's first update

    def find(self, rows: list[Row]) -> list[dict[str, np.ndarray]]:
        """Of fitted rows ``value_S``; nothing on the stages of a pipeline that are not the last."""
        return [{} if s is None else {"value_S": as_array(s)} for s in self.model.measure(rows)]

    @property
    def learns_alone(self) -> bool:
        """Whether the run is still in the steps before the policy's first update. The schedule counts them."""
        return self.scheduler.schedulers[0].last_epoch < self.settings.warmup_steps * self.updates_per_step

    @torch.no_grad()
    def begin_as(self, policy: ShardedModel) -> None:
        """Take the policy's weights, with its adapters if it has any; all but the head."""
        theirs = {(shard.name, shard.start): shard.tensor for shard in policy.shards()}
        for shard in self.shards():
            if shard.name != VALUE_HEAD:
                shard.tensor.copy_(theirs[shard.name, shard.start])

    # an update

    def learn(self, rows: list[Row]) -> dict[str, float] | BadNumbers:
        """The critic's updates on a batch. Metrics are those of the first, on the values of before; what is clipped is
        that of the last, as in the first update of a step nothing is."""
        kept = self._copy() if self.settings.updates > 1 else []
        try:
            told = [self._update(rows) for _ in range(self.settings.updates)]
        except FloatingPointError as error:
            self.optimizer.zero_grad()
            self._put_back(kept)
            return find_culprits(self, rows, f"critic: {error}")
        self.scheduler.step()
        return told[0] | {"critic_clip_fraction": told[-1]["critic_clip_fraction"]}

    def _update(self, rows: list[Row]) -> dict[str, float]:
        """Errors: FloatingPointError for a loss or gradient that is not finite; this update is not made then."""
        totals = sum_over_ranks(self.forward_backward(rows), is_counted=self._is_counted)
        if not math.isfinite(totals["loss"]):
            raise FloatingPointError(f"the loss is {totals['loss']}")
        norm, learning_rate = self.gradient_norm(), self.optimizer.optimizers[0].param_groups[0]["lr"]
        if not self.is_finite_everywhere(norm):
            raise FloatingPointError(f"the gradient norm is {norm}")
        self.before_update()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return _metrics(totals) | {"critic_grad_norm": norm, "critic_learning_rate": float(learning_rate)}

    def forward_backward(self, rows: list[Row]) -> dict[str, torch.Tensor]:
        """Add the rows' gradients up; gives back sums over their trained tokens."""
        totals = {
            name: torch.zeros((), dtype=torch.float64, device=self.device) for name in ("loss", "count", *VALUE_SUMS)
        }
        self.statistics.clear()

        def loss(value_S: torch.Tensor, index: int, columns: Columns) -> torch.Tensor:
            self.statistics[index] = value_S.detach()[None]
            found, sums = self._loss(value_S, columns)
            for name, value in sums.items():
                totals[name] += value
            return found

        self.model.forward_backward(completed(self.model.fit(rows), _nothing_found), loss)
        return totals

    def _loss(self, value_S: torch.Tensor, columns: Columns) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        weight_S, clip = columns["weight_S"], self.settings.value_clip or None
        loss, sums = value_loss(value_S, columns["value_S"], columns["return_S"], weight_S, clip)
        return loss, sums | {"loss": loss.detach(), "count": (weight_S > 0).sum()}

    # what a search for bad numbers asks (bad_numbers.py)

    def gradient_norm(self) -> float:
        return clipped_gradient_norm(self.model_parts, self.titan.training.max_norm, self.parallel_dims)

    def is_finite_everywhere(self, value: float) -> bool:
        return is_finite_everywhere(value, self.device)

    def loss_of(self, row: Row, value_1S: torch.Tensor) -> float:
        """The loss that a row has at these values."""
        return float(self._loss(value_1S[0], self.model.columns(row))[0])

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters by name."""
        for part in self.model_parts:
            for name, parameter in part.named_parameters():
                yield f"critic.{name}", parameter

    # weights

    def shards(self) -> list[Shard]:
        return self.model.shards()

    def _state(self) -> Iterator[torch.Tensor]:
        """What an update changes."""
        for optimizer in self.optimizer.optimizers:
            for parameter, moments in optimizer.state.items():
                for tensor in (parameter.detach(), *moments.values()):
                    yield tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def _copy(self) -> list[torch.Tensor]:
        return [tensor.clone() for tensor in self._state()]

    @torch.no_grad()
    def _put_back(self, kept: list[torch.Tensor]) -> None:
        """As it was when ``kept`` was copied; nothing if nothing was."""
        for tensor, before in zip(self._state(), kept, strict=True) if kept else ():
            tensor.copy_(before)


def _metrics(totals: dict[str, float]) -> dict[str, float]:
    """Totals of all rows of all ranks, as means over trained tokens."""
    count = max(totals["count"], 1)
    return {
        "critic_loss": totals["loss"],
        "critic_value": totals["value"] / count,
        "critic_return": totals["return"] / count,
        "critic_clip_fraction": totals["clipped"] / count,
        "critic_explained_variance": explained_variance(totals, totals["count"]),
    }

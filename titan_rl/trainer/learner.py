"""What a trainer rank does to its model (sharded_model.py): this drives its steps.

    train_step: prepare (roles, advantages) ─▶ for each update: forward_backward ─▶ optimizer_step

``forward_backward`` and ``optimizer_step`` are separate, so that gradients of several rows, and later of several
meshes, can add up between them. What is minimized is in objective.py, by what in optimizer.py, what is found out before
in preparation.py; nothing here knows of actors.

Dimensions: S trained tokens of a row.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import titan_rl.models.device as device  # isort: skip  (before any other torchtitan module)

from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils

from titan_rl.algorithms.base import Algorithm
from titan_rl.algorithms.registry import make_algorithm
from titan_rl.algorithms.sft import SFT
from titan_rl.config.schema import Config
from titan_rl.data.types import BadNumbers, Row, StepMetrics
from titan_rl.models.families import make_family
from titan_rl.models.heads import value_spec
from titan_rl.models.shards import Shard
from titan_rl.models.spec import model_spec
from titan_rl.trainer.bad_numbers import find_culprits
from titan_rl.trainer.objective import (
    add_sums,
    expected_gradient,
    loss_and_sums,
    loss_inputs,
    step_metrics,
    zero_totals,
)
from titan_rl.trainer.optimizer import build_optimizer, build_sft_optimizer
from titan_rl.trainer.preparation import as_array, completed, refined, whitened, with_found
from titan_rl.trainer.roles import FrozenRole, frozen_roles
from titan_rl.trainer.sharded_model import Columns, ShardedModel
from titan_rl.trainer.titan_config import TitanConfig


class Learner:
    """One rank's part of the policy, its algorithm, optimizer and schedule, and the roles beside it. The process group
    must be up."""

    def __init__(self, config: Config, titan: TitanConfig, model_path: str | Path):
        self.config, self.titan, self.model_path = config, titan, Path(model_path)
        self.device = device.local_device(dist.get_rank())
        dist_utils.set_spmd_backend(titan.parallelism.spmd_backend)
        self.parallel_dims = ParallelDims.from_config(titan.parallelism, dist.get_world_size())
        self.implementation = config.model.kernel
        if self.implementation == "auto":
            self.implementation = "triton" if self.device.type == "cuda" else "reference"
        on_data = bool(config.data.file)
        self.algorithm = make_algorithm(config.algorithm, config.run.plugin_path, on_data=on_data)
        self.policy = self._sharded(model_path, head=self.algorithm.head)
        self.spec, self.model_parts, self.pipeline = self.policy.spec, self.policy.parts, self.policy.pipeline
        self.algorithm.implementation = self.implementation
        self.roles: dict[str, FrozenRole] = frozen_roles(config, self.algorithm.needs, self.model_path, self._sharded)
        num_updates = titan.training.steps * config.algorithm.updates_per_batch
        self.optimizer, self.scheduler = build_optimizer(titan, self.model_parts, num_updates)
        self.before_update: Callable[[], None] = lambda: None
        """Called before parameters change: somebody may still be copying them."""
        self.statistics: dict[int, torch.Tensor] = {}
        """Of each row of the last pass, what the head gave: log-probabilities and entropies [2, S], or values [1, S];
        where this rank saw them."""
        tp_mesh = self.parallel_dims.get_optional_mesh("tp")
        self._tp_rank = tp_mesh.get_local_rank() if tp_mesh else 0

    def _sharded(self, path: str | Path, head: str = "vocabulary") -> ShardedModel:
        """A model over the same ranks and in the same layout as the policy."""
        spec = model_spec(path, make_family(self.config.model.family, self.config.run.plugin_path))
        spec = value_spec(spec) if head == "value" else spec
        return ShardedModel(
            *(spec, self.titan, path, self.parallel_dims, self.device),
            temperature=self.config.rollout.temperature,
            implementation=self.implementation,
        )

    # before the updates of a step

    def prepare(self, batches: list[list[Row]]) -> list[list[Row]]:
        """The rows of each update of a step, with what roles found of them, and the advantages that the loss gets."""
        algorithm, finders = self.algorithm, [role.find for role in self.roles.values()]
        if algorithm.needs.proximal:
            finders.append(self._find_proximal)
        is_refined = type(algorithm).refine is not Algorithm.refine
        if not (finders or is_refined or algorithm.normalizes_batch):
            return batches
        batches = [with_found(self.policy.fit(rows), finders) for rows in batches]
        sees = self.pipeline is None or self.pipeline.has_last
        if is_refined and sees:
            batches = [[refined(algorithm, row, self.policy.columns(row)) for row in rows] for rows in batches]
        return self._whitened(batches, sees) if algorithm.normalizes_batch else batches

    def _whitened(self, batches: list[list[Row]], sees: bool) -> list[list[Row]]:
        rows = whitened([row for rows in batches for row in rows], self.device, is_counted=sees and not self._tp_rank)
        rest = iter(rows)
        return [[next(rest) for _ in rows] for rows in batches]

    def _find_proximal(self, rows: list[Row]) -> list[dict[str, np.ndarray]]:
        return [{} if s is None else {"proximal_logprob_S": as_array(s[0])} for s in self.policy.measure(rows)]

    def train_step(self, batches: list[list[Row]], has_signal: list[bool]) -> list[StepMetrics | BadNumbers]:
        """A step of the run: an update for each batch, ``batches[i]`` being this rank's rows of it."""
        prepared, moves = self.prepare(batches), not self.algorithm.is_still_without_advantage
        return [self.train(rows, signal or moves) for rows, signal in zip(prepared, has_signal, strict=True)]

    # an update

    def _loss(self, statistics: torch.Tensor, index: int, columns: Columns, totals: dict) -> torch.Tensor:
        """A row's loss, of what the head gave; its sums are added to ``totals``."""
        self.statistics[index] = statistics.detach().reshape(-1, statistics.shape[-1])
        loss, sums = loss_and_sums(self.algorithm, statistics, columns)
        add_sums(totals, sums)
        return loss

    def _asked(self, columns: Columns) -> dict:
        """What the head is told besides its targets."""
        if self.algorithm.head == "value":
            return {}
        return {
            "expected_grad": expected_gradient(self.algorithm, columns),
            "entropy_gradient": self.algorithm.needs.entropy_gradient,
        }

    def forward_backward(self, rows: list[Row]) -> dict[str, torch.Tensor]:
        """Add the rows' gradients up; gives back sums over their trained tokens (``agreement_max``: a maximum).

        With a pipeline, the sums are zero but on the last stage.
        """
        names = self.found_names()
        rows = completed(self.policy.fit(rows), names)
        totals = zero_totals(self.algorithm, names, self.device)
        self.statistics.clear()
        self.policy.forward_backward(rows, lambda *row: self._loss(*row, totals), self._asked)
        return totals

    def found_names(self) -> list[str]:
        proximal = ["proximal_logprob_S"] if self.algorithm.needs.proximal else []
        return [role.gives for role in self.roles.values()] + proximal

    def optimizer_step(self, has_signal: bool) -> tuple[float, float]:
        """Clip, step, clear; the gradient norm before clipping and the learning rate used.

        Without a signal the gradient is exactly zero: the optimizer is left alone, since its momentum would move the
        weights, and only the schedule advances. Errors: FloatingPointError for a gradient that is not finite.
        """
        norm = self.gradient_norm()
        if not self.is_finite_everywhere(norm):
            raise FloatingPointError(f"the gradient norm is {norm}")
        learning_rate = self.optimizer.optimizers[0].param_groups[0]["lr"]
        if has_signal:
            self.before_update()
            self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return norm, float(learning_rate)

    def gradient_norm(self) -> float:
        """Of all ranks' gradients, which are then clipped to ``training.max_norm``."""
        norm = dist_utils.clip_grad_norm_(
            [parameter for part in self.model_parts for parameter in part.parameters()],
            self.titan.training.max_norm,
            foreach=True,
            pp_mesh=self.parallel_dims.get_optional_mesh("pp"),
            ep_enabled=self.parallel_dims.ep_enabled,
        )
        return float(norm)

    def is_finite_everywhere(self, value: float) -> bool:
        """Whether it is on all ranks: the same answer on each."""
        bad = torch.tensor([0.0 if math.isfinite(value) else 1.0], device=self.device)
        if dist.get_world_size() > 1:
            dist.all_reduce(bad)
        return not bad.item()

    def loss_of(self, row: Row, statistics: torch.Tensor) -> float:
        """The loss that a row has at these log-probabilities and entropies [2, S], or values [1, S]."""
        columns = self.policy.columns(row)
        statistics = statistics[0] if self.algorithm.head == "value" else statistics
        loss, _ = self.algorithm.loss(loss_inputs(self.algorithm, statistics, columns, columns["offsets_N"]))
        return float(loss)

    def train(self, rows: list[Row], has_signal: bool) -> StepMetrics | BadNumbers:
        """One optimizer step on this rank's rows; every rank gets the same metrics.

        If the loss or the gradient is not finite, weights, moments and schedule stay as they were, on all ranks.
        """
        start = time.perf_counter()
        totals = self.reduce(self.forward_backward(rows))
        middle = time.perf_counter()
        try:
            if not math.isfinite(totals["loss"]):
                raise FloatingPointError(f"the loss is {totals['loss']}")
            norm, learning_rate = self.optimizer_step(has_signal)
        except FloatingPointError as error:
            self.optimizer.zero_grad()
            return find_culprits(self, rows, str(error))
        return replace(
            step_metrics(totals),
            grad_norm=norm,
            learning_rate=learning_rate,
            seconds_forward_backward=middle - start,
            seconds_optimizer=time.perf_counter() - middle,
        )

    def reduce(self, totals: dict[str, torch.Tensor]) -> dict[str, float]:
        """Over all ranks, each row once; the maximum travels apart from the sums."""
        names = [name for name in totals if name != "agreement_max"]
        sums, largest = torch.stack([totals[name] for name in names]), totals["agreement_max"].reshape(1)
        if self._tp_rank:  # it knows the rows of rank 0 of its group
            sums.zero_()
        if dist.get_world_size() > 1:
            dist.all_reduce(sums)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return dict(zip(names, sums.tolist(), strict=True)) | {"agreement_max": float(largest)}

    def sft(self, batches: list[list[Row]], lr: float) -> list[float]:
        """Supervised steps with an optimizer and a schedule of their own; gives back the loss of each.

        Errors: FloatingPointError that names step and samples, if a loss or gradient is not finite.
        """
        losses = []
        with self._instead(SFT(), *build_sft_optimizer(self.model_parts, lr, len(batches))):
            for rows in batches:
                metrics = self.train(rows, True)
                if isinstance(metrics, BadNumbers):
                    raise FloatingPointError(f"SFT step {len(losses) + 1}: {metrics}")
                losses.append(metrics.loss)
        return losses

    @contextmanager
    def _instead(self, algorithm: Algorithm, optimizer, scheduler) -> Iterator[None]:
        """Train by these for a while."""
        kept = self.algorithm, self.optimizer, self.scheduler
        self.algorithm, self.optimizer, self.scheduler = algorithm, optimizer, scheduler
        try:
            yield
        finally:
            self.algorithm, self.optimizer, self.scheduler = kept

    def shards(self) -> list[Shard]:
        """The boxes of Hugging Face tensors that this rank holds; they stay current."""
        return self.policy.shards()

    def save_hf(self, out: str | Path) -> None:
        self.policy.save(out)

"""What a trainer rank does to its model: TorchTitan builds and shards it; this drives its steps.

``forward_backward`` and ``optimizer_step`` are separate, so that gradients of several rows, and later of several
meshes, can add up between them. What is minimized is in objective.py, by what in optimizer.py; nothing here knows of
actors.

Dimensions: T tokens of a row, S trained tokens of a row.
"""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

import titan_rl.models.device as device  # isort: skip  (before any other torchtitan module)

from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils

from titan_rl.algorithms.base import Algorithm
from titan_rl.algorithms.registry import make_algorithm
from titan_rl.algorithms.sft import SFT
from titan_rl.config.schema import Config
from titan_rl.data.packing import fit_rows
from titan_rl.data.types import BadNumbers, Row, StepMetrics
from titan_rl.models.attention import plan_attention
from titan_rl.models.families import make_family
from titan_rl.models.hf_weights import load_hf, save_hf
from titan_rl.models.shards import Shard, local_shards
from titan_rl.models.spec import model_spec
from titan_rl.trainer.bad_numbers import find_culprits
from titan_rl.trainer.objective import add_sums, expected_gradient, loss_and_sums, row_loss, step_metrics, zero_totals
from titan_rl.trainer.optimizer import build_optimizer, build_sft_optimizer
from titan_rl.trainer.parallel import parallel_model
from titan_rl.trainer.titan_config import TitanConfig

_COLUMNS = ("tokens_T", "positions_T", "source_S", "target_S", "logprob_S", "advantage_S", "weight_S")


class Learner:
    """One rank's part of the model, its algorithm, optimizer and schedule. The process group must be up."""

    def __init__(self, config: Config, titan: TitanConfig, model_path: str | Path):
        self.config, self.titan, self.model_path = config, titan, Path(model_path)
        self.device = device.local_device(dist.get_rank())
        dist_utils.set_spmd_backend(titan.parallelism.spmd_backend)
        self.parallel_dims = ParallelDims.from_config(titan.parallelism, dist.get_world_size())
        self.spec = model_spec(model_path, make_family(config.model.family, config.run.plugin_path))
        self.model_parts, self.pipeline = parallel_model(self.spec, titan, self.parallel_dims, self.device)
        self.dtypes = load_hf(self.shards(), model_path)
        self.algorithm = make_algorithm(config.algorithm, config.run.plugin_path)
        num_updates = titan.training.steps * config.algorithm.updates_per_batch
        self.optimizer, self.scheduler = build_optimizer(titan, self.model_parts, num_updates)
        self.before_update: Callable[[], None] = lambda: None
        """Called before parameters change: somebody may still be copying them."""
        self.statistics: dict[int, torch.Tensor] = {}
        """Log-probabilities and entropies [2, S] of each row of the last pass, where this rank saw them."""
        self.implementation = config.model.kernel
        if self.implementation == "auto":
            self.implementation = "triton" if self.device.type == "cuda" else "reference"
        self.algorithm.implementation = self.implementation
        self._spmd_context = dist_utils.get_spmd_context(parallel_dims=self.parallel_dims, spmd_typechecking=False)
        tp_mesh = self.parallel_dims.get_optional_mesh("tp")
        self._tp_rank = tp_mesh.get_local_rank() if tp_mesh else 0

    def _columns(self, row: Row) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(getattr(row, name)).to(self.device) for name in _COLUMNS}

    def _keywords(self, row: Row, columns: dict[str, torch.Tensor]) -> dict:
        """What the model's forward takes besides the tokens."""
        return {
            "positions": columns["positions_T"][None],
            "attention_masks": plan_attention(row.segments, len(row.tokens_T), self.device),
            "logit_index_S": columns["source_S"],
            "target_S": columns["target_S"],
            "temperature": self.config.rollout.temperature,
            "implementation": self.implementation,
            "expected_grad": expected_gradient(self.algorithm, columns),
        }

    def _loss(self, statistics_2S: torch.Tensor, index: int, columns: dict[str, torch.Tensor], totals) -> torch.Tensor:
        """A row's loss, of its log-probabilities and entropies; its sums are added to ``totals``."""
        logprob_S, entropy_S = statistics_2S
        self.statistics[index] = statistics_2S.detach()
        loss, sums = loss_and_sums(self.algorithm, logprob_S, entropy_S.detach(), columns)
        add_sums(totals, sums)
        return loss

    def forward_backward(self, rows: list[Row]) -> dict[str, torch.Tensor]:
        """Add the rows' gradients up; gives back sums over their trained tokens (``agreement_max``: a maximum).

        With a pipeline, the sums are zero but on the last stage.
        """
        parallelism = self.titan.parallelism
        rows = fit_rows(
            rows,
            token_multiple=parallelism.tensor_parallel_degree,
            row_multiple=self.titan.row_multiple,
            same_length=self.pipeline is not None,
        )
        totals = zero_totals(self.algorithm, self.device)
        self.statistics.clear()
        columns = [self._columns(row) for row in rows]
        keywords = (self._keywords(row, c) for row, c in zip(rows, columns, strict=True))
        with self._spmd_context():
            if self.pipeline is None:
                for index, (c, keyword) in enumerate(zip(columns, keywords, strict=True)):
                    statistics_2S = self.model_parts[0](c["tokens_T"][None], **keyword)
                    self._loss(statistics_2S, index, c, totals).backward()
            else:
                split = parallelism.tensor_parallel_degree if parallelism.enable_sequence_parallel else 1
                self.pipeline.forward_backward(
                    [c["tokens_T"][None] for c in columns],
                    list(keywords),
                    (1, len(rows[0].tokens_T) // split, self.spec.model.dim),
                    lambda statistics_2S, index: self._loss(statistics_2S, index, columns[index], totals),
                )
        return totals

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

    def loss_of(self, row: Row, statistics_2S: torch.Tensor) -> float:
        """The loss that a row has at these log-probabilities and entropies."""
        loss, _ = row_loss(self.algorithm, *statistics_2S, self._columns(row))
        return float(loss)

    def train(self, rows: list[Row], has_signal: bool) -> StepMetrics | BadNumbers:
        """One optimizer step on this rank's rows; every rank gets the same metrics.

        If the loss or the gradient is not finite, weights, moments and schedule stay as they were, on all ranks.
        """
        start = time.perf_counter()
        totals = self._reduce(self.forward_backward(rows))
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

    def _reduce(self, totals: dict[str, torch.Tensor]) -> dict[str, float]:
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
        return local_shards(self.spec, self.model_parts)

    def save_hf(self, out: str | Path) -> None:
        save_hf(self.shards(), self.model_path, Path(out), self.dtypes, self.device)

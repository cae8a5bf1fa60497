"""What a trainer rank does to its model: TorchTitan builds and shards it; this drives its steps.

``forward_backward`` and ``optimizer_step`` are separate, so that gradients of several rows, and later of several
meshes, can add up between them. Nothing here knows of actors.

Dimensions: T tokens of a row, S trained tokens of a row, V words of the vocabulary.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

import titan_rl.model.device as device  # isort: skip  (before any other torchtitan module)

from torch.distributed.fsdp import FSDPModule
from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils

from titan_rl.algorithms import ALGORITHMS
from titan_rl.config import AlgorithmConfig, Config
from titan_rl.losses import LossInputs
from titan_rl.model.attention import plan_attention
from titan_rl.model.spec import apply_parallelism, model_spec
from titan_rl.model.weights import load_hf, named_hf_parameters, save_hf
from titan_rl.titan_config import TitanConfig, adamw
from titan_rl.types import Row, StepMetrics


@dataclass(frozen=True)
class TokenStatistics:
    logprob_S: torch.Tensor
    entropy_S: torch.Tensor


def token_statistics(logits_SV: torch.Tensor, target_S: torch.Tensor, temperature: float) -> TokenStatistics:
    """Log-probability of each target, in fp32 with its gradient, and the entropy of its distribution, without."""
    logprobs_SV = torch.log_softmax(logits_SV.float() / temperature, dim=-1)
    with torch.no_grad():
        entropy_S = -(logprobs_SV.exp() * logprobs_SV).sum(-1)
    return TokenStatistics(logprobs_SV.gather(1, target_S[:, None])[:, 0], entropy_S)


def agreement_sums(
    logprob_S: torch.Tensor, sampling_logprob_S: torch.Tensor, counted_S: torch.Tensor
) -> dict[str, torch.Tensor]:
    """How far trainer and sampler differ, summed over the counted tokens; ``agreement_max`` is a maximum."""
    difference_S = torch.where(counted_S, logprob_S.detach() - sampling_logprob_S, 0.0)
    ratio_S = difference_S.abs().exp()
    return {
        "agreement_mean": (ratio_S * counted_S).sum(),
        "agreement_max": ratio_S.max(),
        "kl_k3": (difference_S.exp() - 1 - difference_S).sum(),
    }


class Learner:
    """One rank's model, optimizer and schedule. The process group must be up."""

    def __init__(self, config: Config, titan: TitanConfig, model_path: str | Path):
        self.config, self.titan, self.model_path = config, titan, Path(model_path)
        self.device = device.local_device(dist.get_rank())
        dist_utils.set_spmd_backend(titan.parallelism.spmd_backend)
        self.parallel_dims = ParallelDims.from_config(titan.parallelism, dist.get_world_size())
        self.spec = model_spec(model_path)
        self.model = self._build_model()
        self.dtypes = load_hf(self.spec, self.model, model_path)
        self.optimizer, self.scheduler = self._build_optimizer(titan.optimizer)
        self._spmd_context = dist_utils.get_spmd_context(parallel_dims=self.parallel_dims, spmd_typechecking=False)

    def _build_model(self) -> torch.nn.Module:
        titan = self.titan
        apply_parallelism(self.spec, titan.parallelism, titan.training)
        with torch.device("meta"):
            model = self.spec.model.build()
        model = self.spec.parallelize_fn(
            model,
            parallel_dims=self.parallel_dims,
            training=titan.training,
            parallelism=titan.parallelism,
            compile_config=titan.compile,
            ac_config=titan.activation_checkpoint,
            dump_folder=".",
        )
        for module in model.modules():
            if isinstance(module, FSDPModule) and self.device.type == "cpu":
                module.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
        model.to_empty(device=self.device)
        with torch.no_grad():
            model.init_states(buffer_device=None)
        return model.train()

    def _build_optimizer(self, config):
        optimizer = config.build(model_parts=[self.model])
        schedule: LRSchedulersContainer = self.titan.lr_scheduler.build(
            optimizers=optimizer, training_steps=self.titan.training.steps * self.config.algorithm.updates_per_batch
        )
        return optimizer, schedule

    def _forward(self, row: Row) -> tuple[TokenStatistics, dict[str, torch.Tensor]]:
        """Statistics of the row's trained tokens, and its columns as tensors."""
        columns = {
            name: torch.from_numpy(getattr(row, name)).to(self.device)
            for name in ("tokens_T", "positions_T", "source_S", "target_S", "logprob_S", "advantage_S", "weight_S")
        }
        plan = plan_attention(row.segments, len(row.tokens_T), self.device)
        logits_SV = self.model(
            columns["tokens_T"][None],
            positions=columns["positions_T"][None],
            attention_masks=plan,
            logit_index_S=columns["source_S"],
        )
        return token_statistics(logits_SV, columns["target_S"], self.config.rollout.temperature), columns

    def forward_backward(self, rows: list[Row], settings: AlgorithmConfig) -> dict[str, torch.Tensor]:
        """Add the rows' gradients up; gives back sums over their trained tokens (``agreement_max``: a maximum)."""
        loss_function = ALGORITHMS[settings.name].loss
        totals: dict[str, torch.Tensor] = {}
        for row in rows:
            with self._spmd_context():
                statistics, columns = self._forward(row)
                inputs = LossInputs(
                    statistics.logprob_S, columns["logprob_S"], columns["advantage_S"], columns["weight_S"]
                )
                loss, sums = loss_function(inputs, settings)
                loss.backward()
            counted_S = columns["weight_S"] > 0
            sums |= agreement_sums(statistics.logprob_S, columns["logprob_S"], counted_S)
            sums |= {
                "loss": loss.detach(),
                "entropy": (statistics.entropy_S * counted_S).sum(),
                "count": counted_S.sum(),
            }
            for name, value in sums.items():
                value = value.double()
                if name not in totals:
                    totals[name] = value
                elif name == "agreement_max":
                    totals[name] = torch.maximum(totals[name], value)
                else:
                    totals[name] = totals[name] + value
        return totals

    def optimizer_step(self, has_signal: bool) -> tuple[float, float]:
        """Clip, step, clear; the gradient norm before clipping and the learning rate used.

        Without a signal the gradient is exactly zero: the optimizer is left alone, lest its momentum move the
        weights, and only the schedule advances. Errors: FloatingPointError for a gradient that is not finite.
        """
        norm = dist_utils.clip_grad_norm_(list(self.model.parameters()), self.titan.training.max_norm, foreach=True)
        if not torch.isfinite(norm):
            raise FloatingPointError(f"the gradient norm is {float(norm)}: the weights were left as they were")
        learning_rate = self.optimizer.optimizers[0].param_groups[0]["lr"]
        if has_signal:
            self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        return float(norm), float(learning_rate)

    def train(self, rows: list[Row], has_signal: bool, settings: AlgorithmConfig) -> StepMetrics:
        """One optimizer step on this rank's rows; every rank gets the same metrics."""
        start = time.perf_counter()
        totals = self._reduce(self.forward_backward(rows, settings))
        middle = time.perf_counter()
        norm, learning_rate = self.optimizer_step(has_signal)
        count = max(int(totals["count"]), 1)
        return StepMetrics(
            loss=totals["loss"],
            grad_norm=norm,
            entropy=totals["entropy"] / count,
            clip_fraction=totals.get("clipped", 0.0) / count,
            agreement_mean=totals["agreement_mean"] / count,
            agreement_max=totals["agreement_max"],
            kl_k3=totals["kl_k3"] / count,
            num_trained_tokens=int(totals["count"]),
            learning_rate=learning_rate,
            seconds_forward_backward=middle - start,
            seconds_optimizer=time.perf_counter() - middle,
        )

    def _reduce(self, totals: dict[str, torch.Tensor]) -> dict[str, float]:
        """Over ranks; the maximum travels apart from the sums."""
        names = sorted(name for name in totals if name != "agreement_max")
        sums, largest = torch.stack([totals[name] for name in names]), totals["agreement_max"].reshape(1)
        if dist.get_world_size() > 1:
            dist.all_reduce(sums)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return dict(zip(names, sums.tolist(), strict=True)) | {"agreement_max": float(largest)}

    def warm_up(self, batches: list[list[Row]], lr: float) -> list[float]:
        """Supervised steps with an optimizer of their own, linearly decayed; gives back the loss of each."""
        kept = self.optimizer, self.scheduler
        settings = AlgorithmConfig(name="supervised")
        self.optimizer = adamw(lr=lr).build(model_parts=[self.model])
        self.scheduler = LRSchedulersContainer.Config(warmup_steps=min(10, len(batches))).build(
            optimizers=self.optimizer, training_steps=len(batches)
        )
        losses = [self.train(rows, True, settings).loss for rows in batches]
        self.optimizer, self.scheduler = kept
        return losses

    def named_hf_parameters(self) -> dict[str, torch.Tensor]:
        return named_hf_parameters(self.spec, self.model)

    def save_hf(self, out: str | Path) -> None:
        save_hf(self.spec, self.model, self.model_path, Path(out), self.dtypes)

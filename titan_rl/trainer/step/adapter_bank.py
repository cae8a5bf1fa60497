"""LoRA adapters of several clients on one base model, of which one is in the model at a time.

    activate ─▶ forward_backward (gradients add up) ─▶ step ─▶ save / restore
                                                          └──▶ save_weights, load_weights (PEFT)

An adapter has weights, gradients and an optimizer of its own; the base model is there once. Passes and steps of one
client are thus those of a process of its own, to the bit. All ranks call each method together, in the same order.
"""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from titan_rl.algorithms.token_losses import make_token_loss
from titan_rl.config.model_directory.safetensors_files import read_header
from titan_rl.data.storage.files import replacing
from titan_rl.data.types import Row
from titan_rl.mesh.members.adapter_endpoints import AdamSettings, PassResult
from titan_rl.models.weights.hf_weights import gather_whole, slices
from titan_rl.models.weights.peft_files import WEIGHTS, load_adapter
from titan_rl.models.weights.shards import Shard
from titan_rl.trainer.distributed.ranks import clipped_gradient_norm, is_finite_everywhere, reduced
from titan_rl.trainer.objective.objective import add_sums, loss_and_sums, zero_totals
from titan_rl.trainer.objective.preparation import completed
from titan_rl.trainer.step.learner import Learner

_VALUES, _MOMENTS, _STEPS = "values", ("exp_avg", "exp_avg_sq"), "steps"
_BASE = "base"


@dataclass
class _Client:
    """Adapter of a client while another one is in the model."""

    optimizer: torch.optim.AdamW
    values: list[torch.Tensor] = field(default_factory=list)
    gradients: list[torch.Tensor | None] = field(default_factory=list)
    num_steps: int = 0


class AdapterBank:
    """Owner of the clients' adapters on one rank."""

    def __init__(self, learner: Learner):
        """``learner``: with ``[lora]``; its own optimizer stays unused."""
        assert learner.policy.adapters is not None, "[lora] is on"
        self._learner, self._adapters = learner, learner.policy.adapters
        self._parameters = [p for part in learner.model_parts for p in part.parameters() if p.requires_grad]
        self._clients: dict[str, _Client] = {}
        self._active: str | None = None

    # clients

    def create(self, name: str, seed: int) -> None:
        """Create a client's adapter: B zero, A drawn by the seed."""
        self._leave()
        self._adapters.begin(seed)
        self._enter(name)

    def forget(self, name: str) -> None:
        """Forget a client's adapter."""
        if self._active == name:
            self._leave()
        self._clients.pop(name, None)

    def _enter(self, name: str) -> None:
        """The model's values are the client's from now on, which is new."""
        self._clients[name] = _Client(torch.optim.AdamW(self._parameters, lr=0.0))
        self._active = name

    @torch.no_grad()
    def _leave(self) -> None:
        """Whoever is in the model takes its values and gradients along."""
        self._learner.before_update()
        if self._active is not None:
            client = self._clients[self._active]
            client.values = [parameter.detach().clone() for parameter in self._parameters]
            client.gradients = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        self._active = None

    @torch.no_grad()
    def activate(self, name: str) -> None:
        """Bring a client's adapter into the model."""
        if self._active == name:
            return
        client = self._clients[name]
        self._leave()
        for parameter, values, gradient in zip(self._parameters, client.values, client.gradients, strict=True):
            parameter.copy_(values)
            parameter.grad = gradient
        client.values, client.gradients = [], []
        self._active = name
        self._adapters.refresh()

    # training

    def forward_backward(
        self, name: str, rows: list[Row], loss: str, settings: Mapping[str, float], *, backward: bool
    ) -> PassResult:
        """Pass over rows; with ``backward`` gradients add up until the next step.

        Errors: FloatingPointError for a loss that is not finite, which leaves no gradients."""
        self.activate(name)
        with self._loss(loss, settings):
            totals = self._learner.forward_backward(rows) if backward else self._forward(rows)
            sums = reduced(totals, is_counted=self._learner.is_counted)
        if not math.isfinite(sums["loss"]):
            self._clear_gradients()
            raise FloatingPointError(f"the loss is {sums['loss']}: all gradients since the last step are dropped")
        learner = self._learner
        [group] = learner.share(range(learner.titan.batch_degree))
        return PassResult(sums["loss"], group, learner.logprobs())

    @contextmanager
    def _loss(self, name: str, settings: Mapping[str, float]) -> Iterator[None]:
        """The learner computes this loss inside the context."""
        learner = self._learner
        before, learner.algorithm = learner.algorithm, make_token_loss(name, settings)
        learner.algorithm.implementation = before.implementation
        try:
            yield
        finally:
            learner.algorithm = before

    @torch.no_grad()
    def _forward(self, rows: list[Row]) -> dict[str, torch.Tensor]:
        learner = self._learner
        rows = completed(learner.policy.fit(rows), learner.zero_columns)
        totals = zero_totals(learner.algorithm, learner.zero_columns(1), learner.device)
        learner.statistics.clear()
        for index, (row, statistics) in enumerate(zip(rows, learner.policy.measure(rows), strict=True)):
            if statistics is not None:
                learner.statistics[index] = statistics
                _, sums = loss_and_sums(learner.algorithm, statistics, learner.policy.columns(row))
                add_sums(totals, sums)
        return totals

    def step(self, name: str, settings: AdamSettings) -> float:
        """AdamW step with all gradients since the last one; their norm before clipping.

        Errors: FloatingPointError for a norm that is not finite, which leaves weights and moments as they were."""
        self.activate(name)
        learner, client = self._learner, self._clients[name]
        norm = clipped_gradient_norm(learner.model_parts, settings.max_norm or math.inf, learner.parallel_dims)
        if not is_finite_everywhere(norm, learner.device):
            self._clear_gradients()
            raise FloatingPointError(f"the gradient norm is {norm}: weights stay as they were")
        learner.before_update()
        for group in client.optimizer.param_groups:
            group |= dict(lr=settings.lr, betas=settings.betas, eps=settings.eps, weight_decay=settings.weight_decay)
        client.optimizer.step()
        client.num_steps += 1
        self._clear_gradients()
        learner.weights_changed()
        return norm

    def _clear_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    # files

    def save_weights(self, name: str, folder: Path) -> None:
        """Write a client's adapter in PEFT's format."""
        self.activate(name)
        self._adapters.save(self._learner.model_path, folder)

    def load_weights(self, name: str, folder: Path) -> None:
        """Replace a client's weights by those of a PEFT directory; a client that is new begins with them.

        Errors: ValueError for NaN or infinities."""
        read_header(folder / WEIGHTS)  # a directory may be anybody's
        self._open(name)
        load_adapter(self._adapters.shards, folder, self._adapters.form)
        self._adapters.refresh()

    def _open(self, name: str) -> None:
        """Bring a client's adapter into the model, whose values are replaced next."""
        if name in self._clients:
            self.activate(name)
            self._learner.before_update()
        else:
            self._leave()
            self._enter(name)

    @torch.no_grad()
    def save(self, name: str, file: Path) -> None:
        """Write weights, moments and the number of steps of a client; gradients are not part of it."""
        self.activate(name)
        self._learner.before_update()  # moments are gathered in the weights' place
        client, values = self._clients[name], [parameter.detach().clone() for parameter in self._parameters]
        tensors = self._whole(_VALUES)
        for moment in _MOMENTS:
            states = [client.optimizer.state.get(parameter, {}) for parameter in self._parameters]
            for parameter, state in zip(self._parameters, states, strict=True):
                parameter.copy_(state[moment]) if state else parameter.zero_()
            tensors |= self._whole(moment)
        for parameter, value in zip(self._parameters, values, strict=True):
            parameter.copy_(value)
        if not dist.get_rank():
            lora = self._adapters.lora
            about = {_BASE: self._adapters.base, _STEPS: client.num_steps, "rank": lora.rank, "alpha": lora.alpha}
            with replacing(file) as beside:
                save_file(tensors, beside, {"adapter": json.dumps(about)})

    def _whole(self, kind: str) -> dict[str, torch.Tensor]:
        """What the model's adapters hold, on rank 0."""
        shards, device = self._adapters.shards, self._learner.device
        dtypes = {shard.name: torch.float32 for shard in shards}
        everything = gather_whole(shards, dtypes, device)
        return {f"{kind}.{name}": tensor.contiguous() for name, tensor in everything if tensor is not None}

    @torch.no_grad()
    def restore(self, name: str, file: Path, *, with_optimizer: bool = True) -> None:
        """Load what ``save`` wrote. ``with_optimizer``: else moments and steps begin anew.

        Errors: ValueError for another model's file, or NaN or infinities."""
        read_header(file)  # a directory may be anybody's
        self._leave()
        with safe_open(file, "pt") as tensors:
            about = json.loads((tensors.metadata() or {}).get("adapter", "{}"))
            self._check(about, file)
            moments = {}
            for kind in (*_MOMENTS, _VALUES) if with_optimizer else (_VALUES,):  # the values stay
                for shard in self._adapters.shards:
                    _fill(shard, tensors.get_slice(f"{kind}.{shard.name}")[slices(shard.start, shard.tensor.shape)])
                moments[kind] = [parameter.detach().clone() for parameter in self._parameters]
        self._enter(name)
        client = self._clients[name]
        if with_optimizer and (steps := int(about[_STEPS])):
            client.num_steps = steps
            for place, parameter in enumerate(self._parameters):
                state = {moment: moments[moment][place] for moment in _MOMENTS}
                client.optimizer.state[parameter] = {"step": torch.tensor(float(steps)), **state}
        self._adapters.refresh()

    def _check(self, about: Mapping[str, object], file: Path) -> None:
        lora = self._adapters.lora
        if about.get(_BASE) != self._adapters.base:
            raise ValueError(f"{file.name} is of another base model")
        for key, expected in (("rank", lora.rank), ("alpha", lora.alpha)):
            if about.get(key) != expected:
                raise ValueError(f"{file.name} has {key} {about.get(key)}, and lora.{key} = {expected} here")


def _fill(shard: Shard, values: torch.Tensor) -> None:
    if not values.isfinite().all():
        raise ValueError(f"{shard.name} holds NaN or infinities")
    shard.tensor.copy_(values)

"""Model on one rank, without FSDP.

FSDP would gather each layer's weights from itself, in three copies, and reduce each row's gradients over itself, in
three more. Its parameters stay what is trained, saved and published. Beside them stands a second model of the same
shape without FSDP, whose parameters are the same memory in fp32, or copies in the dtype that is computed in, made for
each pass over some rows and given back behind it. Gradients are rounded and added up in fp32 as FSDP's are, to the bit.

Where a CPU multiplies bf16 as fp32 (models/layers/cpu_products.py), the weights of products are rounded to bf16 and
widened once a pass, and not for each product; their gradients, which are made in fp32, are then added up without being
rounded."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule

import titan_rl.models.device  # noqa: F401  isort: skip  (before any other torchtitan module)

from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.compile import apply_compile
from torchtitan.models.common import Embedding
from torchtitan.protocols.model_spec import ModelSpec

from titan_rl.compat.torch.tensors import own_buffers, own_parameters
from titan_rl.compat.torchtitan.adapters import adapter_scaling, set_adapter_scaling
from titan_rl.kernels.linear_logprob import Workspace, multiplies_wide
from titan_rl.models.families.qwen2_5_vl import recompute_tower
from titan_rl.models.layers.cpu_products import LeanLinear
from titan_rl.models.layers.decoder import Float32Head
from titan_rl.models.weights.lora import adapted_modules, skip_adapter_init
from titan_rl.trainer.model.gradient_sum import Copies, GradientSum, local
from titan_rl.trainer.titan_config import TitanConfig

_PART = 2**18
"""Of a weight, in elements."""


def can_be_unsharded(titan: TitanConfig, device_type: str) -> bool:
    """Whether a rank can compute without FSDP: it is the only one, and may hold copies of the whole model.

    Those of another dtype than the trained one are a choice on a CPU ("never") and the default on a GPU.
    """
    copies = titan.training.mixed_precision_param != "float32"
    gathers = titan.parallelism.fsdp_reshard_after_forward
    keeps = gathers == "never" or (device_type != "cpu" and gathers == "default")
    return titan.world_size == 1 and (keeps or not copies)


class UnshardedModel:
    """Unsharded twin of a model, with the same parameters."""

    def __init__(self, spec: ModelSpec, titan: TitanConfig, dims: ParallelDims, trained: nn.Module):
        """``trained``: the sharded model of ``spec``, whose parameters and buffers it is given for each pass."""
        self.dtype = TORCH_DTYPE_MAP[titan.training.mixed_precision_param]
        with torch.device("meta"):
            self.model = spec.model.build()
        skip_adapter_init(self.model)
        if titan.activation_checkpoint is not None:
            titan.activation_checkpoint.build(dump_folder=".").apply(self.model)
            recompute_tower(self.model)
        if titan.compile.enable and "model" in titan.compile.components:
            apply_compile(self.model, compile_config=titan.compile, parallel_dims=dims)
        self.model.train()
        self._pairs = list(zip(self.model.modules(), trained.modules(), strict=True))
        self._adapted = list(zip(adapted_modules([self.model]), adapted_modules([trained]), strict=True))
        on_cpu = next(trained.parameters()).device.type == "cpu"
        self._is_wide = on_cpu and self.dtype == torch.bfloat16 and multiplies_wide()
        self._narrow = {weight for mine, sharded in self._pairs for weight in _multiplied_otherwise(mine, sharded)}
        self._workspace = Workspace()
        self._gradients: GradientSum | None = None
        """Of the pass at hand, if it makes any."""
        # a GPU makes the whole table's gradient faster than it tells the host which words there are
        if on_cpu and (words := self.model.tok_embeddings) is not None and type(words) is Embedding:
            words.forward = self._look_up

    @contextmanager
    def computing(self) -> Iterator[nn.Module]:
        """Model with the current parameters inside the context, at whose end their gradients are complete."""
        copies = self._lend()
        try:
            with self._collecting(copies) if torch.is_grad_enabled() else nullcontext():
                yield self.model
        finally:
            for module, _ in self._pairs:
                for name in (table := own_parameters(module)):
                    table[name] = None

    @contextmanager
    def _collecting(self, copies: Copies) -> Iterator[None]:
        """Gradients of what is computed inside are in the trained parameters at the end."""
        self._gradients = GradientSum(copies)
        try:
            with self._workspace:  # a weight's gradient is added up as soon as it is there
                yield
            self._gradients.finish()
        finally:
            self._gradients.close()
            self._gradients = None

    def _look_up(self, input: torch.Tensor) -> torch.Tensor:
        """Forward of the embedding, in the dtype that is computed in, since it may share a wide head."""
        weight_VD = own_parameters(self.model.tok_embeddings)["weight"]
        assert weight_VD is not None, "it is lent for a pass"
        if self._gradients is not None and torch.is_grad_enabled() and weight_VD.requires_grad:
            return self._gradients.look_up(input, weight_VD).to(self.dtype)
        return F.embedding(input, weight_VD).to(self.dtype)

    def _lend(self) -> Copies:
        for _, sharded in self._pairs:
            if isinstance(sharded, FSDPModule):
                sharded.reshard()  # whoever called it itself, as an example's sampler does, left its gathered weights
        copies: Copies = {}
        for mine, sharded in self._pairs:
            table = own_parameters(mine)
            for name, trained in own_parameters(sharded).items():
                if trained is not None and trained not in copies:
                    copies[trained] = self._copy(trained, self._is_wide and trained not in self._narrow)
                table[name] = None if trained is None else copies.get(trained)
            own_buffers(mine).update(own_buffers(sharded))
        for mine, sharded in self._adapted:
            set_adapter_scaling(mine, adapter_scaling(sharded))  # zero, while adapters are off
        return copies

    def _copy(self, trained: nn.Parameter, is_wide: bool) -> nn.Parameter:
        memory = local(trained.detach())
        values = _rounded_in_fp32(memory, self.dtype) if is_wide else memory.to(self.dtype)
        return nn.Parameter(values, requires_grad=trained.requires_grad)


def _rounded_in_fp32(memory: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """To ``dtype`` and back, a part at a time, which stays in a core's cache meanwhile."""
    out = torch.empty_like(memory, dtype=torch.float32)
    for wide, exact in zip(out.view(-1).split(_PART), memory.reshape(-1).split(_PART), strict=True):
        wide.copy_(exact.to(dtype))
    return out


def _multiplied_otherwise(mine: nn.Module, sharded: nn.Module) -> list[nn.Parameter]:
    """Parameters of a module (``sharded``) that must have the compute dtype."""
    if isinstance(mine, (LeanLinear, Float32Head)) or type(mine) is Embedding:
        bias = own_parameters(sharded).get("bias")
        return [] if bias is None else [bias]
    return [parameter for parameter in own_parameters(sharded).values() if parameter is not None]

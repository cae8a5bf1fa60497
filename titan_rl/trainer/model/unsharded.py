"""Model on one CPU rank, without FSDP.

FSDP would gather each layer's weights from itself, in three copies, and reduce each row's gradients over itself, in
three more. Its parameters stay what is trained, saved and published. Beside them stands a second model of the same
shape without FSDP, whose parameters are the same memory in fp32, or copies in the dtype that is computed in, made for
each pass over some rows and given back behind it. Gradients are rounded and added up in fp32 as FSDP's are, to the bit.

Where a CPU multiplies bf16 as fp32 (models/layers/cpu_products.py), the weights of products are rounded to bf16 and
widened once a pass, and not for each product; their gradients, which are made in fp32, are then added up without being
rounded."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

import titan_rl.models.device  # noqa: F401  isort: skip  (before any other torchtitan module)

from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.models.common import Embedding
from torchtitan.protocols.model_spec import ModelSpec

from titan_rl.compat.torch.sharding import local_memory
from titan_rl.compat.torch.tensors import own_buffers, own_parameters
from titan_rl.compat.torchtitan.adapters import adapter_scaling, set_adapter_scaling
from titan_rl.kernels.linear_logprob import kept_workspace, multiplies_wide
from titan_rl.models.layers.cpu_products import LeanLinear
from titan_rl.models.layers.decoder import Float32Head
from titan_rl.models.weights.lora import adapted_modules, skip_adapter_init
from titan_rl.trainer.titan_config import TitanConfig

_PART = 2**18
"""Of a weight, in elements."""


def can_be_unsharded(titan: TitanConfig, dims: ParallelDims, device: torch.device) -> bool:
    """Whether a rank can compute without FSDP: one CPU rank, and no copies of the whole model unless configured."""
    copies = titan.training.mixed_precision_param != "float32"
    keeps = not copies or titan.parallelism.fsdp_reshard_after_forward == "never"
    return device.type == "cpu" and dims.world_size == 1 and keeps


class UnshardedModel:
    """Unsharded twin of a model, with the same parameters."""

    def __init__(self, spec: ModelSpec, titan: TitanConfig, trained: nn.Module):
        """``trained``: the sharded model of ``spec``, whose parameters and buffers it is given for each pass."""
        self.dtype = TORCH_DTYPE_MAP[titan.training.mixed_precision_param]
        with torch.device("meta"):
            self.model = spec.model.build()
        skip_adapter_init(self.model)
        if titan.activation_checkpoint is not None:
            titan.activation_checkpoint.build(dump_folder=".").apply(self.model)
        self.model.train()
        self._pairs = list(zip(self.model.modules(), trained.modules(), strict=True))
        self._adapted = list(zip(adapted_modules([self.model]), adapted_modules([trained]), strict=True))
        self._is_wide = self.dtype == torch.bfloat16 and multiplies_wide()
        self._narrow = {weight for mine, sharded in self._pairs for weight in _multiplied_otherwise(mine, sharded)}
        if (words := self.model.tok_embeddings) is not None and type(words) is Embedding:
            words.register_forward_hook(lambda module, inputs, out: out.to(self.dtype))  # if it shares a wide head

    @contextmanager
    def computing(self) -> Iterator[nn.Module]:
        """Model with the current parameters inside the context.

        Gradients of a backward pass are in the trained parameters at its end."""
        self._lend()
        try:
            with kept_workspace():  # a weight's gradient is added up as soon as it is there
                yield self.model
        finally:
            for module, _ in self._pairs:
                for name in (table := own_parameters(module)):
                    table[name] = None

    def _lend(self) -> None:
        for _, sharded in self._pairs:
            if isinstance(sharded, FSDPModule):
                sharded.reshard()  # whoever called it itself, as an example's sampler does, left its gathered weights
        copies: dict[nn.Parameter, nn.Parameter] = {}
        for mine, sharded in self._pairs:
            table = own_parameters(mine)
            for name, trained in own_parameters(sharded).items():
                if trained is not None and trained not in copies:
                    copies[trained] = self._copy(trained, self._is_wide and trained not in self._narrow)
                table[name] = None if trained is None else copies.get(trained)
            own_buffers(mine).update(own_buffers(sharded))
        for mine, sharded in self._adapted:
            set_adapter_scaling(mine, adapter_scaling(sharded))  # zero, while adapters are off
        if torch.is_grad_enabled():
            _collect_gradients(copies)

    def _copy(self, trained: nn.Parameter, is_wide: bool) -> nn.Parameter:
        memory = _local(trained.detach())
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


def _collect_gradients(copies: dict[nn.Parameter, nn.Parameter]) -> None:
    """Have the gradients of copies added up in their trained parameters.

    Their memory is one block, from before the forward: made one by one in the backward, they would come to lie between
    activations, and what is free between them fits the next row's badly."""
    learning = [trained for trained, copy in copies.items() if copy.requires_grad]
    missing = [trained for trained in learning if trained.grad is None]
    sizes = [_local(trained).numel() for trained in missing]
    block = torch.empty(sum(sizes), dtype=_local(missing[0]).dtype) if missing else torch.empty(0)
    memory = {
        trained: part.view(_local(trained).shape) for trained, part in zip(missing, block.split(sizes), strict=True)
    }
    for trained in learning:
        copies[trained].register_post_accumulate_grad_hook(
            partial(_add_gradient, trained=trained, memory=memory.get(trained))
        )


def _add_gradient(copy: nn.Parameter, trained: nn.Parameter, memory: torch.Tensor | None) -> None:
    """``memory``: for the first gradient, where there is none yet."""
    assert copy.grad is not None  # this is called once it was added up
    if trained.grad is None:
        assert memory is not None
        trained.grad = _as_trained(memory.copy_(copy.grad), trained)
    else:
        _local(trained.grad).add_(copy.grad)
    copy.grad = None


def _as_trained(gradient: torch.Tensor, trained: nn.Parameter) -> torch.Tensor:
    if not isinstance(trained, DTensor):
        return gradient
    return DTensor.from_local(
        gradient,
        trained.device_mesh,
        trained.placements,
        run_check=False,
        shape=trained.shape,
        stride=trained.stride(),
    )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return local_memory(tensor) if isinstance(tensor, DTensor) else tensor

"""Tensors and modules of torch, below their public forms. Imports nothing of torch that ``import torch`` does not."""

import ctypes
from collections.abc import MutableMapping
from typing import Any

import torch

from titan_rl.compat.reach import TORCH, Reach

REACHES = (
    Reach("torch.nn:Module._parameters", "lend parameters to a module, without a module's hooks"),
    Reach("torch.nn:Module._buffers", "lend buffers to a module, without a module's hooks"),
    Reach("torch.nn:Module._non_persistent_buffers_set", "put a layer's own buffers aside, as vLLM does"),
    Reach("torch:UntypedStorage._cdata", "tell storages apart that have no address"),
    Reach("torch:ops.aten.copy_.default._schema", "know whether an operator changes its arguments"),
    Reach("torch.utils._python_dispatch:TorchDispatchMode", "record a loader's copies"),
    Reach("torch:_foreach_copy_", "copy many tensors at once"),
    Reach("torch:ops.aten._softmax_backward_data", "go back through a softmax in one pass"),
    Reach("torch._C:__file__", "call the OpenMP library that torch brings"),
)
TORCH.require(REACHES)

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode"]
Parameters = MutableMapping[str, torch.nn.Parameter | None]


def own_parameters(module: torch.nn.Module) -> Parameters:
    """A module's table of its own parameters, to read and write: no hook of the module runs."""
    return module._parameters


def own_buffers(module: torch.nn.Module) -> MutableMapping[str, torch.Tensor | None]:
    """A module's table of its own buffers, to read and write: no hook of the module runs."""
    return module._buffers


def non_persistent_buffers(module: torch.nn.Module) -> set[str]:
    """Names of a module's own buffers that its state dict leaves out."""
    return set(module._non_persistent_buffers_set)


def storage_identity(tensor: torch.Tensor) -> int:
    """A number that tensors share if they share memory; those on meta, too, which have no address."""
    return tensor.untyped_storage()._cdata


def changes_arguments(operator: Any) -> bool:
    """Whether an overload of an operator writes into what it is given."""
    return operator._schema.is_mutable


def copy_each(places: list[torch.Tensor], sources: list[torch.Tensor], *, non_blocking: bool = False) -> None:
    """``place.copy_(source)`` of each pair, in few calls."""
    torch._foreach_copy_(places, sources, non_blocking=non_blocking)  # pyright: ignore[reportPrivateImportUsage]


def softmax_gradient(grad: torch.Tensor, probability: torch.Tensor) -> torch.Tensor:
    """The gradient of the scores of ``probability = softmax(scores, -1)``, all in fp32."""
    return torch.ops.aten._softmax_backward_data(grad, probability, -1, torch.float32)


def openmp_library() -> ctypes.CDLL:
    """The OpenMP runtime that torch brings, by a library that was linked against it."""
    return ctypes.CDLL(torch._C.__file__)

"""Relations of ranks, and values that all agree on: gradient norms, sums, finiteness."""

import math
from collections.abc import Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

import titan_rl.models.device as device  # noqa: F401  isort: skip  (before any other torchtitan module)

from torchtitan.config import ParallelismConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed import utils as dist_utils

from titan_rl.models.context_parallel import ContextParallel

T = TypeVar("T")


class _Dims(ParallelDims):
    """Device meshes, with attention of our own for rows spread over ranks (models/context_parallel.py)."""

    @property
    def cp_enabled(self) -> bool:
        """Whether TorchTitan is to replace each layer's attention by torch's context parallelism."""
        return False


def parallel_dims(parallelism: ParallelismConfig) -> ParallelDims:
    """Device meshes of a layout; the world size must match it."""
    dist_utils.set_spmd_backend(parallelism.spmd_backend)
    return _Dims.from_config(parallelism, dist.get_world_size())


def context_parallel(dims: ParallelDims) -> ContextParallel | None:
    """Ranks that share this rank's rows, each with a part of the tokens; None if it has them whole."""
    mesh = dims.get_optional_mesh("cp")
    return None if mesh is None else ContextParallel(mesh.get_group())


def is_first_of_rows(dims: ParallelDims) -> bool:
    """Whether this rank is the first of those that share its rows: tensor and context parallel ones."""
    meshes = [dims.get_optional_mesh(name) for name in ("cp", "tp")]
    return all(mesh is None or mesh.get_local_rank() == 0 for mesh in meshes)


def clipped_gradient_norm(model_parts: Iterable[nn.Module], max_norm: float, parallel_dims: ParallelDims) -> float:
    """Norm of all ranks' gradients; clips them to ``max_norm``."""
    norm = dist_utils.clip_grad_norm_(
        [parameter for part in model_parts for parameter in part.parameters()],
        max_norm,
        foreach=True,
        pp_mesh=parallel_dims.get_optional_mesh("pp"),
        ep_enabled=parallel_dims.ep_enabled,
    )
    return float(norm)


def is_finite_everywhere(value: float, on: torch.device) -> bool:
    """Whether a value is finite on all ranks; the same answer on each."""
    bad = torch.tensor([0.0 if math.isfinite(value) else 1.0], device=on)
    if dist.get_world_size() > 1:
        dist.all_reduce(bad)
    return not bad.item()


def is_alone() -> bool:
    """Whether the world has one rank."""
    return not dist.is_initialized() or dist.get_world_size() == 1


def rank() -> int:
    """Global rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def anywhere(flags: list[bool], on: torch.device) -> list[bool]:
    """Logical or of each flag over all ranks, which pass lists of one length."""
    if is_alone():
        return flags
    reduced_flags = torch.tensor(flags, dtype=torch.int32, device=on)
    dist.all_reduce(reduced_flags, op=dist.ReduceOp.MAX)
    return [bool(flag) for flag in reduced_flags.tolist()]


def gathered(value: T) -> list[T]:
    """Values of all ranks, in rank order; anything that pickles."""
    if is_alone():
        return [value]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def sum_over_ranks(totals: dict[str, torch.Tensor], *, is_counted: bool) -> dict[str, float]:
    """Sums over ranks. ``is_counted``: true on one rank of each set that shares its rows."""
    sums = torch.stack(list(totals.values()))
    if not is_counted:
        sums.zero_()
    if dist.get_world_size() > 1:
        dist.all_reduce(sums)
    return dict(zip(totals, sums.tolist(), strict=True))


def reduced(totals: dict[str, torch.Tensor], *, is_counted: bool) -> dict[str, float]:
    """Sums over ranks as in ``sum_over_ranks``, and the maximum ``agreement_max``."""
    largest = totals.pop("agreement_max").reshape(1)
    sums = sum_over_ranks(totals, is_counted=is_counted)
    if dist.get_world_size() > 1:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return sums | {"agreement_max": float(largest)}

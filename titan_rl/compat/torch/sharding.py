"""Where DTensor and functional collectives keep a rank's own values."""

import torch
from torch.distributed.tensor import DTensor

from titan_rl.compat.reach import TORCH, Reach

REACHES = (
    Reach("torch.distributed.tensor:DTensor._local_tensor", "move a rank's values to other memory"),
    Reach("torch.distributed.tensor.placement_types:_StridedShard", "know a dimension that is split twice"),
    Reach(
        "torch.distributed._functional_collectives:AsyncCollectiveTensor",
        "wait for a gathered sequence inside autograd",
    ),
    Reach(
        "torch.distributed._functional_collectives:all_to_all_single_autograd",
        "exchange tokens for heads inside autograd",
    ),
)
TORCH.require(REACHES)

from torch.distributed._functional_collectives import AsyncCollectiveTensor, all_to_all_single_autograd
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

__all__ = ["AsyncCollectiveTensor", "StridedShard", "all_to_all_single_autograd"]


def local_memory(tensor: DTensor) -> torch.Tensor:
    """A rank's values themselves, which are no view and outside of autograd."""
    return tensor._local_tensor


def set_local_memory(tensor: DTensor, memory: torch.Tensor) -> None:
    """Have a rank's values lie here from now on; ``memory`` has their shape and dtype."""
    tensor._local_tensor = memory

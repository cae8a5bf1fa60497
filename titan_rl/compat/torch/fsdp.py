"""FSDP2's records of the parameters that it gathers. Names are looked up at the first call."""

from functools import cache
from typing import Protocol, cast

import torch
from torch.distributed.fsdp import FSDPModule

from titan_rl.compat.reach import TORCH, Reach

_FSDP = "torch.distributed.fsdp._fully_shard"
REACHES = (
    Reach("torch.distributed.fsdp:FSDPModule._get_fsdp_state", "find FSDP's record of a parameter"),
    Reach(f"{_FSDP}._fsdp_state:FSDPState._fsdp_param_groups", "find FSDP's record of a parameter"),
    Reach(f"{_FSDP}._fsdp_param_group:FSDPParamGroup.fsdp_params", "find FSDP's record of a parameter"),
    Reach(f"{_FSDP}._fsdp_param:FSDPParam.sharded_param", "tell whose record it is"),
    Reach(f"{_FSDP}._fsdp_param:FSDPParam._sharded_param_data", "move a parameter with FSDP's padding"),
)


class ShardedParameter(Protocol):
    """FSDP2's record of one parameter."""

    sharded_param: torch.nn.Parameter
    _sharded_param_data: torch.Tensor


@cache
def _look_up() -> None:
    TORCH.require(REACHES)


def sharded_parameters(module: FSDPModule) -> list[ShardedParameter]:
    """FSDP2's records of the parameters that it gathers for this module. Errors: DependencyChanged."""
    _look_up()
    groups = module._get_fsdp_state()._fsdp_param_groups
    return [cast(ShardedParameter, one) for group in groups for one in group.fsdp_params]


def padded_memory(record: ShardedParameter) -> torch.Tensor:
    """A rank's values of a parameter with FSDP's padding, flat: what it gathers from."""
    return record._sharded_param_data


def set_padded_memory(record: ShardedParameter, memory: torch.Tensor) -> None:
    """Have FSDP gather from here from now on; ``memory`` has the shape and dtype of ``padded_memory``."""
    record._sharded_param_data = memory

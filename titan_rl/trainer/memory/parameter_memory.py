"""Memory of a rank's weights, moments and gradients under DTensor and FSDP2, and its relocation."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import nan
from typing import TYPE_CHECKING

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from titan_rl.compat.torch.fsdp import ShardedParameter, padded_memory, set_padded_memory, sharded_parameters
from titan_rl.compat.torch.sharding import local_memory, set_local_memory

if TYPE_CHECKING:  # it brings TorchTitan along
    from titan_rl.trainer.rank_interface import TrainerRank

_MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's."""


@dataclass(frozen=True)
class TrainedTensor(ABC):
    """Parameter of a rank, or a moment or gradient of one."""

    optimizer: torch.optim.Optimizer
    parameter: torch.nn.Parameter

    @property
    @abstractmethod
    def memory(self) -> torch.Tensor:
        """This rank's values."""

    @abstractmethod
    def move(self, memory: torch.Tensor) -> None:
        """Move the values into ``memory``, which has their shape and dtype."""


@dataclass(frozen=True)
class _Weight(TrainedTensor):
    sharded: ShardedParameter | None
    """FSDP2's own record of the parameter, which keeps its memory with its padding; None where there is none."""

    @property
    def memory(self) -> torch.Tensor:
        return padded_memory(self.sharded) if self.sharded is not None else _local(self.parameter.detach())

    def move(self, memory: torch.Tensor) -> None:
        before = self.memory
        memory.copy_(before)
        if self.sharded is not None:
            assert isinstance(self.parameter, DTensor)
            local = local_memory(self.parameter)
            begin = memory.storage_offset() + local.storage_offset() - before.storage_offset()
            set_local_memory(self.parameter, memory.as_strided(local.shape, local.stride(), begin))
            set_padded_memory(self.sharded, memory)
        elif isinstance(self.parameter, DTensor):
            set_local_memory(self.parameter, memory)
        else:
            self.parameter.data = memory
        before.fill_(nan)  # whoever kept a view of it is found out at once


@dataclass(frozen=True)
class _Moment(TrainedTensor):
    name: str

    @property
    def memory(self) -> torch.Tensor:
        # asked for each time: loading a checkpoint replaces it
        return _local(self.optimizer.state[self.parameter][self.name])

    def move(self, memory: torch.Tensor) -> None:
        state = self.optimizer.state[self.parameter]
        memory.copy_(self.memory)
        if isinstance(state[self.name], DTensor):
            set_local_memory(state[self.name], memory)
        else:
            state[self.name] = memory


@dataclass(frozen=True)
class _Gradient(TrainedTensor):
    """Gradient that an update is yet to come for."""

    @property
    def memory(self) -> torch.Tensor:
        return _local(self._tensor)

    def move(self, memory: torch.Tensor) -> None:
        memory.copy_(self.memory)
        if isinstance(self._tensor, DTensor):
            set_local_memory(self._tensor, memory)
        else:
            self._tensor.data = memory

    @property
    def _tensor(self) -> torch.Tensor:
        assert self.parameter.grad is not None
        return self.parameter.grad


def is_moment(tensor: TrainedTensor) -> bool:
    return isinstance(tensor, _Moment)


def trained_tensors(learner: "TrainerRank") -> list[TrainedTensor]:
    """Parameters and moments of a rank, in an order that does not depend on the process."""
    sharded = {
        id(parameter_record.sharded_param): parameter_record for parameter_record in _sharded_parameters(learner)
    }
    return [
        tensor
        for optimizer in learner.optimizers()
        for group in optimizer.param_groups
        for parameter in group["params"]
        for tensor in (
            _Weight(optimizer, parameter, sharded.get(id(parameter))),
            *(_Moment(optimizer, parameter, name) for name in _MOMENTS),
        )
    ]


def gradients_of(learner: "TrainerRank") -> list[TrainedTensor]:
    """Gradients with values on this rank, between backward and update."""
    return [
        _Gradient(optimizer, parameter)
        for optimizer in learner.optimizers()
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None and _local(parameter.grad).nbytes
    ]


def _sharded_parameters(learner: "TrainerRank") -> list[ShardedParameter]:
    return [
        parameter
        for model in learner.learning().values()
        for part in model.model_parts
        for module in part.modules()
        if isinstance(module, FSDPModule)
        for parameter in sharded_parameters(module)
    ]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

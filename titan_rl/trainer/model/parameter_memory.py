"""Where the weights and moments of a rank lie, under DTensor and FSDP2, and how they come to lie elsewhere."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import nan
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:  # it brings TorchTitan along
    from titan_rl.trainer.rank_interface import Side

_MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's."""


@dataclass(frozen=True)
class Held(ABC):
    """One tensor of what a rank trains: a parameter, or a moment of one."""

    optimizer: torch.optim.Optimizer
    parameter: torch.nn.Parameter

    @property
    @abstractmethod
    def memory(self) -> torch.Tensor:
        """This rank's values."""

    @abstractmethod
    def move(self, memory: torch.Tensor) -> None:
        """They lie here from now on; ``memory`` has their shape and dtype."""


@dataclass(frozen=True)
class _Weight(Held):
    sharded: Any
    """FSDP2's own record of the parameter, which keeps its memory with its padding; None where there is none."""

    @property
    def memory(self) -> torch.Tensor:
        return self.sharded._sharded_param_data if self.sharded is not None else _local(self.parameter.detach())  # noqa: SLF001  (FSDP's, whose memory moves)

    def move(self, memory: torch.Tensor) -> None:
        before = self.memory
        memory.copy_(before)
        if self.sharded is not None:
            assert isinstance(self.parameter, DTensor)
            local = self.parameter._local_tensor  # noqa: SLF001  (DTensor's own memory, no copy of it)
            begin = memory.storage_offset() + local.storage_offset() - before.storage_offset()
            self.parameter._local_tensor = memory.as_strided(local.shape, local.stride(), begin)  # noqa: SLF001  (DTensor's own memory, no copy of it)
            self.sharded._sharded_param_data = memory  # noqa: SLF001  (FSDP's, whose memory moves)
        elif isinstance(self.parameter, DTensor):
            self.parameter._local_tensor = memory  # noqa: SLF001  (DTensor's own memory, no copy of it)
        else:
            self.parameter.data = memory
        before.fill_(nan)  # whoever kept a view of it is found out at once


@dataclass(frozen=True)
class _Moment(Held):
    name: str

    @property
    def memory(self) -> torch.Tensor:
        # asked for each time: loading a checkpoint replaces it
        return _local(self.optimizer.state[self.parameter][self.name])

    def move(self, memory: torch.Tensor) -> None:
        state = self.optimizer.state[self.parameter]
        memory.copy_(self.memory)
        if isinstance(state[self.name], DTensor):
            state[self.name]._local_tensor = memory  # noqa: SLF001  (DTensor's own memory, no copy of it)
        else:
            state[self.name] = memory


def is_moment(held: Held) -> bool:
    return isinstance(held, _Moment)


def held_by(learner: "Side") -> list[Held]:
    """All that an update changes, in an order that all processes of a rank agree on."""
    sharded = {id(one.sharded_param): one for one in _sharded_parameters(learner)}
    return [
        held
        for optimizer in learner.optimizers()
        for group in optimizer.param_groups
        for parameter in group["params"]
        for held in (
            _Weight(optimizer, parameter, sharded.get(id(parameter))),
            *(_Moment(optimizer, parameter, name) for name in _MOMENTS),
        )
    ]


def _sharded_parameters(learner: "Side") -> list[Any]:
    return [
        one
        for model in learner.learning().values()
        for part in model.model_parts
        for module in part.modules()
        if isinstance(module, FSDPModule)
        for group in module._get_fsdp_state()._fsdp_param_groups  # noqa: SLF001  (FSDP's record of its parameters)
        for one in group.fsdp_params
    ]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

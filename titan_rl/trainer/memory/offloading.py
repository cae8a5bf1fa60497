"""Offloading of a rank's moments and gradients to the host while generators have its device.

Weights stay, since they are what is sent. On a CPU, device and host are the same memory, and what is trained already
lies where snapshots are kept: only what is free is given back.
"""

from typing import TYPE_CHECKING

import torch

from titan_rl.mesh.resources.released_memory import give_back
from titan_rl.trainer.memory.parameter_memory import TrainedTensor, gradients_of, is_moment, trained_tensors

if TYPE_CHECKING:  # it brings TorchTitan along
    from titan_rl.trainer.rank_interface import TrainerRank


def offload(learner: "TrainerRank") -> list[TrainedTensor]:
    """Move moments and gradients to the host; returns them for ``onload``. No copy of the state may be under way."""
    moved = [] if learner.device.type == "cpu" else moments_of(learner) + gradients_of(learner)
    for tensor in moved:
        move(tensor, torch.device("cpu"))
    give_back()
    return moved


def onload(learner: "TrainerRank", moved: list[TrainedTensor]) -> None:
    """Move what was offloaded back to the device."""
    for tensor in moved:
        move(tensor, learner.device)


def moments_of(learner: "TrainerRank") -> list[TrainedTensor]:
    """Moments with values on this rank."""
    return [tensor for tensor in trained_tensors(learner) if is_moment(tensor) and tensor.memory.nbytes]


def move(tensor: TrainedTensor, device: torch.device) -> None:
    """Move a tensor to a device; pinned if it comes from a GPU."""
    before = tensor.memory
    tensor.move(torch.empty_like(before, device=device, pin_memory=before.device.type == "cuda"))

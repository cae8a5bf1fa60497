"""A rank's memory while generators have its device: moments lie on the host, gradients and activations nowhere.

Weights stay, since they are what is sent. On a CPU, device and host are the same memory, and what is trained already
lies where snapshots are kept: only what is free is given back.
"""

from typing import TYPE_CHECKING

import torch

from titan_rl.mesh.resources.released_memory import give_back
from titan_rl.trainer.model.parameter_memory import Held, held_by, is_moment

if TYPE_CHECKING:  # it brings TorchTitan along
    from titan_rl.trainer.rank_interface import Side


def offload(learner: "Side") -> list[Held]:
    """What was moved to the host, for ``onload``. Nobody may be copying the state."""
    moved = [] if learner.device.type == "cpu" else moments_of(learner)
    for held in moved:
        move(held, torch.device("cpu"))
    give_back()
    return moved


def onload(learner: "Side", moved: list[Held]) -> None:
    for held in moved:
        move(held, learner.device)


def moments_of(learner: "Side") -> list[Held]:
    """Those that have any values on this rank."""
    return [held for held in held_by(learner) if is_moment(held) and held.memory.nbytes]


def move(held: Held, device: torch.device) -> None:
    """Pinned where it comes from a GPU."""
    before = held.memory
    held.move(torch.empty_like(before, device=device, pin_memory=before.device.type == "cuda"))

"""Device of this process. Import this before any other torchtitan module: it sets TorchTitan's."""

import torch

import titan_rl.kernels.first_calls  # noqa: F401  (before any thread beside this one calls them)
from titan_rl.compat.torchtitan.device import DEVICE_TYPE

_taken: list[int] = []
"""The GPU that this process was given, as it is numbered on its host."""


def take_device(index: int | None) -> None:
    """Set this process's GPU (chosen by mesh/resources/devices.py); None: CPU."""
    _taken[:] = [] if index is None else [index]


def local_device(rank: int) -> torch.device:
    """Device of this process: the assigned one, or by rank outside a run."""
    if DEVICE_TYPE == "cpu":
        return torch.device("cpu")
    return torch.device(DEVICE_TYPE, _taken[0] if _taken else rank % torch.accelerator.device_count())

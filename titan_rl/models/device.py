"""Import this before any other torchtitan module: it sets TorchTitan's device.

TorchTitan 0.3 falls back to "cuda" if it finds no accelerator; on a CPU the device must be set.
"""

import torch
import torchtitan.tools.utils as titan_utils

import titan_rl.kernels.first_calls  # noqa: F401  (before any thread beside this one calls them)

if not torch.accelerator.is_available():
    titan_utils.device_type, titan_utils.device_module = "cpu", torch.cpu

DEVICE_TYPE: str = titan_utils.device_type


_taken: list[int] = []
"""The GPU that this process was given, as it is numbered on its host."""


def take_device(index: int | None) -> None:
    """From now on this process works on that GPU (mesh/resources/devices.py says which); None: on a CPU."""
    _taken[:] = [] if index is None else [index]


def local_device(rank: int) -> torch.device:
    """The device that this process works on: the one that it was given, or else by its rank, where there is no run."""
    if DEVICE_TYPE == "cpu":
        return torch.device("cpu")
    return torch.device(DEVICE_TYPE, _taken[0] if _taken else rank % torch.accelerator.device_count())

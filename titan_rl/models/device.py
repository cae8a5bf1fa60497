"""Import this before any other torchtitan module: it sets TorchTitan's device.

TorchTitan 0.3 falls back to "cuda" if it finds no accelerator; on a CPU the device must be set.
"""

import torch
import torchtitan.tools.utils as titan_utils

if not torch.accelerator.is_available():
    titan_utils.device_type, titan_utils.device_module = "cpu", torch.cpu

DEVICE_TYPE: str = titan_utils.device_type


def local_device(rank: int) -> torch.device:
    """The device that a trainer rank works on. Ranks fill one host after another."""
    if DEVICE_TYPE == "cpu":
        return torch.device("cpu")
    return torch.device(DEVICE_TYPE, rank % torch.accelerator.device_count())

"""Import this before any other torchtitan module: it tells TorchTitan which device there is.

TorchTitan 0.3 falls back to "cuda" where it finds no accelerator; on a CPU it must be told.
"""

import torch
import torchtitan.tools.utils as titan_utils

if not torch.accelerator.is_available():
    titan_utils.device_type, titan_utils.device_module = "cpu", torch.cpu

DEVICE_TYPE: str = titan_utils.device_type


def local_device(local_rank: int) -> torch.device:
    """The device that rank ``local_rank`` of this host trains on."""
    return torch.device(DEVICE_TYPE) if DEVICE_TYPE == "cpu" else torch.device(DEVICE_TYPE, local_rank)

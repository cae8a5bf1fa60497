"""TorchTitan's device: 0.3 falls back to "cuda" if it finds no accelerator.

Its other modules read the device as they are imported, so this must come before all of them.
"""

import torch
import torchtitan.tools.utils as titan_utils

from titan_rl.compat.reach import TORCHTITAN, Reach

REACHES = (
    Reach("torchtitan.tools.utils:device_type", "have TorchTitan compute on a CPU"),
    Reach("torchtitan.tools.utils:device_module", "have TorchTitan compute on a CPU"),
)
TORCHTITAN.require(REACHES)

if not torch.accelerator.is_available():
    titan_utils.device_type, titan_utils.device_module = "cpu", torch.cpu

DEVICE_TYPE: str = titan_utils.device_type
"""``cpu``, or what torch calls the accelerator."""

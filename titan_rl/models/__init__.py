"""Models. TorchTitan must know the device before any other part of it is imported, so device.py comes first."""

import titan_rl.models.device  # noqa: F401

"""TorchTitan must know which device there is before anything of it is imported, so that comes first (device.py)."""

import titan_rl.models.device  # noqa: F401

"""Models. TorchTitan must know the device before any other part of it is imported, so device.py comes first.

Then lazy_compile.py, before whatever else is imported of TorchTitan's models."""

import titan_rl.models.device  # noqa: F401

import titan_rl.models.lazy_compile  # noqa: F401  # isort: skip

"""Reinforcement-learning post-training of language models on a mesh of actors."""

import importlib
import os
from typing import Any

__version__ = "0.1.0"
_DOORS = ("launch", "connect")
"""Of titan_rl/controller/interactive/launch.py, which is read when one is asked for: nothing here may import torch."""

# Monarch reads this once, when it is imported, and has no setting for it: how soon its supervision notices a fault.
os.environ.setdefault("HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY", "500ms")


def __getattr__(name: str) -> Any:
    if name in _DOORS:
        return getattr(importlib.import_module("titan_rl.controller.interactive.launch"), name)
    raise AttributeError(f"module 'titan_rl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_DOORS])

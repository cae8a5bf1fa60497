"""Reinforcement-learning post-training of language models on a mesh of actors."""

import importlib
import os
from typing import Any

from titan_rl.compat.torchao import leave_out_import_warnings

__version__ = "0.1.0"
_LAUNCH = "titan_rl.controller.interactive.launch"
_DOORS = {"launch": _LAUNCH, "connect": _LAUNCH, "ConfigError": "titan_rl.config.load"}
"""By the module that each is in, which is read when it is asked for: nothing here may import torch."""

# Monarch reads this once, when it is imported, and has no setting for it: how soon its supervision notices a fault.
os.environ.setdefault("HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY", "500ms")
leave_out_import_warnings()


def __getattr__(name: str) -> Any:
    if name in _DOORS:
        return getattr(importlib.import_module(_DOORS[name]), name)
    raise AttributeError(f"module 'titan_rl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_DOORS])

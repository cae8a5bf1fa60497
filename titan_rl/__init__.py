"""Reinforcement-learning post-training of language models on a mesh of actors."""

import importlib
import logging
import os
from typing import Any

__version__ = "0.1.0"
_LAUNCH = "titan_rl.controller.interactive.launch"
_DOORS = {"launch": _LAUNCH, "connect": _LAUNCH, "ConfigError": "titan_rl.config.load"}
"""By the module that each is in, which is read when it is asked for: nothing here may import torch."""

# Monarch reads this once, when it is imported, and has no setting for it: how soon its supervision notices a fault.
os.environ.setdefault("HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY", "500ms")

# Whether there is a GPU is asked of the management library, as vLLM does: torch's own way would initialize CUDA,
# which a forked process cannot use then, and would take memory of the GPU in every command.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

# transformers imports torchao wherever it is installed, which warns of each of its kernels that this build of torch
# cannot load, and torch of two of its types: eight lines for each command on a CPU.
_LEFT_OUT = {"torchao": ("Failed to load ",), "torch.utils._pytree": ("KernelPreference", "ScaleCalculationMode")}
for _name, _parts in _LEFT_OUT.items():
    logging.getLogger(_name).addFilter(lambda record, parts=_parts: not any(p in record.getMessage() for p in parts))


def __getattr__(name: str) -> Any:
    if name in _DOORS:
        return getattr(importlib.import_module(_DOORS[name]), name)
    raise AttributeError(f"module 'titan_rl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_DOORS])

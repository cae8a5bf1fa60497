"""torch's CUDA allocator: segments that grow, and fixed ones, which other processes can map.

Rows of ever new lengths leave holes in fixed segments, in which no activation fits; a segment that grows is one range
of addresses, whose pages come and go. CUDA IPC maps such a segment by other means, which are slow, or forbidden in a
container.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from titan_rl.compat.reach import TORCH, Reach

REACHES = (
    Reach("torch._C:_accelerator_getAllocatorSettings", "keep a user's other settings of CUDA's allocator"),
    Reach("torch._C:_accelerator_setAllocatorSettings", "let segments of CUDA's memory grow, or not"),
)
TORCH.require(REACHES)
_KEY = "expandable_segments"


def expand_segments() -> None:
    """Take CUDA memory in segments that grow, from now on, unless the user has said otherwise (PYTORCH_ALLOC_CONF)."""
    if _KEY not in (settings := _settings()):
        _set(settings, "True")


@contextmanager
def fixed_segments() -> Iterator[None]:
    """CUDA memory that is taken meanwhile, by any thread, lies in segments that CUDA IPC maps."""
    settings = _settings()
    if f"{_KEY}:True" not in settings.replace(" ", ""):
        yield
        return
    others = ",".join(each for each in settings.split(",") if _KEY not in each)
    _set(others, "False")
    try:
        yield
    finally:
        _set(others, "True")


def _settings() -> str:
    return torch._C._accelerator_getAllocatorSettings()


def _set(others: str, value: str) -> None:
    """What is left out becomes torch's default, so ``others`` is said again."""
    torch._C._accelerator_setAllocatorSettings(",".join(filter(None, (others, f"{_KEY}:{value}"))))

"""Pinned host memory, registered with CUDA once for the life of its owner.

Copies into other memory go through the driver's own, and hold up who asked for them.
"""

import weakref
from typing import Any

import torch
from torch.cuda._pin_memory_utils import pin_memory, unpin_memory


def pin(memory: torch.Tensor, owner: Any) -> bool:
    """Whether these bytes, which nobody else has registered, are so from now on until ``owner`` is gone. It must go
    before they do. Where CUDA refuses, as under a limit on locked memory, copies are right but slower."""
    try:
        pin_memory(memory.data_ptr(), memory.nbytes)
    except RuntimeError as error:
        print(f"{memory.nbytes / 2**30:.1f} GiB of host memory could not be pinned, copies will be slower: {error}")
        return False
    weakref.finalize(owner, unpin_memory, memory.data_ptr()).atexit = False  # CUDA may be gone by then
    return True

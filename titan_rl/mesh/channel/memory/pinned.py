"""Pinned host memory, registered with CUDA once for the life of its owner.

Copies into other memory go through the driver's own, and hold up who asked for them.
"""

import weakref
from typing import Any

import torch

_PORTABLE = 1
"""``cudaHostRegisterPortable``: for all of CUDA's contexts."""


def _cuda() -> Any:
    """CUDA's runtime, as torch publishes it."""
    return torch.cuda.cudart()


def pin_memory(address: int, num_bytes: int) -> None:
    """Register host memory with CUDA. Errors: RuntimeError."""
    if error := int(_cuda().cudaHostRegister(address, num_bytes, _PORTABLE)):
        raise RuntimeError(f"cudaHostRegister failed with error {error}")


def unpin_memory(address: int) -> None:
    """Undo ``pin_memory``. Errors: RuntimeError."""
    if error := int(_cuda().cudaHostUnregister(address)):
        raise RuntimeError(f"cudaHostUnregister failed with error {error}")


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

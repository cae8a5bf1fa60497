"""Free memory that a process's allocator keeps, and its release.

A CPU's trainer keeps what it frees (mesh/resources/cores.py): giving it back and faulting it in again would cost a
quarter of a step. But rows of ever new lengths scatter what is free, so that a step of SmolLM2 took some 100 MiB more
than the one before, without an end (measured on an Intel Xeon with AMX).
"""

import ctypes
import gc
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from titan_rl.mesh.resources.released_memory import give_back

_MOST_GROWTH = 2**30
"""Bytes, from one time that all is given back to the next: at 100 MiB a step, that is done in one step of ten."""
_M_MMAP_THRESHOLD, _M_MMAP_MAX = -3, -4
_LARGE = 2**20
"""Bytes."""
_MOST_MAPPINGS = 2**16


@contextmanager
def large_blocks_mapped() -> Iterator[None]:
    """Blocks of 1 MiB and more are allocated outside of the heap while a model is built on a CPU, and in it afterwards.

    Weights and moments leave for shared memory then, and would leave holes in which no activation fits.
    """
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, _LARGE)
    libc.mallopt(_M_MMAP_MAX, _MOST_MAPPINGS)
    try:
        yield
    finally:
        libc.mallopt(_M_MMAP_MAX, 0)


class CpuAllocator:
    """Bound on the process's free memory; ``end_step`` follows each step."""

    def __init__(self) -> None:
        self._before: int | None = None
        """Private bytes after the first step since the last release."""

    def end_step(self) -> None:
        private_bytes = _private_bytes()
        if self._before is None:
            self._before = private_bytes
        elif private_bytes > self._before + _MOST_GROWTH:
            give_back()
            self._before = None


def release() -> None:
    """Collect unreferenced objects (models have reference cycles), and empty the GPU's cache."""
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def _private_bytes() -> int:
    """That this process holds for itself; snapshots are shared with who keeps them."""
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - shared) * mmap.PAGESIZE

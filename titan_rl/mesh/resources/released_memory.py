"""Memory that a process does not need: given back to the machine, or not taken before it is written to."""

import ctypes
import mmap
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_MADV_DONTNEED, _MADV_REMOVE = 4, 9
_LEAST_BYTES = 1 << 24
_libc = ctypes.CDLL(None, use_errno=True)


def give_back() -> None:
    """All pages of this process that are free, although its allocator would keep them."""
    _libc.malloc_trim(0)
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def drop_contents(storage: torch.UntypedStorage) -> None:
    """Of a CPU tensor that this process has to itself: its pages are given back, and read as zeros from now on.

    The first and the last page may be others' in part, and stay as they are. Errors: OSError.
    """
    _advise(storage.data_ptr(), storage.nbytes(), _MADV_DONTNEED)


def drop_shared_contents(memory: torch.Tensor) -> None:
    """The same of a part of a shared mapping, for all who have mapped it. Errors: OSError."""
    _advise(memory.data_ptr(), memory.nbytes, _MADV_REMOVE)


class ZerosOnDemand(TorchFunctionMode):
    """Meanwhile what this thread gets from ``torch.zeros`` on a CPU takes memory as it is written to.

    From 16 MiB on, it is a mapping of its own, which the kernel fills page by page.
    """

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.zeros or kwargs.keys() - {"size", "dtype", "device"}:
            return func(*args, **kwargs)
        wanted = torch.empty(*args, **(kwargs | {"device": "meta"}))
        nbytes = wanted.numel() * wanted.itemsize
        given = kwargs.get("device")  # also 0, an accelerator's number
        device = torch.get_default_device() if given is None else torch.device(given)
        if device.type != "cpu" or nbytes < _LEAST_BYTES:
            return func(*args, **kwargs)
        pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return torch.frombuffer(pages, dtype=wanted.dtype).view(wanted.shape)


def _advise(address: int, nbytes: int, advice: int) -> None:
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > begin and _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice):
        raise OSError(ctypes.get_errno(), "madvise")

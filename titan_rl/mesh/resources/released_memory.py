"""Memory that a process needs no more, given back to the machine."""

import ctypes
import mmap

import torch

_MADV_DONTNEED, _MADV_REMOVE = 4, 9
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


def _advise(address: int, nbytes: int, advice: int) -> None:
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > begin and _libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), advice):
        raise OSError(ctypes.get_errno(), "madvise")

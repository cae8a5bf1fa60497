"""Memory that a process needs no more, given back to the machine."""

import ctypes
import mmap

import torch

_MADV_DONTNEED = 4
_libc = ctypes.CDLL(None, use_errno=True)


def give_back() -> None:
    """All pages of this process that are free, although its allocator would keep them."""
    _libc.malloc_trim(0)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def drop_contents(storage: torch.UntypedStorage) -> None:
    """Of a CPU tensor that this process has to itself: its pages are given back, and read as zeros from now on.

    The first and the last page may be others' in part, and stay as they are. Errors: OSError.
    """
    begin = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
    address, length = ctypes.c_void_p(begin), ctypes.c_size_t(end - begin)
    if end > begin and _libc.madvise(address, length, _MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), "madvise")

"""What a loaded library calls of libc, replaced for that library alone: its table of functions, which is data."""

import ctypes
import mmap
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)
_WORD_BYTES = ctypes.sizeof(ctypes.c_void_p)
_READ, _READ_WRITE = 1, 3
"""Of ``mprotect``."""


def address_of(function: Any) -> int:
    """Of a function of a library, or of one that libraries can call."""
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


def entries_of(library: str, function: int) -> list[int]:
    """Where a loaded library keeps the address of a function."""
    pattern = re.compile(re.escape(function.to_bytes(_WORD_BYTES, sys.byteorder)), re.DOTALL)
    library, entries = os.path.realpath(library), []  # as maps has it
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions, *_, file = line.split(maxsplit=5)
        if file != library or permissions not in ("r--p", "rw-p"):
            continue
        start, end = (int(number, 16) for number in span.split("-"))
        data = (ctypes.c_char * (end - start)).from_address(start)
        entries += [start + place for place in _places(data, pattern) if place % _WORD_BYTES == 0]
    return entries


def _places(data: Any, pattern: re.Pattern[bytes]) -> Iterator[int]:
    """All of them, also those that overlap; nothing is copied."""
    place = -1
    while found := pattern.search(data, place + 1):
        place = found.start()
        yield place


def write_entry(entry: int, address: int) -> None:
    """The table is read-only once the library is loaded; it is so again afterwards. Errors: OSError."""
    page = ctypes.c_void_p(entry & -mmap.PAGESIZE)
    for permissions, change in ((_READ_WRITE, True), (_READ, False)):
        if LIBC.mprotect(page, ctypes.c_size_t(mmap.PAGESIZE), permissions) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        if change:
            ctypes.c_void_p.from_address(entry).value = address

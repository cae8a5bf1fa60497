"""Monarch's sockets: by path, in a folder that only their owner may enter.

On one host Monarch's processes talk through Unix sockets. Some of them have a path. Those of a process that spawns
others (one for good, and one for each spawn) have a name in the kernel's abstract namespace instead, which
/proc/net/unix shows to everybody and which asks nobody who he is: any user of the host could attach, and run code as
the run's owner. No setting of Monarch 0.7 changes that, not even ``enable_transport``. So in processes that spawn, the
entry for libc's ``bind`` in Monarch's library is replaced by one that gives such sockets a path.
"""

import atexit
import ctypes
import itertools
import mmap
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from titan_rl.mesh.resources.scratch import make_scratch, remove_scratch

_LISTENS = "00010000"
"""The flag of a listening socket in /proc/net/unix."""
_WORD_BYTES = ctypes.sizeof(ctypes.c_void_p)
_READ, _READ_WRITE = 1, 3
"""Of ``mprotect``."""
_libc = ctypes.CDLL(None, use_errno=True)
_Bind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_uint32, use_errno=True)


def open_privately() -> Path:
    """Begin Monarch in this process, with all its sockets in a new folder, which is ours until the process ends.

    Monarch begins once in a process: sockets that it opened before are not changed (``abstract_listeners``). Errors:
    RuntimeError for a build of Monarch whose sockets cannot be given paths.
    """
    return _open_privately(os.getpid())  # a fork begins anew


@cache
def _open_privately(pid: int) -> Path:
    from monarch.actor import this_host

    folder = make_scratch()
    atexit.register(_remove_own, folder, pid)
    keep_sockets_in(folder)
    with _files_in(folder), _without(b"Monarch internal logs are"):  # which would stand in the middle of our own
        this_host()
    _keep_log_private()
    return folder


def _remove_own(folder: Path, pid: int) -> None:
    if os.getpid() == pid:
        remove_scratch(folder)


@contextmanager
def _files_in(folder: Path) -> Iterator[None]:
    """Temporary files that are made meanwhile are below ``folder``, and our own."""
    before, mask = os.environ.get("TMPDIR"), os.umask(0o077)
    os.environ["TMPDIR"] = str(folder)
    try:
        yield
    finally:
        os.umask(mask)
        os.environ.pop("TMPDIR")
        os.environ |= {} if before is None else {"TMPDIR": before}


@contextmanager
def _without(notice: bytes) -> Iterator[None]:
    """What is written to standard error meanwhile comes after it, but for lines that begin so."""
    kept = os.dup(2)
    with os.fdopen(os.memfd_create("stderr"), "w+b") as written:
        os.dup2(written.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            written.seek(0)
            for line in written.read().splitlines(keepends=True):
                if not line.startswith(notice):
                    os.write(2, line)


def _keep_log_private() -> None:
    """Monarch's own log is a file in /tmp/USER that all our programs share."""
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile, or another user's
            if descriptor.readlink().name.startswith("monarch_log"):
                descriptor.chmod(0o600)


def abstract_listeners() -> list[str]:
    """Names of the abstract sockets that this process listens at, which every user of the host may connect to."""
    opened = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            opened.add(os.readlink(descriptor))
    rows = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    named = [(row[7], f"socket:[{row[6]}]") for row in rows if row[3] == _LISTENS and row[7:]]
    return [name for name, link in named if name.startswith("@") and link in opened]


# every abstract socket gets a path


@cache
def keep_sockets_in(folder: Path) -> Callable:
    """From now on, sockets that Monarch would give an abstract name get a path in ``folder``. Once in a process.

    What its library calls from now on; it is kept by the cache. Errors: RuntimeError.
    """
    import monarch._rust_bindings as monarchs

    entries = list(_entries(monarchs.__file__, _address(_libc.bind)))
    if len(entries) != 1:
        raise RuntimeError(
            f"Monarch's sockets cannot be kept from other users: its library has {len(entries)} entries for bind, not 1"
        )
    replacement = _Bind(_binding_in(folder))
    _write(entries[0], _address(replacement))
    return replacement


def _binding_in(folder: Path) -> Callable[[int, int, int], int]:
    numbers = itertools.count()

    def bind(descriptor: int, address: int, size: int) -> int:
        given = ctypes.string_at(address, size)
        if is_abstract(given):
            given = given[:2] + os.fsencode(f"{folder}/{os.getpid()}.{next(numbers)}") + b"\0"
        return _libc.bind(descriptor, given, len(given))

    return bind


def is_abstract(address: bytes) -> bool:
    """Whether a ``sockaddr`` is that of a Unix socket without a path."""
    return int.from_bytes(address[:2], sys.byteorder) == socket.AF_UNIX and address[2:3] in (b"", b"\0")


def _address(function: Any) -> int:
    """Of a function of a library, or of one that libraries can call."""
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


def _entries(library: str, function: int) -> Iterator[int]:
    """Where a loaded library keeps the address of a function: in its table of what it calls (which is data)."""
    wanted, library = function.to_bytes(_WORD_BYTES, sys.byteorder), os.path.realpath(library)  # as maps has it
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions, *_, file = line.split(maxsplit=5)
        if file != library or permissions not in ("r--p", "rw-p"):
            continue
        start, end = (int(number, 16) for number in span.split("-"))
        data = ctypes.string_at(start, end - start)
        yield from (start + i for i in _places(data, wanted) if i % _WORD_BYTES == 0)


def _places(data: bytes, wanted: bytes) -> Iterator[int]:
    place = data.find(wanted)
    while place >= 0:
        yield place
        place = data.find(wanted, place + 1)


def _write(entry: int, address: int) -> None:
    """The table is read-only once the library is loaded; it is so again afterwards."""
    page = ctypes.c_void_p(entry & -mmap.PAGESIZE)
    for permissions, change in ((_READ_WRITE, True), (_READ, False)):
        if _libc.mprotect(page, ctypes.c_size_t(mmap.PAGESIZE), permissions) != 0:
            raise RuntimeError(f"Monarch's sockets cannot be kept from other users: {os.strerror(ctypes.get_errno())}")
        if change:
            ctypes.c_void_p.from_address(entry).value = address

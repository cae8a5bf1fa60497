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
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from titan_rl.compat.monarch.library import library_file
from titan_rl.mesh.resources.listeners.library_calls import LIBC, address_of, entries_of, write_entry
from titan_rl.mesh.resources.scratch import make_scratch, remove_scratch

_LISTENS = "00010000"
"""The flag of a listening socket in /proc/net/unix."""
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
    entries = entries_of(library_file(), address_of(LIBC.bind))
    if len(entries) != 1:
        raise RuntimeError(
            f"Monarch's sockets cannot be kept from other users: its library has {len(entries)} entries for bind, not 1"
        )
    replacement = _Bind(_binding_in(folder))
    try:
        write_entry(entries[0], address_of(replacement))
    except OSError as error:
        raise RuntimeError(f"Monarch's sockets cannot be kept from other users: {error.strerror}") from None
    return replacement


def _binding_in(folder: Path) -> Callable[[int, int, int], int]:
    numbers = itertools.count()

    def bind(descriptor: int, address: int, size: int) -> int:
        sockaddr = ctypes.string_at(address, size)
        if is_abstract(sockaddr):
            sockaddr = sockaddr[:2] + os.fsencode(f"{folder}/{os.getpid()}.{next(numbers)}") + b"\0"
        return LIBC.bind(descriptor, sockaddr, len(sockaddr))

    return bind


def is_abstract(address: bytes) -> bool:
    """Whether a ``sockaddr`` is that of a Unix socket without a path."""
    return int.from_bytes(address[:2], sys.byteorder) == socket.AF_UNIX and address[2:3] in (b"", b"\0")

"""gloo's listening sockets: only peers of this user get in, and none is left once a group has met.

gloo listens for each process group, takes whoever connects, keeps the connection, and ends the process when there is no
descriptor left for another. No setting changes that. All pairs of ranks are connected when a group is made, so nobody
has reason to connect later:

    ProcessGroupGloo(...)   listens ─▶ ranks connect, of this user (callers.py) ─▶ met: the socket is closed

Where ranks are on several hosts, the same holds, but nobody is asked who he is while they meet: users of other hosts
are not known here.
"""

import ctypes
import errno
import logging
import os
import socket
import threading
from collections.abc import Callable
from contextlib import closing
from functools import cache, wraps
from typing import Any

from titan_rl.mesh.resources.listeners.callers import is_other_users
from titan_rl.mesh.resources.listeners.library_calls import LIBC, address_of, entries_of, write_entry

_Listen = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int, use_errno=True)
_Accept = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, use_errno=True)
_LAZY = "TORCH_GLOO_LAZY_INIT"


class _Meeting(threading.local):
    """What the group that this thread is making listens at; None if it is making none."""

    listeners: list[int] | None = None


_meeting = _Meeting()


@cache
def guard_gloo() -> tuple[Any, ...]:
    """From now on, for every group of this process, whoever makes it. What gloo's library calls is kept by the cache.
    A build of torch whose calls cannot be replaced is warned of, and used as it is."""
    import torch
    from torch.distributed import ProcessGroupGloo  # pyright: ignore[reportPrivateImportUsage]  # it is documented

    library = os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so")
    replacements = {"listen": _Listen(_listen), "accept": _Accept(_accept)}
    entries = {name: entries_of(library, address_of(getattr(LIBC, name))) for name in replacements}
    if any(len(found) != 1 for found in entries.values()):
        logging.getLogger(__name__).warning("gloo's ports cannot be closed to other users of this host: %s", library)
        return ()
    for name, replacement in replacements.items():
        write_entry(entries[name][0], address_of(replacement))
    ProcessGroupGloo.__init__ = _closing_afterwards(ProcessGroupGloo.__init__)
    return tuple(replacements.values())


def _closing_afterwards(make: Callable) -> Callable:
    @wraps(make)
    def meet(*arguments: Any, **named: Any) -> None:
        os.environ.pop(_LAZY, None)  # pairs would connect with their first message, when nothing listens any more
        _meeting.listeners = []
        try:
            make(*arguments, **named)
            for descriptor in _meeting.listeners:
                _close_listener(descriptor)
        finally:
            _meeting.listeners = None

    return meet


def _close_listener(descriptor: int) -> None:
    """gloo keeps the number and closes it with the group: until then it is that of a socket that nobody can reach. A
    socket that was only shut down would wake gloo's thread for ever."""
    with socket.socket() as unbound:
        os.dup2(unbound.fileno(), descriptor, inheritable=False)


def _listen(descriptor: int, backlog: int) -> int:
    if _meeting.listeners is not None:
        _meeting.listeners.append(descriptor)
    return LIBC.listen(descriptor, backlog)


def _accept(listener: int, address: Any, size: Any) -> int:
    """``accept(2)``, but connections of other users are closed, and any error is as if nobody had come: gloo would end
    the process. It is a lack of descriptors, which passes, or the listener was closed a moment ago."""
    while True:
        descriptor = LIBC.accept(listener, ctypes.c_void_p(address), ctypes.c_void_p(size))
        if descriptor < 0:
            ctypes.set_errno(errno.EAGAIN)
            return -1
        try:
            with closing(socket.socket(fileno=os.dup(descriptor))) as one:
                is_refused = is_other_users(one)
        except OSError:  # no descriptor is left to look with
            is_refused = True
        if not is_refused:
            return descriptor
        os.close(descriptor)

"""Rendezvous of a process group: a file on one host, or a store of one rank.

    /run/titan_rl_x/trainer3            a file of the controller's host, which opens no port
    tcp://10.0.0.2:41001/trainer3       a TCPStore in the process of the first rank, on the run's interface alone

The store asks nobody who he is, and what passes through it is in the clear, as what gloo sends is: nothing secret does,
but whoever reaches that port can keep ranks from meeting.
"""

import socket
from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_BACKLOG = 1024


def store_at(rendezvous: str, world_size: int, seconds: float = 300.0) -> "Store":
    """The store of a process group. ``seconds``: how long to wait for it. A file must not exist yet."""
    # torch documents them there, and does not list them
    from torch.distributed import FileStore, PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

    place = urlsplit(rendezvous)
    if place.scheme != "tcp":
        return FileStore(rendezvous, world_size)
    assert place.hostname is not None and place.port is not None
    store = TCPStore(place.hostname, place.port, is_master=False, timeout=timedelta(seconds=seconds))
    return PrefixStore(place.path, store)


def open_store(address: str) -> "tuple[Store, str]":
    """A TCPStore that listens at this address of the host alone, for as long as it is held; and where that is."""
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  # as above

    listener = socket.create_server((address, 0), backlog=_BACKLOG)
    port = listener.getsockname()[1]
    descriptor = listener.detach()
    store = TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)
    return store, f"tcp://{address}:{port}"

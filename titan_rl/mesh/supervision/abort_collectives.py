"""This process's collectives, ended from outside when a rank died that they wait for (peers.py says why)."""

import os
import socket
import stat
import sys
import threading
from contextlib import closing, suppress

_ended = threading.Event()


class PeerGone(RuntimeError):
    """Collective aborted after a peer's death; its result is invalid."""


def end_collectives(lost: str = "") -> bool:
    """Abort this process's NCCL groups, from any thread; whether there were any. What waits for them goes on with
    whatever lies in its memory, or raises. ``lost``: the address of a host that is gone, if one is: what waits for
    gloo's peers there raises, as if they had hung up."""
    if lost:
        hang_up(lost)
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized() or "nccl" not in distributed.get_backend():
        return False
    from titan_rl.compat.torch.collectives import abort_process_groups  # torch is imported, if it is at all

    _ended.set()  # before anybody can go on
    abort_process_groups()
    return True


def hang_up(address: str) -> None:
    """Close all of this process's TCP connections to a host."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                continue  # a second descriptor of a pipe would keep it open
            with closing(socket.socket(fileno=os.dup(descriptor))) as connection:
                if connection.type == socket.SOCK_STREAM and _peer(connection) == address:
                    connection.shutdown(socket.SHUT_RDWR)


def _peer(connection: socket.socket) -> str:
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return ""
    return connection.getpeername()[0].removeprefix("::ffff:")


def check_peers() -> None:
    """Check for aborted collectives before their results are used. Errors: PeerGone."""
    if _ended.is_set():
        raise PeerGone("a peer rank died: the results of its collectives are invalid")


def begin_anew() -> None:
    """Clear the abort flag, for new groups."""
    _ended.clear()

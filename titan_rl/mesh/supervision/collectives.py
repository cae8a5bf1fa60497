"""This process's collectives, ended from outside when a rank died that they wait for (peers.py says why)."""

import sys
import threading

_ended = threading.Event()


class PeerGone(RuntimeError):
    """A collective came to an end since a peer had died: what it gave is worth nothing."""


def end_collectives() -> bool:
    """Abort this process's NCCL groups, from any thread; whether there were any. What waits for them goes on with
    whatever lies in its memory, or raises."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized() or "nccl" not in distributed.get_backend():
        return False
    _ended.set()  # before anybody can go on
    distributed.distributed_c10d._abort_process_group()
    return True


def check_peers() -> None:
    """To be called before anything is made of what collectives gave. Errors: PeerGone."""
    if _ended.is_set():
        raise PeerGone("a peer has died, and what this rank computed with it is worth nothing")


def begin_anew() -> None:
    """With new groups."""
    _ended.clear()

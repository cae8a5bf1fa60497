"""The process group of one role's ranks: met at a rendezvous, and left at once by a rank that fails."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from titan_rl.mesh.resources.listeners.gloo import guard_gloo
from titan_rl.mesh.resources.rendezvous import store_at
from titan_rl.mesh.supervision.abort_collectives import begin_anew, check_peers, end_collectives
from titan_rl.models.device import DEVICE_TYPE, local_device

_leaving: list[Callable[[], None]] = []
"""What goes with the group of this process, as torch keeps that one: one for a process."""


def join_group(rank: int, world_size: int, rendezvous: str, seconds: float, ranks_before: int = 0) -> None:
    """Meet the other ranks, in the place of those met before. ``rendezvous``: a new one (mesh/resources/rendezvous.py);
    ``seconds``: of any collective; ``ranks_before``: of another group, which take the first devices."""
    leave_group()
    begin_anew()
    guard_gloo()
    if DEVICE_TYPE != "cpu":
        torch.accelerator.set_device_index(local_device(ranks_before + rank).index)
    dist.init_process_group(
        "gloo" if DEVICE_TYPE == "cpu" else "nccl",
        store=store_at(rendezvous, world_size, seconds),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=seconds),
    )


def on_group_exit(close: Callable[[], None]) -> None:
    """Have this called when the group is left."""
    _leaving.append(close)


def leave_group() -> None:
    """If there is one."""
    while _leaving:
        with suppress(Exception):  # it is as good as gone
            _leaving.pop()()
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def leave_group_on_error() -> Iterator[None]:
    """A rank that fails leaves the process group at once, or peers with no direct link to it would wait on. It has
    failed, too, if a peer died and collectives were ended for that. Errors: PeerGone."""
    try:
        yield
        check_peers()
    except BaseException:  # any error is raised again once the peers can know
        with suppress(Exception):
            end_collectives()  # leaving a group of NCCL's may wait for what is under way in it
            leave_group()
        raise

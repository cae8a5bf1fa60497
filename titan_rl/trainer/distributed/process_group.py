"""Process group of one role's ranks: joined at a rendezvous, left at once by a rank that fails."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from titan_rl.compat.torch.cuda_allocator import expand_segments
from titan_rl.mesh.resources.listeners.gloo import guard_gloo
from titan_rl.mesh.resources.rendezvous import store_at
from titan_rl.mesh.supervision.abort_collectives import begin_anew, check_peers, end_collectives
from titan_rl.models.device import DEVICE_TYPE, local_device

_leaving: list[Callable[[], None]] = []
"""Callbacks at the exit of this process's group; torch keeps one group a process."""


def join_group(rank: int, world_size: int, rendezvous: str, seconds: float, ranks_before: int = 0) -> None:
    """Join a new process group, after leaving the previous one.

    ``rendezvous``: a new one (mesh/resources/rendezvous.py); ``seconds``: of any collective; ``ranks_before``: of
    another group, which take the first devices."""
    leave_group()
    begin_anew()
    guard_gloo()
    if DEVICE_TYPE != "cpu":
        expand_segments()
        torch.accelerator.set_device_index(local_device(ranks_before + rank).index)
    dist.init_process_group(
        "gloo" if DEVICE_TYPE == "cpu" else "nccl",
        store=store_at(rendezvous, world_size, seconds),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=seconds),
    )


def on_group_exit(close: Callable[[], None]) -> None:
    """Register a callback for the group's exit."""
    _leaving.append(close)


def leave_group() -> None:
    """Leave the process group, if there is one."""
    while _leaving:
        with suppress(Exception):  # it is as good as gone
            _leaving.pop()()
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def leave_group_on_error() -> Iterator[None]:
    """Leave the process group on an error inside the context, so that peers without a direct link do not wait.

    Errors: PeerGone if a peer died and collectives were aborted."""
    try:
        yield
        check_peers()
    except BaseException:  # any error is raised again once the peers can know
        with suppress(Exception):
            end_collectives()  # leaving a group of NCCL's may wait for what is under way in it
            leave_group()
        raise

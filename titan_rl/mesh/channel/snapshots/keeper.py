"""A trainer rank's snapshots outlive it: another process on its host holds their memory, where a replacement reads it.

Nothing is copied. What a rank was writing when it died is torn, and has no stamp; that is what the second slot is for.
"""

import dataclasses
import os

import torch

from titan_rl.mesh.channel.memory.region import RegionHandle
from titan_rl.mesh.channel.plan import Read
from titan_rl.mesh.channel.sources import Rdma, SharedMemory, TornRead
from titan_rl.mesh.resources.host_identity import host_identity

_READ_SECONDS = 60.0


class SnapshotKeeper:
    """Keeper of another process's region. ``handle``: its address, also after that process's death."""

    def __init__(self, handle: RegionHandle):
        fd = os.open(f"/proc/{handle.pid}/fd/{handle.fd}", os.O_RDONLY)
        self.handle = dataclasses.replace(handle, pid=os.getpid(), fd=fd)

    def steps(self) -> list[int]:
        """Steps with complete, verified state. The owner must take no more."""
        source = SharedMemory(self.handle)
        stamps = enumerate(source.header.stamps)
        return sorted({int(stamp) for slot, stamp in stamps if stamp >= 0 and source.is_whole(slot)})

    def close(self) -> None:
        """The memory is freed with the last process that holds it."""
        os.close(self.handle.fd)


def fetch_step(handle: RegionHandle, step: int) -> torch.Tensor:
    """A copy of a step (a slot, uint8), checked. Errors: TornRead."""
    if handle.host not in ("", host_identity()):
        return _fetch_from_afar(handle, step)
    return _fetch(SharedMemory(handle), step)


def _fetch_from_afar(handle: RegionHandle, step: int) -> torch.Tensor:
    """What a copier on another host keeps. Inside a serial actor."""
    source = Rdma(handle, torch.device("cpu"))
    source.refresh_now(_READ_SECONDS)
    return _fetch(source, step)


def _fetch(source: SharedMemory | Rdma, step: int) -> torch.Tensor:
    handle, stamps = source.handle, [int(stamp) for stamp in source.header.stamps]
    if step not in stamps:
        raise TornRead(f"the snapshots of rank {handle.rank} are of steps {stamps}, not {step}")
    into, slot = torch.empty(handle.slot_bytes, dtype=torch.uint8), stamps.index(step)
    reads = whole_slot(handle)
    if isinstance(source, Rdma):
        source.fetch_now(slot, reads, into, _READ_SECONDS)
    source.take(slot, reads, into)
    return into


def whole_slot(handle: RegionHandle) -> list[Read]:
    """Reads of a whole slot, each block to its own offset."""
    return [Read(handle.rank, block, start, stop - start, start) for block, (start, stop) in enumerate(handle.blocks)]

"""Copies of snapshots of another host's trainer ranks, against the loss of that host.

    a rank stamps a step ─▶ its header is read ─▶ the blocks of that step ─▶ checked ─▶ a slot here is stamped

Nobody waits for it: a copy that is late is of an earlier step, and where it is too late for a common step of all ranks,
a checkpoint has to do. The region here has two slots, as the rank's own, and is read in the same way.
"""

import asyncio
from contextlib import suppress

import torch
from monarch.actor import Actor

from titan_rl.mesh.channel.memory.region import WRITING, Region, RegionHandle
from titan_rl.mesh.channel.snapshots.keeper import whole_slot
from titan_rl.mesh.channel.sources import Rdma, TornRead
from titan_rl.mesh.processes.concurrent import concurrent_endpoint
from titan_rl.mesh.resources.background_thread import in_side_thread

_POLL_SECONDS = 0.1
_READ_SECONDS = 60.0
_HOST = torch.device("cpu")


class _Copy:
    """Of one rank's snapshots."""

    def __init__(self, handle: RegionHandle):
        self.source = Rdma(handle, _HOST)
        self.region = Region(handle.rank, handle.slot_bytes, handle.blocks, _HOST)

    async def follow(self) -> None:
        """For as long as the rank lives. Errors: Monarch's, when it does no more."""
        while True:
            await self.source.refresh(_READ_SECONDS)
            for slot, stamp in enumerate(self.source.header.stamps):
                if stamp >= 0 and not self._has(slot):
                    with suppress(TornRead):  # it was overwritten meanwhile: a later one comes
                        await self._take(slot, int(stamp))
            await asyncio.sleep(_POLL_SECONDS)

    def _has(self, slot: int) -> bool:
        """Whether that very state is here, whatever its number."""
        theirs = self.source.header
        return any(
            stamp == theirs.stamps[slot] and (own == theirs.checksums[slot]).all()
            for stamp, own in zip(self.region.header.stamps, self.region.header.checksums, strict=True)
        )

    async def _take(self, slot: int, step: int) -> None:
        """The state of a slot there, in the place of the older one here. Errors: TornRead."""
        header = self.region.header
        into = int(header.stamps.argmin())
        header.stamps[into] = WRITING
        reads, buffer = whole_slot(self.source.handle), self.region.slots[into]
        await self.source.fetch(slot, reads, buffer, _READ_SECONDS)
        await in_side_thread(self.source.take, slot, reads, buffer)
        header.checksums[into] = self.source.header.checksums[slot]
        header.stamps[into] = step


class SnapshotCopier(Actor):
    """Beside the actor of a process on another host than the ranks whose snapshots it keeps."""

    def __init__(self) -> None:
        self._copies: dict[int, _Copy] = {}
        self._following: dict[int, asyncio.Task[None]] = {}

    @concurrent_endpoint
    async def keep(self, handle: RegionHandle) -> None:
        """Begin to copy a rank's snapshots, in place of those of its earlier region."""
        if handle.rank in self._following:
            self._following[handle.rank].cancel()
        self._copies[handle.rank] = copy = _Copy(handle)
        self._following[handle.rank] = asyncio.ensure_future(copy.follow())

    @concurrent_endpoint
    async def kept(self, rank: int) -> tuple[list[int], RegionHandle | None]:
        """Complete steps of a dead rank, with the region's handle."""
        if rank not in self._copies:
            return [], None
        self._following[rank].cancel()
        region = self._copies[rank].region
        return sorted(int(stamp) for stamp in region.header.stamps if stamp >= 0), region.handle(over_rdma=True)

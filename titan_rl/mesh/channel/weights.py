"""The weight channel: trainer ranks stage a version, generator ranks fetch the bytes that they store.

The plan says which bytes go where (plan.py), a region is where they lie (region.py), a source is how they travel
(sources.py). Here is the order of events: beside the trainer's next forward and backward a version is cast and copied
into the slot that is not in use; then its checksums are written, and its stamp last. A reader accepts only what stamp
and checksum confirm.
"""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from titan_rl.mesh.channel.plan import Box, Holding, Interner, Placed, Read, ReadPlan, SlotLayout, Units, split_name
from titan_rl.mesh.channel.region import FAILED, NUM_SLOTS, Region, RegionHandle
from titan_rl.mesh.channel.slots import Copies, SlotWriter
from titan_rl.mesh.channel.sources import Rdma, Source, TornRead, open_source, share_out
from titan_rl.mesh.channel.streams import stream_for
from titan_rl.mesh.channel.transports import ON_GPU, Transport
from titan_rl.mesh.freed_memory import drop_contents, drop_shared_contents

if TYPE_CHECKING:  # it brings TorchTitan along, which generators do without
    from titan_rl.models.shards import Shard

_HOST = torch.device("cpu")
_FIRST_POLL, _LAST_POLL = 0.0005, 0.02
"""Seconds between two looks at a version that is not there yet."""


def holdings(shards: "list[Shard]", interner: Interner) -> Units:
    """What a trainer rank holds, in the form that the plan takes."""
    return interner.units(
        (unit, Holding(name, Box(shard.start, tuple(shard.tensor.shape))))
        for shard in shards
        for unit, name in [split_name(shard.name)]
    )


def dtype_of(name: str) -> torch.dtype:
    return getattr(torch, name)


def piece_view(memory: torch.Tensor, base: int, placed: Placed) -> torch.Tensor:
    """A piece as a tensor of its own shape and dtype, in ``memory`` (uint8)."""
    start = base + placed.offset
    flat = memory[start : start + placed.piece.nbytes].view(dtype_of(placed.piece.dtype))
    return flat.view(placed.piece.box.size)


class WeightWriter(SlotWriter):
    """One trainer rank's side."""

    def __init__(
        self, rank: int, shards: "list[Shard]", layout: SlotLayout, device: torch.device, on_host: bool = False
    ):
        """``device``: where the shards are. ``on_host``: readers reach nothing but this host's memory."""
        region = Region(rank, layout.nbytes, layout.blocks, _HOST if on_host else device, filled_from=device)
        super().__init__(region, [_plan_copies(shards, layout, slot) for slot in region.slots], stream_for(device))

    def publish(self, version: int) -> None:
        """Begin to stage a version: the next forward and backward may run meanwhile, the next update may not."""
        self.begin(version, version % NUM_SLOTS)

    def keep_the_last(self) -> None:
        """Of the versions here nobody will ask for any but the last: on a CPU the memory of the others is given back,
        until something is written there again."""
        self.wait()
        stamps, slots = self.region.header.stamps, self.region.slots
        for slot in set(range(NUM_SLOTS)) - {int(stamps.argmax())}:
            if stamps[slot] >= 0 and slots[slot].device.type == "cpu" and not slots[slot].is_pinned():
                stamps[slot] = FAILED
                drop_shared_contents(slots[slot])

    def withdraw(self) -> None:
        """Nothing will come here any more; readers that wait are told so."""
        self.wait()
        self.region.header.stamps[:] = FAILED


def _plan_copies(shards: "list[Shard]", layout: SlotLayout, slot: torch.Tensor) -> Copies:
    by_name: dict[str, list[tuple[Box, Shard]]] = {}
    for shard in shards:
        by_name.setdefault(shard.name, []).append((Box(shard.start, tuple(shard.tensor.shape)), shard))
    copies = []
    for base, segment in layout.segments:
        for placed in segment.placed():
            box = placed.piece.box
            outer, shard = next((o, s) for o, s in by_name[placed.name] if o.intersect(box) == box)
            part = box.within(outer)
            values = shard.tensor[part] if shard.low_rank is None else partial(shard.merged, part)
            copies.append((piece_view(slot, base, placed), values))
    return copies


@dataclass(frozen=True)
class ReaderSetup:
    """All that a generator rank is told, once."""

    plan: ReadPlan
    regions: list[RegionHandle]
    """Of the holders that it reads from."""
    transports: list[Transport]
    """One for each region."""


class WeightReader:
    """One generator rank's side: a copy of its bytes of one version, fetched while the engine goes on."""

    def __init__(self, setup: ReaderSetup, device: torch.device, threads: int = 1):
        self.plan, self._threads = setup.plan, threads
        device = device if all(transport in ON_GPU for transport in setup.transports) else _HOST
        self._sources = {
            handle.rank: open_source(handle, transport, device)
            for handle, transport in zip(setup.regions, setup.transports, strict=True)
        }
        self.buffer = torch.zeros(self.plan.nbytes, dtype=torch.uint8, device=device)
        self.held: int | None = None
        """The version in ``buffer``; None while that holds no complete one."""
        self._is_closed = False
        self.bytes_read = 0
        """In all fetches so far."""

    async def fetch(self, version: int, timeout: float) -> None:
        """Copy a version here. One that is being written is waited for; what fails its checksum is read again.

        Errors: TornRead if it was superseded, or is still not complete after ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        while True:
            await self._await_stamps(version, deadline)
            self.held = None
            if (storage := self.buffer.untyped_storage()).nbytes() < self.plan.nbytes:
                storage.resize_(self.plan.nbytes)
            try:
                await self._read_all(version % NUM_SLOTS, deadline - time.monotonic())
                await self._await_stamps(version, time.monotonic())
                break
            except TornRead:
                if time.monotonic() > deadline:
                    raise
        self.bytes_read += sum(read.nbytes for read in self.plan.reads)
        self.held = version

    async def _await_stamps(self, version: int, deadline: float) -> None:
        pause = _FIRST_POLL
        for rank, source in self._sources.items():
            while True:
                await source.refresh(max(deadline - time.monotonic(), 1.0))
                stamp = int(source.header.stamps[version % NUM_SLOTS])
                if stamp == version:
                    break
                if self._is_closed:
                    raise Gone("the trainer has begun anew")
                if stamp == FAILED:
                    raise Gone(f"trainer rank {rank} failed to stage version {version}, or began anew")
                if source.is_gone():
                    raise Gone(f"trainer rank {rank} is gone")
                if stamp > version:
                    raise Gone(f"trainer rank {rank} has version {stamp} where {version} was asked for")
                if time.monotonic() >= deadline:
                    raise TornRead(f"trainer rank {rank} has not finished version {version}")
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LAST_POLL)

    def let_go(self) -> None:
        """Hold no version, and no memory for one, until the next is fetched."""
        self.held = None
        storage = self.buffer.untyped_storage()
        if self.buffer.device.type != "cpu":
            storage.resize_(0)
        elif not self.buffer.is_pinned():  # others have views of its address
            drop_contents(storage)

    def close(self) -> None:
        """Those who still wait for a version here are told that it will not come."""
        self._is_closed = True

    async def _read_all(self, slot: int, timeout: float) -> None:
        reads = [(self._sources[read.holder], read) for read in self.plan.reads]
        remote = [(source, read) for source, read in reads if isinstance(source, Rdma)]
        for source in dict.fromkeys(source for source, _ in remote):
            await source.fetch(slot, [read for s, read in remote if s is source], self.buffer, max(timeout, 1.0))

        def work(share: list[tuple[Source, Read]]) -> None:
            for source in dict.fromkeys(source for source, _ in share):
                source.take(slot, [read for s, read in share if s is source], self.buffer)

        await asyncio.gather(*(asyncio.to_thread(work, share) for share in share_out(reads, self._threads)))

    def pieces(self) -> Iterator[tuple[str, Box, Box, torch.Tensor]]:
        """(tensor name, the need that it belongs to, its box, values) of all that was fetched."""
        for base, segment in self.plan.segments:
            for placed in segment.placed():
                yield placed.name, placed.piece.need, placed.piece.box, piece_view(self.buffer, base, placed)


class Gone(TornRead):
    """The version that was asked for will not come, or come back."""

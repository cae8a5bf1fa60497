"""The weight channel: trainer ranks stage a version, and generator ranks fetch the bytes that they store (reader.py).

The plan says which bytes go where (plan.py), a region is where they lie (region.py), a source is how they travel
(sources.py). Here is the order of events: beside the trainer's next forward and backward a version is cast and copied
into the slot that is not in use; then its checksums are written, and its stamp last.
"""

from functools import partial
from typing import TYPE_CHECKING

import torch

from titan_rl.mesh.channel.memory.region import FAILED, NUM_SLOTS, Region, stamp_of
from titan_rl.mesh.channel.memory.slots import Copies, SlotWriter
from titan_rl.mesh.channel.memory.streams import stream_for
from titan_rl.mesh.channel.plan import Box, Holding, Interner, Placed, SlotLayout, Units, split_name
from titan_rl.mesh.resources.released_memory import drop_shared_contents

if TYPE_CHECKING:  # it brings TorchTitan along, which generators do without
    from titan_rl.models.weights.shards import Shard

_HOST = torch.device("cpu")


def holdings(shards: "list[Shard]", interner: Interner) -> Units:
    """Holdings of a trainer rank, for the plan."""
    return interner.units(
        (unit, Holding(name, Box(shard.start, tuple(shard.tensor.shape)), _name_of(shard.computed_in)))
        for shard in shards
        for unit, name in [split_name(shard.name)]
    )


def dtype_of(name: str) -> torch.dtype:
    return getattr(torch, name)


def _name_of(dtype: torch.dtype | None) -> str:
    return "" if dtype is None else str(dtype).removeprefix("torch.")


def piece_view(memory: torch.Tensor, base: int, placed: Placed) -> torch.Tensor:
    """A piece as a tensor of its own shape and dtype, in ``memory`` (uint8)."""
    start = base + placed.offset
    flat = memory[start : start + placed.piece.nbytes].view(dtype_of(placed.piece.dtype))
    return flat.view(placed.piece.box.size)


class WeightWriter(SlotWriter):
    """Writer of one trainer rank's weight region."""

    def __init__(
        self,
        rank: int,
        shards: "list[Shard]",
        layout: SlotLayout,
        device: torch.device,
        on_host: bool = False,
        epoch: int = 0,
    ):
        """``device``: where the shards are. ``on_host``: readers reach nothing but this host's memory. ``epoch``: in
        which the regions of all ranks were opened; it is part of every stamp."""
        self.epoch = epoch
        region = Region(rank, layout.nbytes, layout.blocks, _HOST if on_host else device, filled_from=device)
        super().__init__(region, [_plan_copies(shards, layout, slot) for slot in region.slots], stream_for(device))

    def stage(self, version: int, epoch: int | None = None) -> None:
        """Begin to copy a version into its slot: the next forward and backward may run meanwhile, the next update not.

        Errors: ValueError if it is asked for under another epoch.
        """
        if epoch is not None and epoch != self.epoch:
            raise ValueError(f"version {version} was asked for in epoch {epoch}, and this rank is in {self.epoch}")
        self.begin(stamp_of(self.epoch, version), version % NUM_SLOTS)

    def drop_old_versions(self) -> None:
        """Of the versions here nobody will ask for any but the last: on a CPU the memory of the others is given back,
        until something is written there again."""
        self.wait()
        stamps, slots = self.region.header.stamps, self.region.slots
        for slot in set(range(NUM_SLOTS)) - {int(stamps.argmax())}:
            if stamps[slot] >= 0 and slots[slot].device.type == "cpu" and not slots[slot].is_pinned():
                stamps[slot] = FAILED
                drop_shared_contents(slots[slot])

    def withdraw(self) -> None:
        """Close the region; waiting readers raise."""
        self.wait()
        self.region.withdraw()


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

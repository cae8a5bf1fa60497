"""The copy of a trainer rank's snapshots that another process holds, and how a replacement reads it."""

import threading

import torch

from titan_rl.mesh.channel.plan import Read
from titan_rl.mesh.channel.region import FAILED, NUM_SLOTS, WRITING, Region, RegionHandle
from titan_rl.mesh.channel.slots import give_way
from titan_rl.mesh.channel.sources import SharedMemory, TornRead

_NICE = 10
_CPU = torch.device("cpu")
_POLL_SECONDS = 0.05
"""Being late loses nothing: what a dead process had stamped can still be copied."""


class SnapshotReplica:
    """Follows another process's snapshots: a thread copies each as soon as it is complete."""

    def __init__(self, handle: RegionHandle):
        self.source = SharedMemory(handle)
        self.region = Region(handle.rank, handle.slot_bytes, handle.blocks, _CPU)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"replica of rank {handle.rank}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        give_way(_NICE)
        while not self._stopped.wait(_POLL_SECONDS):
            for slot in range(NUM_SLOTS):
                self._follow(slot)

    def _follow(self, slot: int) -> None:
        stamp, header = int(self.source.header.stamps[slot]), self.region.header
        checksums = self.source.header.checksums[slot]
        if stamp == FAILED:
            header.stamps[slot] = FAILED
        if stamp < 0 or (stamp == header.stamps[slot] and (checksums == header.checksums[slot]).all()):
            return
        header.stamps[slot] = WRITING
        try:
            copy_slot(self.source, slot, self.region.slots[slot])
        except TornRead:  # it was written to meanwhile: the next round looks again
            return
        header.checksums[slot] = checksums
        if int(self.source.header.stamps[slot]) == stamp:
            header.stamps[slot] = stamp

    def steps(self) -> list[int]:
        """Steps whose state is complete here, after a last look at the source. It is not followed any more."""
        self.stop()
        for slot in range(NUM_SLOTS):
            self._follow(slot)
        return sorted(int(stamp) for stamp in self.region.header.stamps if stamp >= 0)

    def stop(self) -> None:
        """Follow no more; what was copied stays."""
        self._stopped.set()
        self._thread.join()


def copy_slot(source: SharedMemory, slot: int, into: torch.Tensor) -> None:
    """Errors: TornRead if a block fails its checksum."""
    for block, (start, stop) in enumerate(source.handle.blocks):
        source.copy(slot, Read(source.handle.rank, block, start, stop - start, start), into)


def fetch_step(handle: RegionHandle, step: int) -> torch.Tensor:
    """The replica's copy of a step (a slot, uint8), checked. Errors: TornRead."""
    source = SharedMemory(handle)
    stamps = [int(stamp) for stamp in source.header.stamps]
    if step not in stamps:
        raise TornRead(f"the replica of rank {handle.rank} has steps {stamps}, not {step}")
    into = torch.empty(handle.slot_bytes, dtype=torch.uint8)
    copy_slot(source, stamps.index(step), into)
    return into

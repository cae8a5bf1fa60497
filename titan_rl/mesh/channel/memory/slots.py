"""Filling a slot of a region beside other work: first the copies, then the checksums, then the stamp.

The copying is a thread's, and on a GPU a stream's, too (streams.py).
"""

import os
import threading
from collections.abc import Callable

import torch

from titan_rl.compat.torch.tensors import copy_each
from titan_rl.mesh.channel.memory.checksums import checksums
from titan_rl.mesh.channel.memory.region import FAILED, WRITING, Region
from titan_rl.mesh.channel.memory.streams import NoStream
from titan_rl.mesh.resources.background_thread import compute_alone

Copies = list[tuple[torch.Tensor, torch.Tensor | Callable[[], torch.Tensor]]]
"""(place in the slot, where its values come from, or what makes them)."""


def lower_priority(nice: int) -> None:
    """Lower this thread's priority, so that it runs when others leave it a core. ``nice``: 0 changes nothing."""
    if nice:
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, max(nice, os.getpriority(os.PRIO_PROCESS, thread)))


class SlotWriter:
    """The only writer of its region; at most one slot is being filled."""

    def __init__(self, region: Region, copies: list[Copies], stream: NoStream, nice: int = 0):
        """``copies[slot]``, the same for every version. ``stream``: what they run in. ``nice``: how far this gives way
        to other work."""
        self.region, self.copies, self.nice, self._stream = region, copies, nice, stream
        self._work: threading.Thread | None = None
        self._copied = threading.Event()
        self._copied.set()

    def begin(self, version: int, slot: int, before_stamp: Callable[[], None] = lambda: None) -> None:
        """Copy the sources into a slot in the background; they must not change until ``wait_until_copied`` returns."""

        def fill() -> None:
            region, stream = self.region, self._stream
            with stream.running():
                _copy(self.copies[slot], non_blocking=stream.is_asynchronous)
                stream.mark()
            self._copied.set()
            before_stamp()
            stream.synchronize()
            with stream.running():
                region.header.checksums[slot] = checksums(region.sums, region.slots[slot], region.blocks)

        self._begin(version, slot, fill)

    def copy_slot(self, source: int, slot: int) -> None:
        """Copy one slot to another, in the calling thread."""
        self.wait()
        header, slots = self.region.header, self.region.slots
        header.stamps[slot] = WRITING
        slots[slot].copy_(slots[source])
        header.checksums[slot] = header.checksums[source]
        header.stamps[slot] = header.stamps[source]

    def _begin(self, version: int, slot: int, fill: Callable[[], None]) -> None:
        self.wait()
        self._stream.follow()
        self._copied.clear()
        self.region.header.stamps[slot] = WRITING
        arguments = (version, slot, fill)
        self._work = threading.Thread(target=self._fill, args=arguments, name=f"version {version}", daemon=True)
        self._work.start()

    @torch.no_grad()
    def _fill(self, version: int, slot: int, fill: Callable[[], None]) -> None:
        header = self.region.header
        try:
            compute_alone()
            lower_priority(self.nice)
            fill()
            header.stamps[slot] = version
        except BaseException:  # any error: readers must not wait for this version
            header.stamps[slot] = FAILED
            raise
        finally:
            self._copied.set()

    def wait_until_copied(self) -> None:
        """Wait until the calling thread may change the sources again."""
        self._copied.wait()
        self._stream.precede()

    def wait(self) -> None:
        """Wait until the last version is stamped."""
        if self._work is not None:
            self._work.join()


def _copy(copies: Copies, non_blocking: bool) -> None:
    if stored := [(place, values) for place, values in copies if isinstance(values, torch.Tensor)]:
        places, sources = map(list, zip(*stored, strict=True))
        copy_each(places, sources, non_blocking=non_blocking)
    for place, values in copies:
        if not isinstance(values, torch.Tensor):
            place.copy_(values(), non_blocking=non_blocking)

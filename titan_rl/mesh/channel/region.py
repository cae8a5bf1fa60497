"""A rank's region of memory: a header, and two slots of which the next version fills the one that is not in use.

The header says of each slot which version it holds and the checksum of each of its blocks. It is written after the last
byte, so a version is complete or invisible. On one host a region is an anonymous shared mapping, reached through the
owner's file table, so nothing is left behind when a process dies. A GPU's slots stay on the GPU and are mapped by CUDA
IPC. Between hosts header and blocks are read with RDMABuffer.
"""

import mmap
import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from titan_rl.mesh.channel.checksums import Sums, sums_for
from titan_rl.mesh.channel.pinned import pin
from titan_rl.mesh.launch.identity import host_identity

NUM_SLOTS = 2
WRITING, FAILED = -1, -2
"""Stamps of a slot that holds no version."""


class Header:
    """Stamp and checksums of each slot, as views of shared bytes."""

    def __init__(self, memory, num_blocks: int):
        self.bytes = memoryview(memory)[: self.nbytes(num_blocks)]
        numbers = np.frombuffer(self.bytes, np.uint64)
        self.stamps = numbers[:NUM_SLOTS].view(np.int64)
        self.checksums = numbers[NUM_SLOTS:].reshape(NUM_SLOTS, num_blocks)

    @staticmethod
    def nbytes(num_blocks: int) -> int:
        return 8 * NUM_SLOTS * (1 + num_blocks)


@dataclass(frozen=True)
class RegionHandle:
    """All that a reader needs to reach a region: made once, and cheap to send."""

    rank: int
    pid: int
    fd: int
    slot_bytes: int
    blocks: list[tuple[int, int]]
    """[start, stop) in a slot of each checksum."""
    sums: Sums = "xxh3"
    """The kind of the checksums."""
    cuda: list[Any] = field(default_factory=list)
    """Of each slot, if they are on a GPU: what torch.multiprocessing needs to map it."""
    host: str = ""
    """By its identity."""
    rdma_header: Any = None
    rdma_blocks: list[list[Any]] = field(default_factory=list)
    """RDMABuffers ``[slot][block]``, if some reader is on another host."""


class Region:
    """The owner's side. ``slots`` are uint8 tensors."""

    def __init__(
        self,
        rank: int,
        slot_bytes: int,
        blocks: list[tuple[int, int]],
        device: torch.device,
        filled_from: torch.device | None = None,
    ):
        """``device``: where the slots are. ``filled_from``: where what is copied into them is, if it is elsewhere."""
        self.rank, self.slot_bytes, self.blocks = rank, max(slot_bytes, 1), blocks
        header_bytes = header_pages(len(blocks))
        self.sums, on_gpu = sums_for(device), device.type != "cpu"
        size = header_bytes + (0 if on_gpu else NUM_SLOTS * self.slot_bytes)
        self._fd = os.memfd_create(f"titan_rl_rank{rank}")
        os.ftruncate(self._fd, size)
        self._memory = mmap.mmap(self._fd, size)
        self.header = Header(self._memory, len(blocks))
        self.header.stamps[:] = WRITING
        if on_gpu:
            self.slots = [torch.zeros(self.slot_bytes, dtype=torch.uint8, device=device) for _ in range(NUM_SLOTS)]
        else:
            memory = torch.frombuffer(self._memory, dtype=torch.uint8)
            self.slots = list(memory[header_bytes:].view(NUM_SLOTS, self.slot_bytes))
            if filled_from is not None and filled_from.type == "cuda":
                pin(memory, self)

    def handle(self, over_rdma: bool) -> RegionHandle:
        """Call it inside an actor if ``over_rdma`` (some reader is on another host)."""
        cuda, rdma_header, rdma_blocks = [], None, []
        if self.slots[0].is_cuda:
            from torch.multiprocessing.reductions import reduce_tensor

            cuda = [reduce_tensor(slot) for slot in self.slots]
        if over_rdma:
            from monarch.rdma import RDMABuffer

            rdma_header = RDMABuffer(torch.frombuffer(self.header.bytes, dtype=torch.uint8))
            rdma_blocks = [[RDMABuffer(slot[start:stop]) for start, stop in self.blocks] for slot in self.slots]
        place = self.rank, os.getpid(), self._fd, self.slot_bytes
        return RegionHandle(*place, self.blocks, self.sums, cuda, host_identity(), rdma_header, rdma_blocks)


def header_pages(num_blocks: int) -> int:
    """Bytes in front of the first slot."""
    nbytes = Header.nbytes(num_blocks)
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE

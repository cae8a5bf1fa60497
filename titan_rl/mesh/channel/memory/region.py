"""Memory region of a rank: a header and two slots, one of which takes the next version.

The header says of each slot which version it holds and the checksum of each of its blocks. It is written after the last
byte, so a version is complete or invisible. On one host a region is an anonymous shared mapping, reached through the
owner's file table, so nothing is left behind when a process dies. A GPU's slots stay on the GPU and are mapped by CUDA
IPC. Between hosts header and blocks are read with RDMABuffer, or blocks are asked for over TCP (tcp/server.py).

A stamp is an epoch and a version. The epoch grows whenever the trainer's regions are opened anew, so what a rank writes
that was declared lost and lives on somewhere has a stamp that nobody waits for.
"""

import mmap
import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from titan_rl.compat.torch.cuda_allocator import fixed_segments
from titan_rl.mesh.channel.memory.checksums import Sums, sums_for
from titan_rl.mesh.channel.memory.pinned import pin
from titan_rl.mesh.channel.tcp.differences import difference
from titan_rl.mesh.channel.tcp.protocol import Status
from titan_rl.mesh.channel.tcp.server import Address, Block, block_server
from titan_rl.mesh.resources.host_identity import host_identity

NUM_SLOTS = 2
WRITING, FAILED = -1, -2
"""Stamps of a slot that holds no version."""
_VERSION_BITS = 40


def stamp_of(epoch: int, version: int) -> int:
    """Stamp of a version in an epoch; in epoch 0 the version itself."""
    assert 0 <= version < 1 << _VERSION_BITS and 0 <= epoch < 1 << (62 - _VERSION_BITS)
    return epoch << _VERSION_BITS | version


def version_of(stamp: int) -> int:
    return stamp & ((1 << _VERSION_BITS) - 1)


def epoch_of(stamp: int) -> int:
    return stamp >> _VERSION_BITS


def is_unavailable(stamp: int, target: int) -> bool:
    """Whether a slot that holds ``stamp`` can never hold ``target``: it failed, was superseded, or its writer's
    epoch is over."""
    return stamp == FAILED or stamp > target or (stamp >= 0 and epoch_of(stamp) < epoch_of(target))


Memory = mmap.mmap | memoryview


class Header:
    """Stamp and checksums of each slot, as views of shared bytes."""

    def __init__(self, memory: Memory, num_blocks: int):
        self.bytes = memoryview(memory)[: self.nbytes(num_blocks)]
        numbers = np.frombuffer(self.bytes, np.uint64)
        self.stamps = numbers[:NUM_SLOTS].view(np.int64)
        self.checksums = numbers[NUM_SLOTS:].reshape(NUM_SLOTS, num_blocks)

    @staticmethod
    def nbytes(num_blocks: int) -> int:
        return 8 * NUM_SLOTS * (1 + num_blocks)


@dataclass(frozen=True)
class RegionHandle:
    """Address and layout of a region, for readers; cheap to send."""

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
    tcp: Address | None = None
    """Where blocks are served, if some reader is on another host."""


class Region:
    """Memory region of its owner. ``slots`` are uint8 tensors."""

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
        self.sums: Sums = sums_for(device)
        on_gpu = device.type != "cpu"
        size = header_bytes + (0 if on_gpu else NUM_SLOTS * self.slot_bytes)
        self.fd = os.memfd_create(f"titan_rl_rank{rank}")
        os.ftruncate(self.fd, size)
        self._memory = mmap.mmap(self.fd, size)
        self.memory = memoryview(self._memory)
        self._address: Address | None = None
        self.header = Header(self._memory, len(blocks))
        self.header.stamps[:] = WRITING
        if on_gpu:
            with fixed_segments():
                self.slots = [torch.zeros(self.slot_bytes, dtype=torch.uint8, device=device) for _ in range(NUM_SLOTS)]
        else:
            memory = torch.frombuffer(self._memory, dtype=torch.uint8)
            self.slots = list(memory[header_bytes:].view(NUM_SLOTS, self.slot_bytes))
            if filled_from is not None and filled_from.type == "cuda":
                pin(memory, self)

    def handle(self, over_rdma: bool, over_tcp: bool = False) -> RegionHandle:
        """``over_rdma``, ``over_tcp``: some reader is on another host. Call it inside an actor if ``over_rdma``."""
        cuda, rdma_header, rdma_blocks = [], None, []
        if self.slots[0].is_cuda:
            from torch.multiprocessing.reductions import reduce_tensor

            cuda = [reduce_tensor(slot) for slot in self.slots]
        if over_rdma:
            from monarch.rdma import RDMABuffer

            rdma_header = RDMABuffer(torch.frombuffer(self.header.bytes, dtype=torch.uint8))
            rdma_blocks = [[RDMABuffer(slot[start:stop]) for start, stop in self.blocks] for slot in self.slots]
        if over_tcp and self._address is None:
            self._address = block_server().serve(self)
        place = self.rank, os.getpid(), self.fd, self.slot_bytes
        ways = cuda, host_identity(), rdma_header, rdma_blocks, self._address
        return RegionHandle(*place, self.blocks, self.sums, *ways)

    def withdraw(self) -> None:
        """Mark all slots as failed and stop serving; waiting readers raise."""
        self.header.stamps[:] = FAILED
        if self._address is not None:
            block_server().forget(self._address)
            self._address = None

    # for readers over TCP (tcp/server.py: BlockSource)

    def look(self, slot: int, block: int, stamp: int) -> tuple[Status, int]:
        held = int(self.header.stamps[slot])
        if block >= len(self.blocks):
            raise IndexError(block)
        if held == stamp:
            return Status.READY, held
        return (Status.GONE if is_unavailable(held, stamp) else Status.WAITING), held

    def block(self, slot: int, block: int) -> Block:
        start, stop = self.blocks[block]
        offset = header_pages(len(self.blocks)) + slot * self.slot_bytes + start
        return Block(offset, stop - start, int(self.header.checksums[slot, block]))

    def difference(self, slot: int, block: int, held: int) -> bytes | None:
        there = [other for other in range(NUM_SLOTS) if other != slot and int(self.header.stamps[other]) == held]
        if not there:
            return None
        places = [self.block(each, block) for each in (there[0], slot)]
        changes = difference(*(self.memory[place.offset : place.offset + place.nbytes] for place in places))
        return changes if int(self.header.stamps[there[0]]) == held else None  # it may have been overwritten meanwhile


def header_pages(num_blocks: int) -> int:
    """Bytes in front of the first slot."""
    nbytes = Header.nbytes(num_blocks)
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE

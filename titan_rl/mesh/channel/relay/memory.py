"""A generator rank's copy of a version, in memory that others read while it still comes in.

Behind a header lie the bytes as the rank's read plan has them, the same for every replica. Each block has a stamp of
its own, so whoever takes it from here is one block behind, and not one version. A block's checksum is the trainer's,
and is handed on with it.
"""

import mmap
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xxhash

from titan_rl.mesh.channel.memory.region import WRITING
from titan_rl.mesh.channel.plan import Read, ReadPlan
from titan_rl.mesh.channel.tcp.client import IDLE_SECONDS, Done, Refused, Version, WrongBlock
from titan_rl.mesh.channel.tcp.protocol import Frame, Status
from titan_rl.mesh.channel.tcp.server import Address, Block, block_server

_MADV_REMOVE = 9
_TARGET, _FAILED, _NUM_STAMPS = 0, 1, 2
_FIRST_POLL, _LAST_POLL = 0.0002, 0.01
_CHUNK_BYTES = 256 << 10


class RelayHeader:
    """``target``: the stamp that is coming in, or came in last; ``failed``: the last that did not."""

    def __init__(self, memory: mmap.mmap, num_blocks: int):
        numbers = np.frombuffer(memory, np.uint64, count=_NUM_STAMPS + 2 * num_blocks)
        stamps = numbers[: _NUM_STAMPS + num_blocks].view(np.int64)
        self.state, self.stamps = stamps[:_NUM_STAMPS], stamps[_NUM_STAMPS:]
        self.checksums = numbers[_NUM_STAMPS + num_blocks :]

    def look(self, block: int, stamp: int) -> tuple[Status, int]:
        """Whether a block is there under this stamp; and its stamp. Errors: IndexError."""
        held, target = int(self.stamps[block]), int(self.state[_TARGET])
        if held == stamp:
            return Status.READY, held
        if max(held, target) > stamp or int(self.state[_FAILED]) == stamp:
            return Status.GONE, held
        return (Status.WAITING if target == stamp else Status.IDLE), held


def _data_offset(num_blocks: int) -> int:
    nbytes = 8 * (_NUM_STAMPS + 2 * num_blocks)
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


@dataclass(frozen=True)
class RelayHandle:
    """Address of another rank's relay, for readers."""

    name: str
    """Of its process, for errors and the log."""
    pid: int
    fd: int
    nbytes: int
    num_blocks: int
    tcp: Address


class Relay:
    """Relay memory of its owner; only its reader writes."""

    def __init__(self, plan: ReadPlan, name: str = ""):
        """Errors: OSError if nothing can listen at this host's address."""
        self._places, self.name, self._nbytes = plan.reads, name, max(plan.nbytes, 1)
        begin = _data_offset(len(plan.reads))
        self._begin, size = begin, begin + self._nbytes
        self.fd = os.memfd_create("titan_rl_relay")
        os.ftruncate(self.fd, size)
        self._mapping = mmap.mmap(self.fd, size)
        self.memory = memoryview(self._mapping)
        self.header = RelayHeader(self._mapping, len(plan.reads))
        self.header.state[:] = self.header.stamps[:] = WRITING
        self.data = torch.frombuffer(self._mapping, dtype=torch.uint8, offset=begin, count=self._nbytes)
        self._differences: dict[int, tuple[int, int, bytes]] = {}
        """Of blocks that came so: stamps of the earlier and the later version, and the difference."""
        self._address = block_server().serve(self)

    @property
    def handle(self) -> RelayHandle:
        return RelayHandle(self.name, os.getpid(), self.fd, self._nbytes, len(self._places), self._address)

    def begin(self, stamp: int) -> None:
        """Begin to receive a version; blocks with its stamp stay."""
        if self.header.state[_TARGET] != stamp:
            self.header.stamps[:] = WRITING
            self._differences.clear()
        self.header.state[_FAILED] = WRITING
        self.header.state[_TARGET] = stamp

    def has(self, block: int, stamp: int) -> bool:
        return int(self.header.stamps[block]) == stamp

    def keep(self, block: int, held: int, stamp: int, changes: bytes) -> None:
        """Keep a block's difference between two versions, for those that have the earlier one."""
        self._differences[block] = held, stamp, changes

    def put(self, block: int, stamp: int, checksum: int) -> None:
        """Stamp a block whose checked bytes are in ``data``."""
        self.header.checksums[block] = checksum
        self.header.stamps[block] = stamp

    def fail(self, stamp: int) -> None:
        """Mark a version as failed; waiting ranks fail over."""
        self.header.state[_FAILED] = stamp

    def let_go(self) -> None:
        """Release the memory; no version is held."""
        self.header.stamps[:] = WRITING
        self._mapping.madvise(_MADV_REMOVE, self._begin, len(self._mapping) - self._begin)

    def close(self) -> None:
        """Stop serving."""
        self.header.state[:] = self.header.stamps[:] = WRITING
        block_server().forget(self._address)

    # for readers over TCP (tcp/server.py: BlockSource)

    def look(self, slot: int, block: int, stamp: int) -> tuple[Status, int]:
        return self.header.look(block, stamp)

    def block(self, slot: int, block: int) -> Block:
        read = self._places[block]
        return Block(self._begin + read.into, read.nbytes, int(self.header.checksums[block]))

    def difference(self, slot: int, block: int, held: int) -> bytes | None:
        kept = self._differences.get(block)
        if kept is None or kept[:2] != (held, int(self.header.stamps[block])):
            return None
        return kept[2]


class RelayView:
    """Another process's relay on this host, mapped."""

    def __init__(self, handle: RelayHandle):
        """Errors: OSError if the process is gone."""
        self.handle, begin = handle, _data_offset(handle.num_blocks)
        with open(f"/proc/{handle.pid}/fd/{handle.fd}", "rb") as file:
            memory = mmap.mmap(file.fileno(), begin + handle.nbytes, access=mmap.ACCESS_READ)
        self.header = RelayHeader(memory, handle.num_blocks)
        self._data = np.frombuffer(memory, np.uint8, offset=begin)

    def take(self, version: Version, reads: Sequence[Read], buffer: torch.Tensor, done: Done) -> None:
        """As ``BlockClient.take``."""
        for read in reads:
            self._await(read.block, version.stamp, version.deadline)
            if version.held is not None:
                version.held.places.discard(read.into)
            into = buffer.numpy()[read.into : read.into + read.nbytes]
            checksum = int(self.header.checksums[read.block])
            if _copy(self._data[read.offset : read.offset + read.nbytes], into) != checksum:
                raise WrongBlock(read)
            done(read, checksum)

    def _await(self, block: int, stamp: int, deadline: float) -> None:
        """Errors: Refused; ConnectionError if its process is gone."""
        pause, begun = _FIRST_POLL, time.monotonic()
        while (status := self.header.look(block, stamp)[0]) is not Status.READY:
            now = time.monotonic()
            if status is Status.WAITING:
                begun = now
            if status is Status.GONE or now > begun + IDLE_SECONDS:
                raise Refused(Frame(status, *self.header.look(block, stamp)[1:]))
            if now > deadline:
                raise Refused(Frame(Status.LATE))
            if not os.path.exists(f"/proc/{self.handle.pid}"):
                raise ConnectionError("its process is gone")
            time.sleep(pause)
            pause = min(2 * pause, _LAST_POLL)


def _copy(source: np.ndarray, into: np.ndarray) -> int:
    """The checksum of what is in ``into`` now."""
    digest = xxhash.xxh3_64()
    for start in range(0, len(into), _CHUNK_BYTES):
        chunk = into[start : start + _CHUNK_BYTES]
        np.copyto(chunk, source[start : start + _CHUNK_BYTES])
        digest.update(chunk.data)
    return digest.intdigest()

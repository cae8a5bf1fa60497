"""A reader's ways to one holder's region. Each copies blocks into the reader's own memory and checks them.

Every source but Tcp has ``header`` (as it was when last refreshed), ``refresh``, and ``take``, which leaves checked
blocks in the buffer; what comes by RDMA is fetched before that. Over TCP stamps and checksums come with the blocks.
"""

import math
import mmap
import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch
import xxhash

from titan_rl.mesh.channel.memory.checksums import checksums
from titan_rl.mesh.channel.memory.region import NUM_SLOTS, Header, RegionHandle, header_pages
from titan_rl.mesh.channel.memory.streams import stream_for
from titan_rl.mesh.channel.plan import Read
from titan_rl.mesh.channel.tcp.client import BlockClient
from titan_rl.mesh.channel.transports import RDMA, Transport

if TYPE_CHECKING:  # its import takes a while
    from monarch.rdma import RDMAAction

_CHUNK_BYTES = 256 << 10
"""Copied and then hashed while it is still in the core's cache."""


class TornRead(RuntimeError):
    """Incomplete read of the requested version."""


class VersionUnavailable(TornRead):
    """The requested version is not available and never will be."""


class SharedMemory:
    """A mapping of the holder's memory, on one host."""

    def __init__(self, handle: RegionHandle):
        self.handle = handle
        begin = header_pages(len(handle.blocks))
        size = begin + (0 if handle.cuda else NUM_SLOTS * handle.slot_bytes)
        with open(f"/proc/{handle.pid}/fd/{handle.fd}", "rb") as file:
            memory = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        self.header = Header(memory, len(handle.blocks))
        self._slots = np.frombuffer(memory, np.uint8, offset=begin).reshape(-1, handle.slot_bytes)

    async def refresh(self, timeout: float) -> None:
        """The header is the holder's own."""

    def is_gone(self) -> bool:
        """Whether the holder's process has ended."""
        return not os.path.exists(f"/proc/{self.handle.pid}")

    def is_whole(self, slot: int) -> bool:
        """Whether all of it is what the header's checksums say."""
        data, checksums = self._slots[slot], self.header.checksums[slot]
        return all(
            xxhash.xxh3_64_intdigest(data[start:stop].data) == int(expected)
            for (start, stop), expected in zip(self.handle.blocks, checksums, strict=True)
        )

    def take(self, slot: int, reads: list[Read], buffer: torch.Tensor) -> None:
        """Errors: TornRead if some block's checksum is not the header's."""
        for read in reads:
            self._copy(slot, read, buffer)

    def _copy(self, slot: int, read: Read, buffer: torch.Tensor) -> None:
        source = self._slots[slot, read.offset : read.offset + read.nbytes]
        into = buffer.numpy()[read.into : read.into + read.nbytes]
        digest = xxhash.xxh3_64()
        for start in range(0, read.nbytes, _CHUNK_BYTES):
            chunk = into[start : start + _CHUNK_BYTES]
            np.copyto(chunk, source[start : start + _CHUNK_BYTES])
            digest.update(chunk.data)
        _compare([digest.intdigest()], self, slot, [read])


class CudaIpc(SharedMemory):
    """The header is mapped; the slots are another process's GPU memory, mapped by CUDA IPC."""

    def __init__(self, handle: RegionHandle, device: torch.device):
        super().__init__(handle)
        self._tensors = [rebuild(*arguments) for rebuild, arguments in handle.cuda]
        self._stream = stream_for(device, self._tensors[0].device)

    def take(self, slot: int, reads: list[Read], buffer: torch.Tensor) -> None:
        """Copy all blocks, then check all checksums at once. Errors: TornRead."""
        with self._stream.running():
            for read in reads:
                source = self._tensors[slot][read.offset : read.offset + read.nbytes]
                buffer[read.into : read.into + read.nbytes].copy_(source, non_blocking=self._stream.is_asynchronous)
            self._stream.synchronize()
            _check(self, slot, reads, buffer)


class Rdma:
    """RDMABuffers of the holder; ibverbs or TCP is Monarch's setting. Inside an actor only."""

    def __init__(self, handle: RegionHandle, device: torch.device):
        self.handle, self._stream = handle, stream_for(device)
        self._header_bytes = torch.zeros(Header.nbytes(len(handle.blocks)), dtype=torch.uint8)
        self.header = Header(self._header_bytes.numpy().data, len(handle.blocks))

    def is_gone(self) -> bool:
        """Not known here: a read fails with a time-out."""
        return False

    async def refresh(self, timeout: float) -> None:
        await self.handle.rdma_header.read_into(self._header_bytes, timeout=math.ceil(timeout))

    async def fetch(self, slot: int, reads: list[Read], buffer: torch.Tensor, timeout: float) -> None:
        """All blocks in one request."""
        await self._reading(slot, reads, buffer).submit(timeout=math.ceil(timeout))

    def _reading(self, slot: int, reads: list[Read], buffer: torch.Tensor) -> "RDMAAction":
        from monarch.rdma import RDMAAction

        action = RDMAAction()
        for read in reads:
            action.read_remote(buffer[read.into : read.into + read.nbytes], self.handle.rdma_blocks[slot][read.block])
        return action

    # where there is no event loop

    def refresh_now(self, timeout: float) -> None:
        """As ``refresh``."""
        self.handle.rdma_header.read_into(self._header_bytes, timeout=math.ceil(timeout)).get()

    def fetch_now(self, slot: int, reads: list[Read], buffer: torch.Tensor, timeout: float) -> None:
        """As ``fetch``."""
        self._reading(slot, reads, buffer).submit(timeout=math.ceil(timeout)).get()

    def take(self, slot: int, reads: list[Read], buffer: torch.Tensor) -> None:
        """They were fetched. Errors: TornRead if some block's checksum is not the header's."""
        with self._stream.running():
            _check(self, slot, reads, buffer)


class Tcp:
    """The holder's block server (relay/gathering.py takes from it)."""

    def __init__(self, handle: RegionHandle):
        assert handle.tcp is not None  # as the transport says, the region is served
        self.handle, self.client = handle, BlockClient(handle.tcp)

    @property
    def name(self) -> str:
        return f"trainer rank {self.handle.rank}"


Polled = SharedMemory | CudaIpc | Rdma
"""Those whose header is looked at."""
Source = Polled | Tcp


def open_source(handle: RegionHandle, transport: Transport, device: torch.device) -> Source:
    """``device``: of the buffer that is read into. Errors: ValueError if this transport does not reach the region."""
    if transport in RDMA:
        return Rdma(handle, device)
    if transport == "tcp":
        return Tcp(handle)
    if bool(handle.cuda) != (transport == "cuda_ipc"):
        where = "on its GPU" if handle.cuda else "in its host's memory"
        raise ValueError(f"trainer rank {handle.rank} stages its weights {where}, which {transport} does not reach")
    return CudaIpc(handle, device) if transport == "cuda_ipc" else SharedMemory(handle)


def _check(source: Polled, slot: int, reads: list[Read], buffer: torch.Tensor) -> None:
    digests = checksums(source.handle.sums, buffer, [(read.into, read.into + read.nbytes) for read in reads])
    _compare(digests, source, slot, reads)


def _compare(digests: Iterable[int], source: Polled, slot: int, reads: list[Read]) -> None:
    for digest, read in zip(digests, reads, strict=True):
        if int(digest) != int(source.header.checksums[slot, read.block]):
            raise TornRead(f"block {read.block} of trainer rank {source.handle.rank} fails its checksum")


def share_out(reads: list[tuple[Polled, Read]], workers: int) -> Iterator[list[tuple[Polled, Read]]]:
    """Split reads into about as many bytes for each worker."""
    share, size, total = [], 0, sum(read.nbytes for _, read in reads)
    for item in reads:
        share.append(item)
        size += item[1].nbytes
        if size * workers >= total:
            yield share
            share, size = [], 0
    if share:
        yield share

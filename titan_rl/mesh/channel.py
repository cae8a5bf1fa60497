"""The weight channel: trainer ranks lay a version down, generators pick it up, tensor bytes touch no controller.

Each trainer rank owns one region of memory: a header page and two slots. A version goes into slot
``version % 2``: its stamp is erased, bytes are written in the generators' dtype, and the stamp is set after the last
byte. A reader holds a version to be whole only if stamp and checksum agree before and the stamp still does after it
was applied. On one host the region is an anonymous shared mapping, reached through the owner's file table, so that
nothing is left behind whoever dies; between hosts it is read with RDMABuffer.

Each rank lays down just its own shards; a reader puts a tensor together from the rows that each rank holds.
"""

import asyncio
import math
import mmap
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import xxhash
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

_HEADER_BYTES = mmap.PAGESIZE
_ALIGNMENT = 64
_NUM_SLOTS = 2
_WRITING = -1

Transport = Literal["shared_memory", "rdma"]


class TornRead(RuntimeError):
    """A version was replaced, or never whole, while it was read."""


@dataclass(frozen=True)
class Chunk:
    """Rows [row, row + rows) of a tensor, at ``offset`` bytes of its rank's slot."""

    name: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    row: int
    rows: int
    offset: int


@dataclass(frozen=True)
class RegionHandle:
    """All that a reader needs to reach one rank's region; small, and made once."""

    rank: int
    pid: int
    fd: int
    slot_bytes: int
    dtype: str
    chunks: list[Chunk]
    remote: Any = None
    """RDMABuffers of the header and of each slot, if the transport is RDMA."""


@dataclass(frozen=True)
class WeightVersion:
    """What is announced of a version, and all that is sent for it."""

    version: int
    checksums: tuple[int, ...]
    """Of each rank's slot, in rank order."""

    @property
    def slot(self) -> int:
        return self.version % _NUM_SLOTS


def choose_transport(setting: str, trainer_host: str, generator_host: str) -> Transport:
    """``auto`` is shared memory on one host and RDMA between hosts."""
    if setting == "auto":
        return "shared_memory" if trainer_host == generator_host else "rdma"
    return setting


def _local_shard(parameter: torch.Tensor) -> tuple[torch.Tensor, int]:
    """This rank's rows, and the first one's place in the whole. Errors: ValueError unless sharded by rows alone."""
    if not isinstance(parameter, DTensor):
        return parameter.detach(), 0
    local = parameter.to_local().detach()
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    if tuple(shape[1:]) != tuple(parameter.shape[1:]):
        raise ValueError(f"a parameter of shape {tuple(parameter.shape)} is not sharded by rows")
    return local, offset[0]


def _checksum(slot: memoryview) -> int:
    return xxhash.xxh3_64_intdigest(slot)


class _Region:
    """A mapped region: its stamps, and its slots as bytes."""

    def __init__(self, memory, slot_bytes: int):
        self.stamps = np.frombuffer(memory, np.int64, _NUM_SLOTS)
        self.bytes = memoryview(memory)
        self.slot_bytes = slot_bytes

    def slot(self, index: int) -> memoryview:
        start = _HEADER_BYTES + index * self.slot_bytes
        return self.bytes[start : start + self.slot_bytes]


def _chunk_view(slot: memoryview, chunk: Chunk, dtype: torch.dtype) -> torch.Tensor:
    shape = (chunk.rows, *chunk.shape[1:])
    count = int(np.prod(shape))
    with warnings.catch_warnings():  # a reader's mapping is read-only, and nothing here writes to it
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(slot, dtype=dtype, count=count, offset=chunk.offset).view(shape)


class WeightWriter:
    """One trainer rank's side of the channel. The only writer of its region."""

    def __init__(self, rank: int, parameters: dict[str, torch.Tensor], dtype: torch.dtype):
        self.rank, self.dtype = rank, dtype
        self._shards: list[tuple[Chunk, torch.Tensor]] = []
        offset = 0
        for name, parameter in parameters.items():
            local, row = _local_shard(parameter)
            if local.numel():
                chunk = Chunk(name, tuple(parameter.shape), row, local.shape[0], offset)
                self._shards.append((chunk, parameter))
                offset += -(-local.numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        self.slot_bytes = max(offset, _ALIGNMENT)
        size = _HEADER_BYTES + _NUM_SLOTS * self.slot_bytes
        self._fd = os.memfd_create(f"titan_rl_weights_{rank}")
        os.ftruncate(self._fd, size)
        self._memory = mmap.mmap(self._fd, size)
        self._region = _Region(self._memory, self.slot_bytes)
        self._region.stamps[:] = _WRITING

    def handle(self, transport: Transport) -> RegionHandle:
        """Inside an actor if the transport is RDMA."""
        return RegionHandle(
            rank=self.rank,
            pid=os.getpid(),
            fd=self._fd,
            slot_bytes=self.slot_bytes,
            dtype=str(self.dtype).removeprefix("torch."),
            chunks=[chunk for chunk, _ in self._shards],
            remote=self._register() if transport == "rdma" else None,
        )

    def _register(self):
        from monarch.rdma import RDMABuffer

        whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        ends = [0, _HEADER_BYTES, *(_HEADER_BYTES + (i + 1) * self.slot_bytes for i in range(_NUM_SLOTS))]
        return [RDMABuffer(whole[start:end]) for start, end in zip(ends[:-1], ends[1:], strict=True)]

    @torch.no_grad()
    def publish(self, version: int) -> int:
        """Cast and copy this rank's shards into the version's slot; gives back its checksum."""
        index = version % _NUM_SLOTS
        slot = self._region.slot(index)
        self._region.stamps[index] = _WRITING
        for chunk, parameter in self._shards:
            _chunk_view(slot, chunk, self.dtype).copy_(_local_shard(parameter)[0])
        checksum = _checksum(slot)
        self._region.stamps[index] = version
        return checksum


class WeightReader:
    """A generator's side of the channel: fetch a version, hand out its tensors, prove that it stayed whole."""

    def __init__(self, handles: list[RegionHandle], transport: Transport):
        self.handles, self.transport = handles, transport
        self.dtype = getattr(torch, handles[0].dtype)
        self._regions = [self._open(handle) for handle in handles]
        self._parts: dict[str, list[tuple[int, Chunk]]] = {}
        for index, handle in enumerate(handles):
            for chunk in handle.chunks:
                self._parts.setdefault(chunk.name, []).append((index, chunk))

    def _open(self, handle: RegionHandle) -> _Region:
        size = _HEADER_BYTES + _NUM_SLOTS * handle.slot_bytes
        if self.transport == "rdma":
            return _Region(bytearray(size), handle.slot_bytes)
        with open(f"/proc/{handle.pid}/fd/{handle.fd}", "rb") as file:
            return _Region(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ), handle.slot_bytes)

    async def fetch(self, version: WeightVersion, timeout: float) -> None:
        """Bring the bytes here (nothing to do in shared memory), and check that they are that version, whole."""
        if self.transport == "rdma":
            for handle, region in zip(self.handles, self._regions, strict=True):
                await self._read_remote(handle, region, version.slot, timeout)
        await asyncio.to_thread(self._check_whole, version)

    def _check_whole(self, version: WeightVersion) -> None:
        self._check_stamps(version)
        for handle, region, checksum in zip(self.handles, self._regions, version.checksums, strict=True):
            if _checksum(region.slot(version.slot)) != checksum:
                raise TornRead(f"weights version {version.version} of trainer rank {handle.rank} fail their checksum")

    @staticmethod
    async def _read_remote(handle: RegionHandle, region: _Region, slot: int, timeout: float) -> None:
        header, *slots = handle.remote
        await slots[slot].read_into(region.slot(slot), timeout=math.ceil(timeout))
        await header.read_into(region.bytes[:_HEADER_BYTES], timeout=math.ceil(timeout))

    def _check_stamps(self, version: WeightVersion) -> None:
        for handle, region in zip(self.handles, self._regions, strict=True):
            stamp = int(region.stamps[version.slot])
            if stamp != version.version:
                raise TornRead(
                    f"trainer rank {handle.rank} holds version {stamp} where {version.version} was announced"
                )

    def tensors(self, version: WeightVersion) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors by Hugging Face name; views of the mapping where one rank holds all rows."""
        for name, parts in self._parts.items():
            views = [
                _chunk_view(self._regions[index].slot(version.slot), chunk, self.dtype)
                for index, chunk in sorted(parts, key=lambda part: part[1].row)
            ]
            yield name, views[0] if len(views) == 1 else torch.cat(views)

    def confirm(self, version: WeightVersion) -> None:
        """After the last byte was used. Errors: TornRead if the slot was written to meanwhile."""
        self._check_stamps(version)

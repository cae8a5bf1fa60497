"""Packed rows for trainer ranks: the controller stages them once, and each rank pulls those of its own group.

What is sent is a handle. On one host the bytes lie in an anonymous shared mapping; between hosts an RDMABuffer is read,
or they are asked for over TCP.
"""

import math
import mmap
import os
import pickle
import time
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from titan_rl.mesh.channel.plan import Read
from titan_rl.mesh.channel.tcp.client import BlockClient, Version
from titan_rl.mesh.channel.tcp.protocol import Status
from titan_rl.mesh.channel.tcp.server import Address, Block, block_server
from titan_rl.mesh.channel.transports import RDMA
from titan_rl.mesh.resources.host_identity import host_identity
from titan_rl.mesh.resources.network import has_address


@dataclass(frozen=True)
class RowsHandle:
    """Location of one group's staged rows."""

    pid: int
    fd: int
    offset: int
    nbytes: int
    checksum: int
    host: str
    """Whose processes map them, by its identity; empty if even its own are to read in another way."""
    rdma: Any = None
    """An RDMABuffer, if some reader does not map them."""
    tcp: tuple[Address, int] | None = None
    """Or where they are served, and their number there."""


class StagedRows:
    """Staged rows of all groups, within a ``with`` block. ``rows[group]`` is anything that pickles."""

    fd = -1
    """For the server (tcp/server.py: BlockSource): it sends from memory, since the file is closed with the block."""

    def __init__(self, rows: list[list], over_rdma: bool, over_tcp: bool = False, maps: bool = True):
        """``over_rdma``, ``over_tcp``: some reader may be on another host, or is to read so; ``maps``: those of this
        one map."""
        pickled = [pickle.dumps(group, protocol=pickle.HIGHEST_PROTOCOL) for group in rows]
        self._fd = os.memfd_create("titan_rl_rows")
        for data in pickled:
            os.write(self._fd, data)
        self._memory = mmap.mmap(self._fd, sum(map(len, pickled)))
        self.memory = memoryview(self._memory)
        self.handles: list[RowsHandle] = []
        offset, host = 0, host_identity() if maps else ""
        self._address = block_server().serve(self) if over_tcp else None
        for data in pickled:
            rdma = self._register(offset, len(data)) if over_rdma else None
            digest = xxhash.xxh3_64_intdigest(data)
            tcp = None if self._address is None else (self._address, len(self.handles))
            self.handles.append(RowsHandle(os.getpid(), self._fd, offset, len(data), digest, host, rdma, tcp))
            offset += len(data)

    @classmethod
    def by(cls, rows: list[list], transport: str) -> "StagedRows":
        """As ``mesh.transport`` says. By itself: over TCP to whoever is on another host, if this one has an address."""
        over_rdma, over_tcp = transport in RDMA, transport == "tcp"
        return cls(rows, over_rdma, over_tcp or (transport == "auto" and has_address()), not (over_rdma or over_tcp))

    def look(self, slot: int, block: int, stamp: int) -> tuple[Status, int]:
        return (Status.READY if self.handles[block] and not slot + stamp else Status.GONE), 0

    def block(self, slot: int, block: int) -> Block:
        handle = self.handles[block]
        return Block(handle.offset, handle.nbytes, handle.checksum)

    def difference(self, slot: int, block: int, held: int) -> None:
        """None: batches have no earlier versions."""

    def _register(self, offset: int, nbytes: int) -> Any:
        """An RDMABuffer."""
        from monarch.rdma import RDMABuffer

        return RDMABuffer(torch.frombuffer(self._memory, dtype=torch.uint8)[offset : offset + nbytes])

    def __enter__(self) -> list[RowsHandle]:
        return self.handles

    def __exit__(self, *_: object) -> None:
        if self._address is not None:
            block_server().forget(self._address)
        os.close(self._fd)
        for handle in self.handles:
            if handle.rdma is not None:
                handle.rdma.drop()


def pull_rows(handle: RowsHandle, timeout: float) -> list[Any]:
    """What was staged for one group, such as its rows. Call it inside an actor if they come over RDMA.

    Errors: ValueError if they lie in another host's memory, or the bytes are not what was staged; Refused, WrongBlock
    or OSError if they do not come over TCP."""
    data: bytes | memoryview
    if handle.host == host_identity():
        with open(f"/proc/{handle.pid}/fd/{handle.fd}", "rb") as file:
            data = os.pread(file.fileno(), handle.nbytes, handle.offset)
    elif handle.rdma is not None:
        into = torch.empty(handle.nbytes, dtype=torch.uint8)
        handle.rdma.read_into(into, timeout=math.ceil(timeout)).get()
        data = into.numpy().data
    elif handle.tcp is not None:
        data = _asked_for(handle, *handle.tcp, timeout)
    else:
        raise ValueError("a batch's rows lie in another host's memory, and are not served to others")
    if xxhash.xxh3_64_intdigest(data) != handle.checksum:
        raise ValueError("a batch's rows fail their checksum")
    return pickle.loads(data)


def _asked_for(handle: RowsHandle, address: Address, number: int, timeout: float) -> memoryview:
    data = torch.empty(handle.nbytes, dtype=torch.uint8)
    read, deadline = Read(0, number, 0, handle.nbytes, 0), time.monotonic() + timeout
    BlockClient(address).take(Version(0, 0, deadline), [read], data, lambda read, checksum: None)
    return data.numpy().data

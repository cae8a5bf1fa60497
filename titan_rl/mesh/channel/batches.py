"""Packed rows for trainer ranks: the controller stages them once, and each rank pulls those of its own group.

What is sent is a handle. On one host the bytes lie in an anonymous shared mapping; between hosts an RDMABuffer is read.
"""

import math
import mmap
import os
import pickle
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from titan_rl.data.types import Row
from titan_rl.mesh.launch.identity import host_identity


@dataclass(frozen=True)
class RowsHandle:
    """Where one group's rows lie."""

    pid: int
    fd: int
    offset: int
    nbytes: int
    checksum: int
    host: str
    """By its identity; empty if even its own processes are to read by RDMA."""
    rdma: Any = None
    """An RDMABuffer, if some reader is on another host."""


class StagedRows:
    """Rows of all groups, for as long as the block lasts. ``rows[group]`` is anything that pickles."""

    def __init__(self, rows: list[list], over_rdma: bool, maps: bool = True):
        """``over_rdma``: some reader is on another host, or is to read so; ``maps``: those of this one map."""
        pickled = [pickle.dumps(group, protocol=pickle.HIGHEST_PROTOCOL) for group in rows]
        self._fd = os.memfd_create("titan_rl_rows")
        for data in pickled:
            os.write(self._fd, data)
        self._memory = mmap.mmap(self._fd, sum(map(len, pickled)))
        self.handles, offset, host = [], 0, host_identity() if maps else ""
        for data in pickled:
            rdma = self._register(offset, len(data)) if over_rdma else None
            digest = xxhash.xxh3_64_intdigest(data)
            self.handles.append(RowsHandle(os.getpid(), self._fd, offset, len(data), digest, host, rdma))
            offset += len(data)

    def _register(self, offset: int, nbytes: int):
        from monarch.rdma import RDMABuffer

        return RDMABuffer(torch.frombuffer(self._memory, dtype=torch.uint8)[offset : offset + nbytes])

    def __enter__(self) -> list[RowsHandle]:
        return self.handles

    def __exit__(self, *_) -> None:
        os.close(self._fd)
        for handle in self.handles:
            if handle.rdma is not None:
                handle.rdma.drop()


def pull_rows(handle: RowsHandle, timeout: float) -> list[Row]:
    """Call it inside an actor if the rows come over RDMA. Errors: ValueError if the bytes are not what was staged."""
    if handle.host != host_identity():
        data = torch.empty(handle.nbytes, dtype=torch.uint8)
        handle.rdma.read_into(data, timeout=math.ceil(timeout)).get()
        data = data.numpy()
    else:
        with open(f"/proc/{handle.pid}/fd/{handle.fd}", "rb") as file:
            data = os.pread(file.fileno(), handle.nbytes, handle.offset)
    if xxhash.xxh3_64_intdigest(data) != handle.checksum:
        raise ValueError("a batch's rows fail their checksum")
    return pickle.loads(data)

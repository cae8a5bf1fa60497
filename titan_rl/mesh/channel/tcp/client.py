"""Takes blocks from another host's server, over several connections side by side, straight into the reader's memory.

A connection lasts for one version. Every wait ends: a server that has nothing yet says so twice a second, so silence
means that it, its host or the link is gone.
"""

import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import xxhash

from titan_rl.mesh.channel.plan import Read
from titan_rl.mesh.channel.tcp.differences import WrongDifference, apply_difference, longest_difference
from titan_rl.mesh.channel.tcp.protocol import (
    FRAME_BYTES,
    MAGIC,
    MAX_BLOCKS,
    NO_STAMP,
    Frame,
    ProtocolError,
    Request,
    Status,
)
from titan_rl.mesh.channel.tcp.security import connected
from titan_rl.mesh.channel.tcp.server import Address, read_exactly

NUM_STREAMS = 4
"""Connections of a reader, shared out over those that it reads from; each of them has at least one."""
SILENCE_SECONDS = 10.0
"""How long a server may say nothing, and a connection may take to be made."""
IDLE_SECONDS = 5.0
"""How long one may say that it has not begun a version."""
_GRACE_SECONDS = 1.0
"""Beyond a deadline: the server, which has the same one, says first what did not come."""
_CHUNK_BYTES = 512 << 10
"""Received and then hashed while it is still in the core's cache."""

Done = Callable[[Read, int], None]
"""Called with each block that has come, and its checksum."""


@dataclass
class Held:
    """Version that the reader's memory holds, where it is not overwritten yet."""

    stamp: int
    places: set[int]
    """Beginnings of its blocks there (``Read.into``)."""
    keep: Callable[[Read, bytes], None]
    """Called with each difference that has come, before ``Done``."""


@dataclass(frozen=True)
class Version:
    """Stamp and slot of a requested version, with its deadline (``time.monotonic``)."""

    stamp: int
    slot: int
    deadline: float
    held: Held | None = None
    """Earlier version in the reader's memory."""


class Refused(RuntimeError):
    """Server's refusal of blocks, with its ``status`` and ``stamp``."""

    def __init__(self, frame: Frame):
        self.status, self.stamp = frame.status, frame.stamp
        super().__init__(f"it says {frame.status.name.lower()}, and has {frame.stamp}")


class WrongBlock(RuntimeError):
    """Block with a wrong checksum. ``read``: which."""

    def __init__(self, read: Read):
        self.read = read
        super().__init__(f"block {read.block} fails its checksum")


class BlockClient:
    """Client of one block server. ``bytes_received`` counts wrong blocks, too."""

    def __init__(self, address: Address):
        self.address, self.bytes_received = address, 0
        self._counting = threading.Lock()

    def take(self, version: Version, reads: Sequence[Read], buffer: torch.Tensor, done: Done) -> None:
        """Read blocks of a version over an own connection into ``buffer`` (uint8, host memory). ``read.block`` and
        ``read.nbytes`` are the server's.

        Errors: Refused; WrongBlock; OSError if the connection fails, or is silent; TimeoutError among these."""
        patience = self._patience(version.deadline)
        with socket.create_connection((self.address.host, self.address.port), patience) as plain:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with connected(plain, self.address.is_tls) as stream:
                stream.sendall(MAGIC + self.address.token)
                for start in range(0, len(reads), MAX_BLOCKS):
                    self._take(stream, version, reads[start : start + MAX_BLOCKS], buffer, done)

    def _take(
        self,
        stream: socket.socket,
        version: Version,
        reads: Sequence[Read],
        buffer: torch.Tensor,
        done: Done,
    ) -> None:
        deadline, held = version.deadline, version.held
        seconds = max(deadline - time.monotonic(), 0.0)
        numbers = [read.block for read in reads]
        if held is not None and not all(read.into in held.places for read in reads):
            held = None  # some were overwritten in an attempt that failed
        has = NO_STAMP if held is None else held.stamp
        stream.sendall(Request(self.address.region, version.stamp, version.slot, seconds, numbers, has).pack())
        for read in reads:
            frame = self._awaited(stream, deadline)
            if held is not None:
                held.places.discard(read.into)
            if frame.status is Status.DIFFERENCE:
                self._change(stream, read, frame, buffer, deadline, held)
                done(read, frame.checksum)
                continue
            if frame.nbytes != read.nbytes:
                raise ProtocolError(f"block {read.block} has {frame.nbytes} bytes where {read.nbytes} are planned")
            into = buffer.numpy().data[read.into : read.into + read.nbytes]
            if self._receive(stream, into, deadline) != frame.checksum:
                raise WrongBlock(read)
            done(read, frame.checksum)

    def _awaited(self, stream: socket.socket, deadline: float) -> Frame:
        """The frame in front of a block. Errors: Refused; OSError."""
        begun = time.monotonic()
        while True:
            frame = Frame.unpack(read_exactly(stream, FRAME_BYTES, time.monotonic() + self._patience(deadline)))
            if frame.status in (Status.READY, Status.DIFFERENCE):
                return frame
            if frame.status not in (Status.WAITING, Status.IDLE):
                raise Refused(frame)
            if frame.status is Status.WAITING:
                begun = time.monotonic()
            elif time.monotonic() > begun + IDLE_SECONDS:
                raise Refused(frame)

    def _change(
        self,
        stream: socket.socket,
        read: Read,
        frame: Frame,
        buffer: torch.Tensor,
        deadline: float,
        held: Held | None,
    ) -> None:
        """Receive a difference, and apply it. Errors: WrongBlock; OSError."""
        if held is None or frame.nbytes > longest_difference(read.nbytes):
            raise ProtocolError(f"a difference of {frame.nbytes} bytes for block {read.block} of {read.nbytes}")
        changes, block = bytearray(frame.nbytes), buffer.numpy().data[read.into : read.into + read.nbytes]
        stream.settimeout(self._patience(deadline))
        self._fill(stream, memoryview(changes))
        try:
            apply_difference(changes, block)
        except WrongDifference as error:
            raise ProtocolError(str(error)) from None
        if xxhash.xxh3_64_intdigest(block) != frame.checksum:
            raise WrongBlock(read)
        held.keep(read, bytes(changes))

    def _receive(self, stream: socket.socket, into: memoryview, deadline: float) -> int:
        """Fill ``into``; its checksum. Errors: OSError."""
        digest = xxhash.xxh3_64()
        stream.settimeout(self._patience(deadline))
        for start in range(0, len(into), _CHUNK_BYTES):
            chunk = into[start : start + _CHUNK_BYTES]
            self._fill(stream, chunk)
            digest.update(chunk)
        return digest.intdigest()

    def _fill(self, stream: socket.socket, into: memoryview) -> None:
        count = len(into)
        while into:
            received = stream.recv_into(into)
            if not received:
                raise ConnectionError("the other end closed the connection")
            into = into[received:]
        with self._counting:
            self.bytes_received += count

    @staticmethod
    def _patience(deadline: float) -> float:
        return min(max(deadline - time.monotonic(), 0.0) + _GRACE_SECONDS, SILENCE_SECONDS)


def dealt(reads: Sequence[Read], streams: int) -> list[Sequence[Read]]:
    """Reads in turn to so many streams, so that all advance through the version together: whoever reads from us in the
    same order can follow close behind."""
    return [reads[start::streams] for start in range(min(streams, len(reads)))]


def streams_each(num_sources: int) -> int:
    """Connections to each of so many sources."""
    return max(1, NUM_STREAMS // max(num_sources, 1))

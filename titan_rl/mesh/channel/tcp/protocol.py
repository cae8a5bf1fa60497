"""Wire protocol of a block connection: frames of fixed size, and bytes of known length.

    client: MAGIC, token ─▶                              server: (nothing, and the end, if the token is wrong)
    client: region, stamp, slot, seconds, the stamp that it has, N, N numbers ─▶
                       ◀─ for each block in turn: WAITING or IDLE while it is not there, then READY, checksum and
                          its bytes; or DIFFERENCE, checksum and what changed since the version that the client has
                       ◀─ or one frame that says why no more will come

Nothing is read whose length the other end could choose without a limit.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum

MAGIC = b"titan_rl blocks 2"
TOKEN_BYTES = 32
HELLO_BYTES = len(MAGIC) + TOKEN_BYTES
MAX_BLOCKS = 1 << 16
"""In one request: 512 GiB in blocks of 8 MiB."""
MAX_SECONDS = 24 * 3600.0
MAX_BLOCK_BYTES = 1 << 40
NO_STAMP = -1
"""Of a client that has no earlier version."""
_REQUEST = struct.Struct(">IqIdqI")
_NUMBER = struct.Struct(">I")
_FRAME = struct.Struct(">BqQQ")
REQUEST_BYTES, NUMBER_BYTES, FRAME_BYTES = _REQUEST.size, _NUMBER.size, _FRAME.size


class ProtocolError(ConnectionError):
    """Violation of the block protocol by the other end."""


class Status(IntEnum):
    """Status of a requested block under a stamp."""

    READY = 0
    """Its bytes follow."""
    WAITING = 1
    """It is on its way here. Sent again and again, so that silence means that the host or the link is gone."""
    IDLE = 2
    """Nobody here has begun that version. Sent likewise."""
    GONE = 3
    """It will not come: it was superseded, or failed."""
    LATE = 4
    """It was not there after the seconds that were asked for."""
    UNKNOWN = 5
    """There is no such region, slot or block (any more)."""
    DIFFERENCE = 6
    """Its difference from the version that the client has follows (differences.py)."""


@dataclass(frozen=True)
class Request:
    """Request for blocks of one slot, in order."""

    region: int
    stamp: int
    slot: int
    seconds: float
    """For which the server may wait for them."""
    blocks: list[int]
    held: int = NO_STAMP
    """Stamp of the version that the client has."""

    def pack(self) -> bytes:
        head = _REQUEST.pack(self.region, self.stamp, self.slot, self.seconds, self.held, len(self.blocks))
        return head + b"".join(map(_NUMBER.pack, self.blocks))

    @staticmethod
    def count_in(head: bytes) -> int:
        """How many blocks follow a request's first bytes. Errors: ProtocolError if it says too much."""
        _, stamp, _, seconds, _, count = _REQUEST.unpack(head)
        if not 0 < count <= MAX_BLOCKS or not 0 <= seconds <= MAX_SECONDS or stamp < 0:
            raise ProtocolError(f"a request of {count} blocks of {stamp} within {seconds} s")
        return count

    @staticmethod
    def unpack(head: bytes, numbers: bytes) -> "Request":
        region, stamp, slot, seconds, held, _ = _REQUEST.unpack(head)
        return Request(region, stamp, slot, seconds, [number for (number,) in _NUMBER.iter_unpack(numbers)], held)


@dataclass(frozen=True)
class Frame:
    """Reply for a block. ``stamp``: the slot's current one."""

    status: Status
    stamp: int = 0
    checksum: int = 0
    nbytes: int = 0

    def pack(self) -> bytes:
        return _FRAME.pack(self.status, self.stamp, self.checksum, self.nbytes)

    @staticmethod
    def unpack(data: bytes) -> "Frame":
        """Errors: ProtocolError."""
        status, stamp, checksum, nbytes = _FRAME.unpack(data)
        if status > max(Status) or nbytes > MAX_BLOCK_BYTES:
            raise ProtocolError(f"a frame of kind {status} for {nbytes} bytes")
        return Frame(Status(status), stamp, checksum, nbytes)

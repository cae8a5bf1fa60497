"""Serves blocks of this process's regions to other hosts: reads only, of versions that are published.

It is bound to one interface, and a client that does not know its token hears nothing and is cut off. From shared memory
bytes go by sendfile, so they are not copied here; inside TLS they are encrypted straight from the mapping.
"""

import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from titan_rl.mesh.channel.tcp.pending_connections import BACKLOG, PendingConnections
from titan_rl.mesh.channel.tcp.protocol import (
    HELLO_BYTES,
    MAGIC,
    NUMBER_BYTES,
    REQUEST_BYTES,
    TOKEN_BYTES,
    Frame,
    Request,
    Status,
)
from titan_rl.mesh.channel.tcp.security import accepted, certificate_files
from titan_rl.mesh.resources.network import host_address

_HANDSHAKE_SECONDS, _IDLE_SECONDS, _SEND_SECONDS = 10.0, 60.0, 60.0
"""How long a client may take to show who it is; between two requests; to take any bytes."""
_TOLD_EVERY = 0.5
"""Seconds between two frames that say that a block is not there yet."""
_FIRST_POLL, _LAST_POLL = 0.0002, 0.01
_MAX_CLIENTS = 4096
"""Connections at a time of those who have shown a token."""


@dataclass(frozen=True)
class Block:
    """Location of a block in the file."""

    offset: int
    nbytes: int
    checksum: int


class BlockSource(Protocol):
    """Readable memory: an anonymous file, with the status of each block."""

    fd: int
    """-1: it may be closed at any time, and is not to be sent from."""
    memory: memoryview
    """All of the file."""

    def look(self, slot: int, block: int, stamp: int) -> tuple[Status, int]:
        """Whether a block is there under this stamp, and the stamp that it has. Errors: IndexError if there is none."""
        ...

    def block(self, slot: int, block: int) -> Block: ...

    def difference(self, slot: int, block: int, held: int) -> bytes | None:
        """Difference of a block from that of the version with the stamp ``held``; None: send the block."""
        ...


@dataclass(frozen=True)
class Address:
    """Address of a served region, with its token. Only the run's actors receive it."""

    host: str
    port: int
    region: int
    is_tls: bool
    token: bytes = field(repr=False)


class BlockServer:
    """Owns its socket and its clients' threads. One of a process is enough (``serve``)."""

    def __init__(self, host: str):
        """Errors: OSError if nothing can listen there; ValueError if only some of TLS's variables are set."""
        self.host, self._certificate = host, certificate_files()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family, backlog=BACKLOG)
        self.port, self._token = listener.getsockname()[1], secrets.token_bytes(TOKEN_BYTES)
        self._served: dict[int, BlockSource] = {}
        self._numbers = iter(range(1, 1 << 32))
        self._clients = threading.Semaphore(_MAX_CLIENTS)
        self._counting = threading.Lock()
        self.bytes_sent: Counter[int] = Counter()
        """Of each region that was ever served, counted when a block is begun."""
        self.num_refused = 0
        """Connections that showed no certificate or no token."""
        self._strangers = PendingConnections(listener, self._meet, "block client")

    def serve(self, source: BlockSource) -> Address:
        number = next(self._numbers)
        self._served[number] = source
        return Address(self.host, self.port, number, self._certificate is not None, self._token)

    def forget(self, address: Address) -> None:
        """Stop serving a region."""
        self._served.pop(address.region, None)

    def close(self) -> None:
        self._strangers.close()

    def _meet(self, connection: socket.socket, on_known: Callable[[], None]) -> None:
        """Everything with one client. What it does wrong ends its connection, and nothing else."""
        with connection:
            stream = self._admitted(connection)
            on_known()
            if stream is None or not self._clients.acquire(blocking=False):
                return
            try:
                with stream:
                    self._answer_all(stream)
            except (OSError, LookupError):  # it went away, or said what it may not; or the region went
                pass
            finally:
                self._clients.release()

    def _admitted(self, connection: socket.socket) -> socket.socket | None:
        """The stream to a client that knows the token; None for any other."""
        try:
            connection.settimeout(_HANDSHAKE_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream = accepted(connection, self._certificate)
            hello = read_exactly(stream, HELLO_BYTES, time.monotonic() + _HANDSHAKE_SECONDS)
            if secrets.compare_digest(hello, MAGIC + self._token):
                return stream
        except (OSError, ValueError):
            pass
        with self._counting:
            self.num_refused += 1
        return None

    def _answer_all(self, stream: socket.socket) -> None:
        while True:
            head = read_exactly(stream, REQUEST_BYTES, time.monotonic() + _IDLE_SECONDS)
            numbers = NUMBER_BYTES * Request.count_in(head)
            request = Request.unpack(head, read_exactly(stream, numbers, time.monotonic() + _IDLE_SECONDS))
            stream.settimeout(_SEND_SECONDS)
            for frame, block in self._answers(request):
                stream.sendall(frame.pack())
                if isinstance(block, Block):
                    self.send_block(stream, request.region, block)
                elif block is not None:
                    self._count(request.region, len(block))
                    stream.sendall(block)

    def _answers(self, request: Request) -> Iterator[tuple[Frame, Block | bytes | None]]:
        """Frames, and behind some of them a block, or its difference."""
        deadline = time.monotonic() + request.seconds
        for number in request.blocks:
            status, stamp = Status.WAITING, 0
            for status, stamp in self._looks(request, number, deadline):
                if status is not Status.READY:
                    yield Frame(status, stamp), None
            if status is not Status.READY:
                return
            served = self._served[request.region]
            block = served.block(request.slot, number)
            changes = served.difference(request.slot, number, request.held) if request.held >= 0 else None
            if self._look(request, number)[0] is not Status.READY:  # the checksum may be another version's
                yield Frame(Status.GONE, stamp), None
                return
            if changes is None:
                yield Frame(status, stamp, block.checksum, block.nbytes), block
            else:
                yield Frame(Status.DIFFERENCE, stamp, block.checksum, len(changes)), changes

    def _looks(self, request: Request, number: int, deadline: float) -> Iterator[tuple[Status, int]]:
        """What a client is to be told of a block: now and then that it is not there, and at last how that ended."""
        pause, reported_at = _FIRST_POLL, time.monotonic()
        while True:
            status, stamp = self._look(request, number)
            now = time.monotonic()
            if status not in (Status.WAITING, Status.IDLE):
                break
            if now >= deadline:
                status = Status.LATE
                break
            if now >= reported_at + _TOLD_EVERY:
                reported_at = now
                yield status, stamp
            time.sleep(pause)
            pause = min(2 * pause, _LAST_POLL)
        yield status, stamp

    def _look(self, request: Request, number: int) -> tuple[Status, int]:
        try:
            return self._served[request.region].look(request.slot, number, request.stamp)
        except LookupError:
            return Status.UNKNOWN, 0

    def send_block(self, stream: socket.socket, region: int, block: Block) -> None:
        """Send a block's bytes. Errors: ConnectionError if the region is served no more."""
        served = self._served.get(region)
        if served is None:
            raise ConnectionError("the region is served no more")
        self._count(region, block.nbytes)
        if self._certificate is not None or served.fd < 0:
            stream.sendall(served.memory[block.offset : block.offset + block.nbytes])
        else:
            with open(served.fd, "rb", closefd=False) as file:
                stream.sendfile(file, block.offset, block.nbytes)

    def _count(self, region: int, nbytes: int) -> None:
        with self._counting:
            self.bytes_sent[region] += nbytes


def read_exactly(stream: socket.socket, count: int, deadline: float) -> bytes:
    """Read exactly ``count`` bytes. Errors: ConnectionError if the stream ends before; TimeoutError."""
    data = bytearray(count)
    view = memoryview(data)
    while view:
        stream.settimeout(max(deadline - time.monotonic(), 0.001))
        received = stream.recv_into(view)
        if not received:
            raise ConnectionError("the other end closed the connection")
        view = view[received:]
    return bytes(data)


_one: dict[str, BlockServer] = {}
_making = threading.Lock()


def block_server() -> BlockServer:
    """Block server of this process at its host's address, started at the first call."""
    with _making:
        host = host_address()
        if host not in _one:
            _one[host] = BlockServer(host)
        return _one[host]

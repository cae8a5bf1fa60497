"""Who is at the other end of a TCP connection from this host: this user, or another one.

A port of the loopback interface takes connections of every user, and TCP itself does not say whose they are; the kernel
does (sock_diag(7), which needs no rights). Linux only; where the kernel does not answer, nobody is turned away.
"""

import asyncio
import ipaddress
import os
import socket
import struct
from typing import Any, Protocol

_BY_FAMILY, _REQUEST, _ALL_STATES = 20, 1, 0xFFFFFFFF
"""Of a message: SOCK_DIAG_BY_FAMILY; NLM_F_REQUEST; of the request: states of sockets."""
_PROTOCOL = 4
"""NETLINK_SOCK_DIAG."""
_HEAD, _OPTIONS, _PORTS = struct.Struct("=IHHII"), struct.Struct("=BBBBI"), struct.Struct("!HH")
"""nlmsghdr; inet_diag_req_v2 up to its socket's identity, and that from there on (with addresses of 16 bytes each, an
interface and a cookie)."""
_ANY_SOCKET = b"\0" * 4 + b"\xff" * 8
"""No interface, no cookie."""
_STATE_AT, _OWNER = 1, struct.Struct("=II")
_OWNER_AT = 4 + 4 + 16 + 16 + 12 + 3 * 4
"""Of inet_diag_msg: the state; user and inode."""
_ESTABLISHED = 1
_MOST_BYTES, _SECONDS = 8192, 1.0
MOST_WAITING = 64
"""Of connections to a server that is closed to others: so many it takes before it looks whose they are."""


class Connection(Protocol):
    """A connected socket, or what asyncio shows of one."""

    @property
    def family(self) -> int: ...
    def getpeername(self) -> Any: ...
    def getsockname(self) -> Any: ...


def is_other_users(connection: Connection) -> bool:
    """Whether it comes from this host and is not held by this user or root: another's, or nobody's any more."""
    try:
        peer, own = connection.getpeername(), connection.getsockname()
    except OSError:  # it is gone already
        return True
    if connection.family not in (socket.AF_INET, socket.AF_INET6) or not (_is_loopback(peer[0]) or peer[0] == own[0]):
        return False
    end = _end(connection.family, peer, own)
    if end is None:  # whether there is none is known only from a kernel that finds our own end
        return _end(connection.family, own, peer) is not None
    state, user, inode = end
    return state != _ESTABLISHED or not inode or user not in (0, os.geteuid())


def _is_loopback(host: str) -> bool:
    address = ipaddress.ip_address(host.partition("%")[0])
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _end(family: int, own: tuple, peer: tuple) -> tuple[int, int, int] | None:
    """State, user and inode (0 once no process holds it) of the socket with these ends; None if none is told."""
    ends = b"".join(socket.inet_pton(family, end[0].partition("%")[0]).ljust(16, b"\0") for end in (own, peer))
    options = _OPTIONS.pack(family, socket.IPPROTO_TCP, 0, 0, _ALL_STATES)
    request = options + _PORTS.pack(own[1], peer[1]) + ends + _ANY_SOCKET
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _PROTOCOL) as kernel:
            kernel.settimeout(_SECONDS)
            kernel.send(_HEAD.pack(_HEAD.size + len(request), _BY_FAMILY, _REQUEST, 1, 0) + request)
            answer = kernel.recv(_MOST_BYTES)
    except OSError:
        return None
    if _HEAD.unpack_from(answer)[1] != _BY_FAMILY:
        return None
    body = answer[_HEAD.size :]
    return body[_STATE_AT], *_OWNER.unpack_from(body, _OWNER_AT)


def bound_connections(protocol: type[asyncio.Protocol], most: int, seconds: float) -> type[asyncio.Protocol]:
    """A server's protocol of so many connections, each of which is to have sent a request's head in that time.

    It is uvicorn's, whose ``cycle`` is there from then on."""
    open_connections: set[Any] = set()

    class Bounded(protocol):
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            open_connections.add(self)
            if len(open_connections) > most:
                transport.abort()
            self._deadline = asyncio.get_running_loop().call_later(seconds, self._end_silent, transport)

        def _end_silent(self, transport: Any) -> None:
            if getattr(self, "cycle", None) is None:
                transport.abort()

        def connection_lost(self, exc: Exception | None) -> None:
            open_connections.discard(self)
            if self._deadline is not None:
                self._deadline.cancel()
            super().connection_lost(exc)

    return Bounded


def reject_other_users(protocol: type[asyncio.Protocol]) -> type[asyncio.Protocol]:
    """A server's protocol that ends connections of another user of the host before it reads from them."""

    class Guarded(protocol):
        _is_refused = False

        def connection_made(self, transport: Any) -> None:
            if is_other_users(transport.get_extra_info("socket")):
                self._is_refused = True
                transport.abort()
            else:
                super().connection_made(transport)

        def data_received(self, data: bytes) -> None:
            if not self._is_refused:
                super().data_received(data)

        def eof_received(self) -> bool | None:
            return None if self._is_refused else super().eof_received()

        def connection_lost(self, exc: Exception | None) -> None:
            if not self._is_refused:
                super().connection_lost(exc)

    return Guarded

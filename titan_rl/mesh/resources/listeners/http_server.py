"""HTTP servers: on loopback, for this user alone, or elsewhere, over TLS."""

import asyncio
import socket
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from titan_rl.config.load import ConfigError
from titan_rl.mesh.resources.listeners.callers import MOST_WAITING, bound_connections, reject_other_users

if TYPE_CHECKING:
    from starlette.applications import Starlette

LOOPBACK = "127.0.0.1"
_MOST_CONNECTIONS = 512
"""Open at once, over TLS."""
_HEAD_SECONDS = 20.0
"""From a connection to the head of its first request."""
Certificate = tuple[str, str]
"""Files of a certificate and of its key."""


def listen(port: int, address: str = LOOPBACK) -> socket.socket:
    """Listen. ``port``: 0 for any. Errors: ConfigError if the port is taken, or is none, or the address is not here."""
    if not 0 <= port < 1 << 16:
        why = "it is not from 0 to 65535"
        raise ConfigError(f"cannot listen at port {port}: {why}; give another --port, or leave it out")
    try:
        [*_, (family, _, _, _, place)] = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
        return socket.create_server(place[:2], family=family)
    except (OSError, OverflowError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        where = f"port {port}" if address == LOOPBACK else f"port {port} of {address!r}"
        raise ConfigError(f"cannot listen at {where}: {why}; give another --port, or leave it out") from None


def without_redirects(app: "Starlette") -> "Starlette":
    """Application that answers 404 to a path with a slash too many: a redirect would repeat the client's Host."""
    app.router.redirect_slashes = False
    return app


class HttpServer:
    """Server of an ASGI application in this event loop, from when it is made until ``close``."""

    def __init__(
        self, app: Callable, listener: socket.socket, grace_seconds: int, certificate: Certificate | None = None
    ) -> None:
        """``grace_seconds``: for requests under way when it is closed. ``certificate``: for TLS, by which
        whoever reaches the listener is served."""
        import uvicorn  # with starlette a tenth of a second, which few runs need
        from uvicorn.protocols.http.auto import AutoHTTPProtocol

        settings = uvicorn.Config(
            app,
            http=bound_connections(AutoHTTPProtocol, _MOST_CONNECTIONS, _HEAD_SECONDS)
            if certificate
            else reject_other_users(AutoHTTPProtocol),
            ssl_certfile=certificate and certificate[0],
            ssl_keyfile=certificate and certificate[1],
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=grace_seconds,
            backlog=MOST_WAITING,
        )
        self._server: Any = uvicorn.Server(settings)
        self._server.capture_signals = nullcontext  # they are the process's own
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))

    async def close(self) -> None:
        """End the server."""
        self._server.should_exit = True
        await self._serving

"""Server of a page of ours: loopback alone, this user alone, below an address that each start makes anew."""

import secrets
from collections.abc import Callable
from contextlib import suppress

from titan_rl.diagnostics.web.guard import Guard
from titan_rl.mesh.resources.listeners.callers import MOST_WAITING, reject_other_users
from titan_rl.mesh.resources.listeners.http_server import LOOPBACK, listen

_GRACE_SECONDS = 1


class PageServer:
    """Listening server of one application, until Ctrl-C."""

    def __init__(self, port: int = 0) -> None:
        """``port``: 0 for any. Errors: ConfigError if it cannot be listened at."""
        self._socket = listen(port)
        self._port, self._secret = self._socket.getsockname()[1], secrets.token_urlsafe(24)
        self.address = f"http://{LOOPBACK}:{self._port}/{self._secret}/"

    def run(self, app: Callable, policy: str | None = None) -> None:
        """Serve an ASGI application. ``policy``: its content security policy, where it needs less than others."""
        import uvicorn
        from uvicorn.protocols.http.auto import AutoHTTPProtocol

        settings = uvicorn.Config(
            Guard(app, self._secret, self._port, policy),
            http=reject_other_users(AutoHTTPProtocol),
            log_level="warning",
            access_log=False,
            ws_max_size=1 << 20,
            backlog=MOST_WAITING,
        )
        settings.timeout_graceful_shutdown = _GRACE_SECONDS
        with suppress(KeyboardInterrupt):  # which uvicorn raises again when it has ended
            uvicorn.Server(settings).run(sockets=[self._socket])

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()

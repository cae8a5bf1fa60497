"""Who may see the page: whoever has its address, from this host, under its own name.

An ASGI application around another, so that pages, assets and web sockets are all behind it. The secret is the first
part of every path. It is in no cookie, which a browser would also send to other users' ports of the same address.
"""

import hmac
from collections.abc import Awaitable, Callable
from typing import Any

Send = Callable[[dict[str, Any]], Awaitable[None]]
_POLICY = (
    "default-src 'self' data: blob: 'unsafe-inline' 'unsafe-eval'; frame-ancestors 'none'; base-uri 'self'; "
    "form-action 'self'"
)
"""The watch page's libraries compile templates, but nothing is loaded from, or sent to, anywhere else."""
_NO = b"403: open the address that the command printed; requests need the secret in it\n"


class Guard:
    """ASGI middleware: 403 for requests without the secret."""

    def __init__(self, app: Callable, secret: str, port: int, policy: str | None = None) -> None:
        """``policy``: content security policy of all answers; by default the watch page's."""
        self._app, self._secret = app, secret
        self._headers = [
            (b"content-security-policy", (policy or _POLICY).encode()),
            (b"referrer-policy", b"no-referrer"),
            (b"x-content-type-options", b"nosniff"),
        ]
        self._hosts = {f"{name}:{port}".encode() for name in ("127.0.0.1", "localhost")}

    async def __call__(self, scope: dict[str, Any], receive: Callable, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self._app(scope, receive, send)
        if not self._is_here(dict(scope["headers"])) or not self._has_secret(scope["path"]):
            return await self._refuse(scope, send)

        async def send_with_headers(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                message = message | {"headers": [*message.get("headers", []), *self._headers]}
            await send(message)

        await self._app(scope | {"root_path": f"/{self._secret}"}, receive, send_with_headers)

    def _is_here(self, headers: dict[bytes, bytes]) -> bool:
        """Whether it was asked under its own name (a name that leads here is not enough), by no other page."""
        host = headers.get(b"host", b"")
        return host in self._hosts and headers.get(b"origin", b"http://" + host) == b"http://" + host

    def _has_secret(self, path: str) -> bool:
        start, _, below = path.partition("/")
        secret, slash, _ = below.partition("/")
        return not start and bool(slash) and hmac.compare_digest(secret.encode(errors="replace"), self._secret.encode())

    async def _refuse(self, scope: dict[str, Any], send: Send) -> None:
        if scope["type"] == "websocket":  # before it is accepted: the server answers 403
            return await send({"type": "websocket.close", "code": 1008})
        headers = [(b"content-type", b"text/plain"), (b"cache-control", b"no-store"), *self._headers]
        await send({"type": "http.response.start", "status": 403, "headers": headers})
        await send({"type": "http.response.body", "body": _NO})

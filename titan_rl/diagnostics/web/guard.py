"""Who may see the page: whoever has the token of its address, from this host, under its own name.

An ASGI application around another, so that pages, assets and web sockets are all behind it. Cookies ignore ports, so
the cookie is named after the port, and a page of another port is told by its ``Origin``.
"""

import hmac
from collections.abc import Awaitable, Callable
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs

Send = Callable[[dict[str, Any]], Awaitable[None]]
_POLICY = (
    "default-src 'self' data: blob: 'unsafe-inline' 'unsafe-eval'; frame-ancestors 'none'; base-uri 'self'; "
    "form-action 'self'"
)
"""The page's libraries compile templates, but nothing is loaded from, or sent to, anywhere else."""
_HEADERS = [
    (b"content-security-policy", _POLICY.encode()),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
]
_NO = b"403: open the address that titan-rl watch printed; the token in it is asked for\n"


class Guard:
    """403 for everybody else."""

    def __init__(self, app: Callable, token: str, port: int) -> None:
        self._app, self._token, self._cookie = app, token.encode(), f"titan_rl_{port}"
        self._hosts = {f"{name}:{port}".encode() for name in ("127.0.0.1", "localhost")}

    async def __call__(self, scope: dict[str, Any], receive: Callable, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self._app(scope, receive, send)
        headers = dict(scope["headers"])
        asked = parse_qs(scope.get("query_string", b"").decode(errors="replace")).get("token", [""])[0]
        is_new = self._is_token(asked)
        if not self._is_here(headers) or not (is_new or self._is_token(self._kept(headers))):
            return await _refuse(scope, send)

        async def told(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                cookie = f"{self._cookie}={self._token.decode()}; HttpOnly; SameSite=Strict; Path=/"
                more = [(b"set-cookie", cookie.encode())] if is_new else []
                message = message | {"headers": [*message.get("headers", []), *_HEADERS, *more]}
            await send(message)

        await self._app(scope, receive, told)

    def _is_here(self, headers: dict[bytes, bytes]) -> bool:
        """Whether it was asked under its own name (a name that leads here is not enough), by no other page."""
        host = headers.get(b"host", b"")
        return host in self._hosts and headers.get(b"origin", b"http://" + host) == b"http://" + host

    def _is_token(self, value: str) -> bool:
        return hmac.compare_digest(value.encode(errors="replace"), self._token)

    def _kept(self, headers: dict[bytes, bytes]) -> str:
        try:
            morsel = SimpleCookie(headers.get(b"cookie", b"").decode(errors="replace")).get(self._cookie)
        except CookieError:
            return ""
        return morsel.value if morsel else ""


async def _refuse(scope: dict[str, Any], send: Send) -> None:
    if scope["type"] == "websocket":  # before it is accepted: the server answers 403
        return await send({"type": "websocket.close", "code": 1008})
    headers = [(b"content-type", b"text/plain"), (b"cache-control", b"no-store"), *_HEADERS]
    await send({"type": "http.response.start", "status": 403, "headers": headers})
    await send({"type": "http.response.body", "body": _NO})

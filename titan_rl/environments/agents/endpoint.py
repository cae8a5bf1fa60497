"""OpenAI-style server on loopback, through which agents call the run's generators.

    POST /v1/chat/completions    POST /v1/completions    GET /v1/models

It is in the verifier process, beside the episodes that it serves: a key is of one episode and ends with it, so that a
request needs no session of its own, and a generator that dies is replaced behind the same address.
"""

import asyncio
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from titan_rl.config.io.printable import printable
from titan_rl.environments.agents.openai_requests import ModelRequest, Refused, read_chat, read_completion
from titan_rl.environments.agents.openai_responses import ModelResponse
from titan_rl.environments.conversation.untrusted_json import read_json
from titan_rl.environments.interfaces.agent import ModelAccess
from titan_rl.mesh.resources.listeners.http_server import LOOPBACK, HttpServer, without_redirects

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

_MAX_BYTES = 16 << 20
"""Of a request."""
_BODY_SECONDS = 60.0
"""For all of a request to arrive."""
_END_SECONDS = 2
_SHOWN = 500
"""Characters of why a request is refused."""

Handler = Callable[[ModelRequest], Awaitable[ModelResponse]]
"""Errors: Refused."""


class Endpoint:
    """HTTP server of a verifier, with a handler for each episode's key."""

    def __init__(self, model: str = "policy"):
        self.model = model
        self._handlers: dict[str, Handler] = {}
        self._server: HttpServer | None = None

    async def start(self) -> None:
        """Start the server. Errors: OSError without a socket."""
        listener = socket.socket()
        listener.bind((LOOPBACK, 0))
        self.base_url = f"http://{LOOPBACK}:{listener.getsockname()[1]}/v1"
        self._server = HttpServer(self._app(), listener, _END_SECONDS)

    async def close(self) -> None:
        if self._server is not None:
            await self._server.close()

    @contextmanager
    def open(self, answer: Handler, key: str | None = None) -> Iterator[ModelAccess]:
        """Register an episode's handler. ``key``: the agent's own (``HasKey``), else a new one."""
        key = key or secrets.token_urlsafe(24)
        assert key not in self._handlers, "a key is of one episode at a time"
        self._handlers[key] = answer
        try:
            yield ModelAccess(self.base_url, key, self.model)
        finally:
            del self._handlers[key]

    def _app(self) -> "Starlette":
        from starlette.applications import Starlette
        from starlette.routing import Route

        routes = [
            Route("/v1/chat/completions", self._route_handler(read_chat), methods=["POST"]),
            Route("/v1/completions", self._route_handler(read_completion), methods=["POST"]),
            Route("/v1/models", self._models),
        ]
        return without_redirects(Starlette(routes=routes))

    def _handler_of(self, request: "Request") -> Handler:
        """Errors: Refused."""
        api_key = request.headers.get("authorization", "").removeprefix("Bearer ") or request.headers.get(
            "x-api-key", ""
        )
        for key, answer in self._handlers.items():
            if secrets.compare_digest(key.encode(), api_key.encode()):
                return answer
        raise Refused("the key is of no episode that is under way", "invalid_api_key", 401)

    def _route_handler(
        self, read: Callable[[dict[str, Any]], ModelRequest]
    ) -> Callable[["Request"], Awaitable["Response"]]:
        async def take(request: "Request") -> "Response":
            from starlette.responses import JSONResponse, StreamingResponse

            try:
                answer = self._handler_of(request)
                model_request = replace(read(await _body(request)), session=request.headers.get("x-session-id", ""))
                response = await _until_disconnect(request, answer(model_request))
            except Refused as refused:
                return _refusal(refused)
            if response.request.wants_stream:
                return StreamingResponse(response.events(self.model), media_type="text/event-stream")
            return JSONResponse(response.body(self.model))

        return take

    async def _models(self, request: "Request") -> "Response":
        from starlette.responses import JSONResponse

        try:
            self._handler_of(request)
        except Refused as refused:
            return _refusal(refused)
        return JSONResponse({"object": "list", "data": [{"id": self.model, "object": "model", "owned_by": "titan_rl"}]})


async def _body(request: "Request") -> dict[str, Any]:
    """Errors: Refused."""
    from titan_rl.mesh.resources.listeners import http_body

    try:
        data = await http_body.read_body(request, _MAX_BYTES, _BODY_SECONDS)
    except http_body.Refused as refused:
        raise Refused(str(refused), status=refused.status) from None
    try:
        body = read_json(data.decode())
    except ValueError as error:
        raise Refused(f"the body is no JSON object: {error}") from None
    if not isinstance(body, dict):
        raise Refused("the body is no JSON object")
    return body


async def _until_disconnect(request: "Request", answering: Awaitable[ModelResponse]) -> ModelResponse:
    """Cancel a request whose client disconnects: no turn is trained that its agent has not seen."""
    answer = asyncio.ensure_future(answering)
    disconnect = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait({answer, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            raise Refused("the connection was closed", status=499)
        return answer.result()
    finally:
        for task in (answer, disconnect):
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task


async def _wait_for_disconnect(request: "Request") -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _refusal(refused: Refused) -> "Response":
    from starlette.responses import JSONResponse

    about = {"message": printable(str(refused), _SHOWN), "type": "invalid_request_error", "code": refused.code}
    return JSONResponse({"error": about}, status_code=refused.status)

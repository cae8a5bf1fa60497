"""Web application of the collection page: what a browser may send, and what it is answered.

    GET  page.html, page.js, page.css     as they stand beside this file
    GET  next?who=Ann                     the labeller's next item, and whether the name is in use (``is_known``)
    POST judgements                       a judgement; answered when it is on disk, with the next item

Whatever a browser sends is bounded and checked. What was refused is JSON with one line, ``error``; answers are JSON,
which the page shows as text.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from titan_rl.config.io.bounded_files import each_once, parse_json
from titan_rl.data.storage.files import DiskFull
from titan_rl.mesh.resources.listeners.http_body import Refused, read_body
from titan_rl.mesh.resources.listeners.http_server import without_redirects
from titan_rl.records.preferences.collection import MOST_LABELLERS, Collection
from titan_rl.records.preferences.items import shown
from titan_rl.records.preferences.judgements import (
    Judgement,
    RefusedJudgement,
    folded,
    judgement_of,
    name_of,
    page_choices,
)

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
"""Content security policy: the page's own script, style and requests, and nothing else."""
MOST_BYTES = 2 << 20
"""Of a request's body."""
BODY_SECONDS = 10.0
"""For a request's body to arrive."""
_FILES = {"": "page.html", "page.js": "page.js", "page.css": "page.css"}
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
_NOT_KEPT = {"cache-control": "no-store"}
_SENT = ("id", "item", "who", "choice", "edit", "seconds")
"""Fields of a judgement that are the browser's to say."""


def application(collection: Collection) -> Starlette:
    """ASGI application without a guard."""
    endpoints = Endpoints(collection)
    routes = [Route(f"/{path}", _file(name)) for path, name in _FILES.items()]
    routes.append(Route("/next", _answering(endpoints.next)))
    routes.append(Route("/judgements", _answering(endpoints.judge), methods=["POST"]))
    return without_redirects(Starlette(routes=routes))


def _file(name: str) -> Callable[[Request], Awaitable[Response]]:
    path = Path(__file__).with_name(name)
    body, kind = path.read_bytes(), _TYPES[path.suffix]

    async def send(request: Request) -> Response:
        return Response(body, media_type=kind, headers=_NOT_KEPT)

    return send


def _answering(endpoint: Callable[[Request], Awaitable[dict[str, Any]]]) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        try:
            return JSONResponse(await endpoint(request), headers=_NOT_KEPT)
        except Refused as error:
            return JSONResponse({"error": str(error)}, error.status, headers=_NOT_KEPT)
        except RefusedJudgement as error:
            return JSONResponse({"error": str(error)}, 400, headers=_NOT_KEPT)
        except (DiskFull, OSError) as error:
            return JSONResponse({"error": f"not saved: {error}"}, 507, headers=_NOT_KEPT)
        except asyncio.CancelledError:  # Ctrl-C did not wait for the rest of it
            return JSONResponse({"error": "the page has ended"}, 503, headers=_NOT_KEPT)

    return answer


class Endpoints:
    """Endpoints of one collection."""

    def __init__(self, collection: Collection) -> None:
        self._collection = collection
        self._choices = page_choices(collection.settings.mode)
        self._given: set[str] = set()
        """Names that were given since the start, as many as can judge."""

    async def next(self, request: Request) -> dict[str, Any]:
        return await run_in_threadpool(self._begin, name_of(request.query_params.get("who")))

    async def judge(self, request: Request) -> dict[str, Any]:
        judgement = await _judgement(request, self._choices)
        return await run_in_threadpool(self._save, judgement)

    def _begin(self, name: str) -> dict[str, Any]:
        """State of a name that somebody gives. One that was given before may be another person's."""
        who, is_known = self._collection.spelling(name)
        is_known = is_known or folded(name) in self._given
        if len(self._given) < MOST_LABELLERS:
            self._given.add(folded(name))
        return self._state(who) | {"is_known": is_known}

    def _save(self, judgement: Judgement) -> dict[str, Any]:
        saved = self._collection.judge(judgement)
        return {"saved": saved.id} | self._state(saved.who)

    def _state(self, who: str) -> dict[str, Any]:
        """State of a labeller: counts, and the next item with its answers in the order of the page."""
        assigned, (done, left) = self._collection.next_item(who), self._collection.progress(who)
        state = {"who": who, "mode": self._collection.settings.mode, "done": done, "left": left, "item": None}
        if assigned is not None:
            item = assigned.item
            answers = [shown(item.answers[number]) for number in assigned.shown]
            state["item"] = {"id": item.id, "prompt": shown(item.prompt), "answers": answers, "editable": item.editable}
        return state


async def _judgement(request: Request, choices: tuple[str, ...]) -> Judgement:
    """Errors: Refused; RefusedJudgement."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Refused(415, "send JSON")
    body = await read_body(request, MOST_BYTES, BODY_SECONDS, "a judgement")
    try:
        fields = parse_json(body, pairs=each_once)
    except ValueError as error:
        raise Refused(400, f"this is not JSON: {error}") from None
    if isinstance(fields, dict) and (unknown := next((name for name in fields if name not in _SENT), None)):
        raise Refused(400, f"a judgement has no field {unknown[:40]!r}")
    return judgement_of(fields, choices)

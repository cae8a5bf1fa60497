"""Web application of the Tinker API: paths, statuses, and what each request is answered.

Whatever a client sends is bounded and checked. What is refused is JSON with one line, ``detail``, and the status 400;
404 for what does not exist, 403 without the key, 408 while a request is under way, 410 where its answer is gone.
"""

import asyncio
import datetime
import hmac
import tarfile
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from titan_rl.config.io.printable import printable
from titan_rl.data.storage.files import DiskFull
from titan_rl.mesh.resources.listeners.http_body import Refused, read_body
from titan_rl.mesh.resources.listeners.http_server import without_redirects
from titan_rl.service.adapters.training import RequestFailed
from titan_rl.service.clients import Session
from titan_rl.service.futures import Busy, Failed, Unknown
from titan_rl.service.records.checkpoints import Checkpoint, Checkpoints
from titan_rl.service.service import Service
from titan_rl.service.wire.messages import CONTENT_TYPE
from titan_rl.service.wire.reading import BadRequest, Fields, read_pass, read_sample

MOST_BYTES = 64 << 20
"""Of a request's body."""
BODY_SECONDS = 60.0
"""For a request's body to arrive."""
POLL_SECONDS = 25.0
"""For which a request for an answer waits."""
_SHOWN = 500
_API = "/api/v1"
Handler = Callable[[Request], Awaitable[Response]]


def application(service: Service, key: str) -> Starlette:
    """ASGI application. ``key``: that a request must have in its header."""
    endpoints = Endpoints(service)
    run, checkpoint = "/training_runs/{run}", "/training_runs/{run}/checkpoints/{kind}/{name}"
    table: list[tuple[str, str, Handler]] = [
        ("GET", "/healthz", endpoints.health),
        ("GET", "/get_server_capabilities", endpoints.capabilities),
        ("POST", "/client/config", endpoints.config),
        ("POST", "/client/dynamic_config", endpoints.nothing),
        ("POST", "/telemetry", endpoints.telemetry),
        ("POST", "/create_session", endpoints.create_session),
        ("POST", "/session_heartbeat", endpoints.heartbeat),
        ("POST", "/sessions/{session}/finish", endpoints.finish),
        ("GET", "/sessions", endpoints.sessions),
        ("GET", "/sessions/{session}", endpoints.session),
        ("POST", "/create_model", endpoints.create_model),
        ("POST", "/get_info", endpoints.get_info),
        ("POST", "/forward_backward", endpoints.forward_backward),
        ("POST", "/optim_step", endpoints.optim_step),
        ("POST", "/save_weights", endpoints.save_weights),
        ("POST", "/save_weights_for_sampler", endpoints.save_weights_for_sampler),
        ("POST", "/load_weights", endpoints.load_weights),
        ("POST", "/create_sampling_session", endpoints.create_sampling_session),
        ("GET", "/samplers/{sampler}", endpoints.sampler),
        ("POST", "/asample", endpoints.sample),
        ("POST", "/retrieve_future", endpoints.retrieve),
        ("POST", "/cancel_future", endpoints.cancel),
        ("POST", "/weights_info", endpoints.weights_info),
        ("GET", "/training_runs", endpoints.training_runs),
        ("GET", run, endpoints.training_run),
        ("GET", f"{run}/checkpoints", endpoints.checkpoints),
        ("GET", f"{checkpoint}/archive", endpoints.archive),
        ("DELETE", checkpoint, endpoints.delete),
        ("GET", "/checkpoints", endpoints.all_checkpoints),
    ]
    routes = [Route(f"{_API}{path}", _answering(handler, key), methods=[method]) for method, path, handler in table]
    return without_redirects(Starlette(routes=routes))


def _answering(handler: Handler, key: str) -> Handler:
    async def answer(request: Request) -> Response:
        given = request.headers.get("x-api-key", "")
        if not hmac.compare_digest(given.encode(errors="replace"), key.encode()):
            return _refusal(403, "requests need the key that the server printed: set TINKER_API_KEY")
        try:
            return await handler(request)
        except Refused as refused:
            return _refusal(refused.status, str(refused))
        except (BadRequest, RequestFailed) as error:
            return _refusal(400, str(error))
        except Busy as busy:
            return _refusal(429, str(busy))
        except Unknown:
            return _refusal(410, "there is no such request, or its answer was dropped")
        except (DiskFull, OSError) as error:
            return _refusal(507, f"not saved: {error}")

    return answer


def _refusal(status: int, why: str) -> Response:
    return JSONResponse({"detail": printable(why, _SHOWN)}, status)


async def _body(request: Request) -> bytes:
    """Errors: Refused."""
    return await read_body(request, MOST_BYTES, BODY_SECONDS)


async def _fields(request: Request) -> Fields:
    return Fields.of(await _body(request))


def _begun(name: str, **more: Any) -> Response:
    return JSONResponse({"request_id": name, **more})


class Endpoints:
    """Endpoints of a service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    # of the server

    async def health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def capabilities(self, request: Request) -> Response:
        model = self._service.model
        facts = {"model_name": model.name, "max_context_length": model.max_tokens}
        return JSONResponse({"supported_models": [facts | {"trainable": True, "sampleable": True}]})

    async def config(self, request: Request) -> Response:
        await _body(request)
        return JSONResponse({"pjwt_auth_enabled": False, "use_pyqwest_transport": False})

    async def nothing(self, request: Request) -> Response:
        await _body(request)
        return JSONResponse({})

    async def telemetry(self, request: Request) -> Response:
        """Nothing of it is kept."""
        await _body(request)
        return JSONResponse({"status": "accepted"})

    # sessions

    async def create_session(self, request: Request) -> Response:
        await _fields(request)
        session = self._service.clients.open()
        return JSONResponse({"type": "create_session", "session_id": session.id})

    async def heartbeat(self, request: Request) -> Response:
        self._service.clients.session((await _fields(request)).text("session_id"))
        return JSONResponse({"type": "session_heartbeat"})

    async def finish(self, request: Request) -> Response:
        await _body(request)
        await self._service.end_session(request.path_params["session"])
        return JSONResponse({})

    async def sessions(self, request: Request) -> Response:
        return JSONResponse({"sessions": list(self._service.clients.sessions)})

    async def session(self, request: Request) -> Response:
        session: Session = self._service.clients.session(request.path_params["session"])
        return JSONResponse({"training_run_ids": list(session.models), "sampler_ids": list(session.samplers)})

    # training

    async def create_model(self, request: Request) -> Response:
        return _begun(self._service.create_model(await _body(request)))

    async def get_info(self, request: Request) -> Response:
        model = self._service.clients.model((await _fields(request)).text("model_id"))
        return JSONResponse(self._service.info(model))

    async def forward_backward(self, request: Request) -> Response:
        if request.headers.get("content-type", "").partition(";")[0].strip() != CONTENT_TYPE:
            raise Refused(415, f"forward_backward takes {CONTENT_TYPE}")
        body = await _body(request)
        read = await asyncio.to_thread(read_pass, body)
        return _begun(self._service.forward_backward(body, read))

    async def optim_step(self, request: Request) -> Response:
        return _begun(self._service.optim_step(await _body(request)))

    async def save_weights(self, request: Request) -> Response:
        return _begun(self._service.save_weights(await _fields(request)))

    async def save_weights_for_sampler(self, request: Request) -> Response:
        return _begun(self._service.save_weights_for_sampler(await _fields(request)))

    async def load_weights(self, request: Request) -> Response:
        return _begun(self._service.load_weights(await _body(request)))

    # samples

    async def create_sampling_session(self, request: Request) -> Response:
        sampler = self._service.create_sampler(await _fields(request))
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": sampler.id})

    async def sampler(self, request: Request) -> Response:
        sampler = self._service.clients.sampler(request.path_params["sampler"])
        facts = {"base_model": self._service.model.name, "model_path": sampler.path}
        return JSONResponse({"sampler_id": sampler.id, **facts})

    async def sample(self, request: Request) -> Response:
        name, samples = self._service.sample(read_sample(await _body(request)))
        return _begun(name, sample_sequence_ids=samples)

    # answers

    async def retrieve(self, request: Request) -> Response:
        name = (await _fields(request)).text("request_id")
        try:
            answer = await self._service.futures.result(name, POLL_SECONDS)
        except Failed as failed:
            return JSONResponse({"error": str(failed), "category": "user" if failed.is_clients else "server"})
        if answer is None:
            waiting = {"type": "try_again", "request_id": name, "queue_state": "active"}
            return JSONResponse(waiting, 408)
        return Response(answer.body, media_type=answer.content_type)

    async def cancel(self, request: Request) -> Response:
        self._service.futures.cancel((await _fields(request)).text("request_id"))
        return Response(status_code=204)

    # checkpoints

    async def weights_info(self, request: Request) -> Response:
        checkpoint, _ = self._service.checkpoints.find((await _fields(request)).text("tinker_path"))
        return JSONResponse({"base_model": checkpoint.base_model, "is_lora": True, "lora_rank": checkpoint.rank})

    async def training_runs(self, request: Request) -> Response:
        runs = dict.fromkeys(each.model for each in self._service.checkpoints.all())
        offset, limit = _page(request)
        shown = [self._run(name) for name in list(runs)[offset : offset + limit]]
        cursor = {"offset": offset, "limit": limit, "total_count": len(runs)}
        return JSONResponse({"training_runs": shown, "cursor": cursor})

    async def training_run(self, request: Request) -> Response:
        return JSONResponse(self._run(request.path_params["run"]))

    def _run(self, name: str) -> dict[str, Any]:
        checkpoints = self._service.checkpoints.all(name)
        if not checkpoints:
            raise Refused(404, f"there is no checkpoint of {name[:60]!r}")
        by_type = {each.type: _facts(each, self._service.checkpoints) for each in checkpoints}
        last = checkpoints[-1]
        return {
            "training_run_id": name,
            "base_model": last.base_model,
            "model_owner": "",
            "is_lora": True,
            "lora_rank": last.rank,
            "last_request_time": _date(last.time),
            "last_checkpoint": by_type.get("training"),
            "last_sampler_checkpoint": by_type.get("sampler"),
        }

    async def checkpoints(self, request: Request) -> Response:
        return self._listed(request.path_params["run"])

    async def all_checkpoints(self, request: Request) -> Response:
        return self._listed("")

    def _listed(self, run: str) -> Response:
        checkpoints = self._service.checkpoints
        return JSONResponse({"checkpoints": [_facts(each, checkpoints) for each in checkpoints.all(run)]})

    def _path(self, request: Request) -> str:
        parts = request.path_params
        return f"tinker://{parts['run']}/{parts['kind']}/{parts['name']}"

    async def delete(self, request: Request) -> Response:
        self._service.checkpoints.delete(self._path(request))
        return Response(status_code=204)

    async def archive(self, request: Request) -> Response:
        """PEFT's files of a checkpoint, and its state, as a tar."""
        _, folder = self._service.checkpoints.find(self._path(request))
        return await asyncio.to_thread(_archived, folder)


def _archived(folder: Path) -> Response:
    with tempfile.NamedTemporaryFile(delete=False, suffix=".tar") as file, tarfile.open(fileobj=file, mode="w") as tar:
        for member in sorted(folder.iterdir()):
            tar.add(member, member.name)
    name = f"{folder.name}.tar"
    return FileResponse(file.name, filename=name, background=BackgroundTask(Path(file.name).unlink))


def _facts(checkpoint: Checkpoint, checkpoints: Checkpoints) -> dict[str, Any]:
    folder = checkpoints.find(checkpoint.path)[1]
    return {
        "checkpoint_id": checkpoint.id,
        "checkpoint_type": checkpoint.type,
        "time": _date(checkpoint.time),
        "tinker_path": checkpoint.path,
        "size_bytes": checkpoints.size(folder),
        "user_metadata": checkpoint.user_metadata or None,
    }


def _date(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()


def _page(request: Request) -> tuple[int, int]:
    """Offset and limit of a listing."""
    values = [request.query_params.get(name, default) for name, default in (("offset", "0"), ("limit", "20"))]
    if not all(value.isascii() and value.isdigit() and len(value) < 10 for value in values):
        raise Refused(400, "offset and limit must be whole numbers")
    return int(values[0]), int(values[1])

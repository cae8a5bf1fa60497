"""What clients send to the service: one line for whatever is wrong, never a server error."""

import asyncio
import json
import tempfile
from pathlib import Path

import httpx
import numpy as np
from fuzzing import ANY_TEXT, as_json, fuzz, mutated, spoilt
from hypothesis import strategies as st
from tinker import types
from tinker.proto.request_conv import forward_backward_request_to_proto

from titan_rl.data.types import Completion
from titan_rl.service.adapters.training import PassAnswer
from titan_rl.service.application import application
from titan_rl.service.service import ServedModel, Service

KEY = "tml-key"
TOLD = {200, 204, 400, 403, 404, 405, 408, 410, 413, 415, 422, 429, 507}
MODEL, SAMPLER = "s1:train:0", "s1:sample:0"
DATUM = types.Datum(
    model_input=types.ModelInput.from_ints([1, 2, 3]),
    loss_fn_inputs={"target_tokens": [2, 3, 4], "logprobs": [0.0, -1.0, -1.0], "advantages": [0.0, 1.0, -1.0]},
)
PASS = forward_backward_request_to_proto(
    types.ForwardBackwardRequest(
        forward_backward_input=types.ForwardBackwardInput(data=[DATUM, DATUM], loss_fn="ppo"), model_id=MODEL, seq_id=1
    )
).SerializeToString()
NUMBERED = {"model_id": MODEL, "seq_id": 1}
BODIES = {
    "create_session": {"tags": [], "user_metadata": None, "sdk_version": "0.38"},
    "session_heartbeat": {"session_id": "s1"},
    "create_model": {
        "session_id": "s1",
        "model_seq_id": 0,
        "base_model": "model",
        "lora_config": {"rank": 4, "seed": 1},
        "user_metadata": {"a": "b"},
    },
    "get_info": {"model_id": MODEL},
    "optim_step": NUMBERED | {"adam_params": {"learning_rate": 1e-4, "beta1": 0.9, "grad_clip_norm": 0.0}},
    "save_weights": NUMBERED | {"path": "name", "overwrite": True, "user_metadata": {"a": "b"}},
    "save_weights_for_sampler": NUMBERED | {"path": "name", "sampling_session_seq_id": 0},
    "load_weights": NUMBERED | {"path": f"tinker://{MODEL}/weights/name", "optimizer": True},
    "create_sampling_session": {"session_id": "s1", "sampling_session_seq_id": 0, "base_model": "model"},
    "asample": {
        "sampling_session_id": SAMPLER,
        "seq_id": 0,
        "num_samples": 2,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
        "sampling_params": {"max_tokens": 4, "temperature": 1.0, "top_k": -1, "top_p": 1.0, "stop": ["x"], "seed": 1},
        "prompt_logprobs": True,
    },
    "retrieve_future": {"request_id": f"{MODEL}:1", "allow_metadata_only": True},
    "cancel_future": {"request_id": f"{SAMPLER}:0"},
    "weights_info": {"tinker_path": f"tinker://{MODEL}/weights/name"},
    "telemetry": {"events": []},
}


class Training:
    """Stands for the trainer's ranks."""

    async def create(self, name, seed): ...

    async def restore(self, name, state, *, with_optimizer): ...

    async def forget(self, name): ...

    async def step(self, name, settings):
        return 1.0

    async def save(self, name, state):
        state.write_bytes(b"state")

    async def save_weights(self, name, folder): ...

    async def run(self, name, examples, loss, settings, *, backward):
        return PassAnswer(1.0, [np.zeros(len(example.tokens), np.float32) for example in examples])


class Weights:
    """Stands for generators."""

    async def complete(self, source, request):
        tokens, logprobs = np.ones(2, np.int32), np.zeros(2, np.float32)
        return [Completion(tokens, logprobs, np.zeros(2, np.int32), "stop") for _ in request.seeds]


def _service(folder: str) -> Service:
    model = ServedModel("model", "/models/model", rank=4, vocabulary=99, max_tokens=64, seed=1)
    service = Service(model, Training(), Weights(), Path(folder), lambda line, error: None)  # type: ignore[arg-type]
    session = service.clients.open()
    service.clients.sessions["s1"] = session
    service.clients.add_model(session, 0, 4)
    session.models[MODEL] = next(iter(session.models.values()))
    session.samplers[SAMPLER] = service.clients.add_sampler(session, 0, None)
    return service


async def _asked(method: str, path: str, body: bytes, headers: dict[str, str]) -> httpx.Response:
    with tempfile.TemporaryDirectory() as folder:
        service = _service(folder)
        transport = httpx.ASGITransport(application(service, KEY))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            try:
                async with asyncio.timeout(5):
                    return await client.request(method, path, content=body, headers=headers)
            finally:
                await service.stop()


def _told(method: str, path: str, body: bytes, kind: str = "application/json") -> None:
    response = asyncio.run(_asked(method, path, body, {"x-api-key": KEY, "content-type": kind}))
    assert response.status_code in TOLD, (response.status_code, response.text)
    if response.status_code == 400:
        line = json.loads(response.text)["detail"]
        assert line.strip() and line.isprintable() and "\n" not in line


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, bytes]:
    name = draw(st.sampled_from(sorted(BODIES)))
    body = as_json(draw(spoilt(BODIES[name])))
    return name, body.encode(errors="surrogatepass")


@fuzz(request=requests())
def test_json_requests(request):
    name, body = request
    _told("POST", f"/api/v1/{name}", body)


@fuzz(body=mutated(PASS))
def test_passes(body):
    _told("POST", "/api/v1/forward_backward", body, "application/x-protobuf")


@fuzz(
    [dict(method="GET", parts=["training_runs", ""])],
    method=st.sampled_from(["GET", "POST", "DELETE", "PUT"]),
    parts=st.lists(
        st.sampled_from([*BODIES, "training_runs", MODEL, "checkpoints", "weights", "..", "%2e%2e", "name"]) | ANY_TEXT,
        max_size=6,
    ),
)
def test_paths(method, parts):
    path = "/api/v1/" + "/".join(parts)
    if not path.isascii() or not path.isprintable():
        path = "/api/v1/" + "/".join(map(repr, parts)).encode(errors="backslashreplace").decode()
    _told(method, path.replace("?", "").replace("#", ""), b"")


@fuzz(key=ANY_TEXT.filter(lambda key: key.isascii() and key.isprintable() and key != KEY))
def test_without_the_key_nothing_is_answered(key):
    for name in BODIES:
        response = asyncio.run(_asked("POST", f"/api/v1/{name}", b"{}", {"x-api-key": key.strip()}))
        assert response.status_code == 403

"""Requests of clients, done: models and their training in turn, samples, checkpoints.

application ─▶ Service ─▶ Futures           requests under way, by ids
                       ─▶ Clients           sessions, their models and samplers
                       ─▶ AdapterTraining   trainer ranks
                       ─▶ ServedWeights     generators
                       ─▶ Checkpoints       folders
                       ─▶ Journal           training requests that were done
"""

import asyncio
import secrets
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from titan_rl.algorithms.token_losses import make_token_loss
from titan_rl.data.seeds import named_seed
from titan_rl.data.types import Request
from titan_rl.service.adapters.serving import ServedWeights
from titan_rl.service.adapters.training import AdapterTraining, RequestFailed
from titan_rl.service.clients import Clients, Model, Sampler, Session
from titan_rl.service.futures import Answer, Futures
from titan_rl.service.records.checkpoints import STATE, UNNAMED, Checkpoint, Checkpoints, Kind
from titan_rl.service.records.journal import Journal
from titan_rl.service.records.journal import Kind as JournalKind
from titan_rl.service.training_requests import Done, TrainingRequests, json_answer
from titan_rl.service.wire.messages import CONTENT_TYPE
from titan_rl.service.wire.reading import BadRequest, Fields, PassRequest, SampleRequest, checkpoint_name
from titan_rl.service.wire.writing import sample_answer

_IDLE_SECONDS = 120.0
"""After which a client that sends no heartbeat gives up its place in the trainer's memory."""


class ServedModel:
    """Facts of the base model that clients are told."""

    def __init__(self, name: str, path: str, *, rank: int, vocabulary: int, max_tokens: int, seed: int) -> None:
        """``max_tokens``: of a prompt with its answer. ``seed``: of what a client leaves open."""
        self.name, self.path, self.rank = name, path, rank
        self.vocabulary, self.max_tokens, self.seed = vocabulary, max_tokens, seed

    def check(self, name: str) -> None:
        """Errors: BadRequest for another model."""
        if name not in (self.name, self.path):
            raise BadRequest(f"this server has the model {self.name!r}, and not {name[:80]!r}")

    def check_tokens(self, tokens: np.ndarray, what: str) -> None:
        """Errors: BadRequest for tokens that the model does not have."""
        if not 0 <= int(tokens.min()) <= int(tokens.max()) < self.vocabulary:
            raise BadRequest(f"{what} has a token outside of the model's vocabulary of {self.vocabulary}")


class Service:
    """Owner of what clients have. Errors of all calls: BadRequest; Unknown."""

    def __init__(
        self,
        model: ServedModel,
        training: AdapterTraining,
        weights: ServedWeights,
        root: Path,
        on_failure: Callable[[str, Exception], None],
    ) -> None:
        """``root``: directory of the service. ``on_failure`` hears of requests that failed here."""
        self.model, self.training, self.weights = model, training, weights
        self.clients, self.futures, self.checkpoints = Clients(), Futures(on_failure), Checkpoints(root / "checkpoints")
        self._journal, self._requests = Journal(root), TrainingRequests(training, model.seed)

    # sessions and models

    def create_model(self, body: bytes) -> str:
        """Begin a new model; the id of the request."""
        fields = Fields.of(body)
        session = self.clients.session(fields.text("session_id"))
        self.model.check(fields.text("base_model"))
        rank = fields.table("lora_config").whole("rank", self.model.rank, least=1)
        self._check_lora(rank, fields)
        model = self.clients.add_model(session, fields.whole("model_seq_id"), rank)
        return self._begin("create_model", model, 0, body, self._requests.create(model.id, fields))

    def _check_lora(self, rank: int, fields: Fields) -> None:
        if rank != self.model.rank:
            raise BadRequest(
                f"adapters have rank {self.model.rank} here, and not {rank}: ask for rank={self.model.rank}"
            )
        kind = fields.table("optimizer_config").text("type", "adamw")
        if kind != "adamw":
            raise BadRequest(f"optimizer {kind[:40]!r} is not known here: take adamw")

    def _begin(self, kind: JournalKind | None, model: Model, number: int, body: bytes, work: Done) -> str:
        """Begin a model's request in its turn. ``kind``: under which it is on record; None: it is not."""
        name = f"{model.id}:{number}"

        async def recorded() -> Answer:
            begun, answer = time.perf_counter(), b""
            try:
                answer = (done := await work()).body
                return done
            finally:
                if kind is not None and (answer or isinstance(sys.exception(), RequestFailed)):
                    self._journal.write(kind, model.id, number, time.perf_counter() - begun, body, answer)

        self.futures.begin(name, model.session, recorded, model.turn(number))
        return name

    def info(self, model: Model) -> dict[str, Any]:
        """What a client is told of a model."""
        return {
            "type": "get_info",
            "model_data": {"model_name": self.model.name, "tokenizer_id": self.model.path},
            "model_id": model.id,
            "model_name": self.model.name,
            "is_lora": True,
            "lora_rank": model.rank,
        }

    # training

    def forward_backward(self, body: bytes, request: PassRequest) -> str:
        """Begin a pass; the id of the request. ``body``: what ``request`` was read from."""
        model = self.clients.model(request.model)
        try:
            make_token_loss(request.loss, request.settings)
        except ValueError as error:
            raise BadRequest(str(error)) from None
        for place, example in enumerate(request.examples):
            self.model.check_tokens(example.tokens, f"example {place}")
            self.model.check_tokens(example.targets, f"example {place}: target_tokens")
        work = self._requests.forward_backward(model.id, request)
        return self._begin("forward_backward", model, request.number, body, work)

    def optim_step(self, body: bytes) -> str:
        """Begin an optimizer step; the id of the request."""
        fields = Fields.of(body)
        model, number = self._numbered(fields)
        return self._begin("optim_step", model, number, body, self._requests.optim_step(model.id, fields))

    def _numbered(self, fields: Fields) -> tuple[Model, int]:
        return self.clients.model(fields.text("model_id")), fields.whole("seq_id", least=1, most=2**31)

    # checkpoints

    def save_weights(self, fields: Fields) -> str:
        """Begin to save a state to go on from; the id of the request."""
        model, number = self._numbered(fields)
        name = checkpoint_name(fields.text("path", f"{number:06d}"))
        overwrite, metadata = fields.flag("overwrite"), _metadata(fields)

        async def work() -> Answer:
            checkpoint = await self._save(model, "weights", name, metadata, overwrite=overwrite)
            return json_answer(path=checkpoint.path, type="save_weights")

        return self._begin(None, model, number, b"", work)

    def save_weights_for_sampler(self, fields: Fields) -> str:
        """Begin to save weights to sample from; the id of the request. Without a name a sampler is made of them."""
        model, number = self._numbered(fields)
        session, metadata = self.clients.session(model.session), _metadata(fields)
        named, sampler_number = fields.text("path", ""), fields.whole("sampling_session_seq_id", 0)
        name = checkpoint_name(named or f"{UNNAMED}{number:06d}")

        async def work() -> Answer:
            checkpoint = await self._save(model, "sampler_weights", name, metadata)
            if named:
                return json_answer(path=checkpoint.path, type="save_weights_for_sampler")
            folder = self.checkpoints.find(checkpoint.path)[1].absolute()
            sampler = self.clients.add_sampler(session, sampler_number, folder, checkpoint.path)
            return json_answer(sampling_session_id=sampler.id, type="save_weights_for_sampler")

        return self._begin(None, model, number, b"", work)

    async def _save(
        self, model: Model, kind: Kind, name: str, metadata: dict[str, str], *, overwrite: bool = False
    ) -> Checkpoint:
        folder = self.checkpoints.begin(model.id, kind, name, overwrite=overwrite).absolute()
        await self.training.save_weights(model.id, folder)
        if kind == "weights":
            await self.training.save(model.id, folder / STATE)
        return self.checkpoints.complete(
            *(model.id, kind, name), base_model=self.model.name, rank=model.rank, metadata=metadata
        )

    def load_weights(self, body: bytes) -> str:
        """Begin to load a saved state, into a model or as a new one; the id of the request."""
        fields = Fields.of(body)
        checkpoint, folder = self.checkpoints.find(fields.text("path"))
        if checkpoint.kind != "weights":
            raise BadRequest(f"{checkpoint.path} is for samplers: training goes on from one of save_state")
        if fields.has("model_id"):
            model, number = self._numbered(fields)
        else:
            session, number = self.clients.session(fields.text("session_id")), 0
            model = self.clients.add_model(session, fields.whole("model_seq_id"), self.model.rank)
        state = self._journal.keep_state(model.id, number, folder / STATE)
        work = self._requests.load(model.id, fields, checkpoint.path, state)
        return self._begin("load_weights", model, number, body, work)

    # samples

    def create_sampler(self, fields: Fields) -> Sampler:
        """Sampler of a checkpoint, or of the base model."""
        session = self.clients.session(fields.text("session_id"))
        number, path = fields.whole("sampling_session_seq_id"), fields.text("model_path", "")
        folder = self._weights_of(path, fields.text("base_model", ""))
        return self.clients.add_sampler(session, number, folder, path or None)

    def _weights_of(self, path: str, base_model: str) -> Path | None:
        """PEFT directory of what is sampled from; None: the base model."""
        if path:
            return self.checkpoints.find(path)[1].absolute()
        self.model.check(base_model)
        return None

    def sample(self, request: SampleRequest) -> tuple[str, list[str]]:
        """Begin to sample; the id of the request, and of each sample."""
        if request.session:
            sampler = self.clients.sampler(request.session)
            folder, owner, name = sampler.folder, sampler.id, f"{sampler.id}:{request.number}"
        else:
            folder, owner = self._weights_of(request.path, request.base_model), ""
            name = f"sample:{secrets.token_hex(8)}"
        self.model.check_tokens(request.tokens, "the prompt")
        asked = self._request(request, name)

        async def work() -> Answer:
            return Answer(sample_answer(await self.weights.complete(folder, asked)), CONTENT_TYPE)

        self.futures.begin(name, owner.partition(":")[0], work)
        return name, [f"{name}:{place}" for place in range(request.num_samples)]

    def _request(self, request: SampleRequest, name: str) -> Request:
        """Request to a generator. Errors: BadRequest for a prompt that leaves no room."""
        room = self.model.max_tokens - len(request.tokens)
        if room < 1:
            raise BadRequest(f"the prompt has {len(request.tokens)} tokens, and {self.model.max_tokens} are the most")
        if request.max_tokens is not None and request.max_tokens > room:
            raise BadRequest(
                f"max_tokens = {request.max_tokens}, and a prompt of {len(request.tokens)} tokens leaves room for "
                f"{room}: ask for fewer, or raise training.seq_len of the server"
            )
        seed = named_seed(self.model.seed, "sample", name) if request.seed is None else request.seed
        seeds = [named_seed(seed, "sample", str(place)) for place in range(request.num_samples)]
        wants_prompt = request.prompt_logprobs or request.topk_prompt_logprobs > 0
        return Request(
            tokens=request.tokens.astype(np.int32),
            seeds=seeds,
            max_new_tokens=room if request.max_tokens is None else request.max_tokens,
            temperature=request.temperature,
            decoding=request.decoding,
            prompt_logprobs=request.topk_prompt_logprobs if wants_prompt else None,
        )

    # ends

    async def watch(self) -> None:
        """For as long as the service lasts: adapters of clients that are not heard of leave the trainer's memory."""
        while True:
            await asyncio.sleep(_IDLE_SECONDS / 4)
            for model in self.clients.idle_models(_IDLE_SECONDS):
                await self.training.park(model.id)

    async def stop(self) -> None:
        """Cancel all requests, and drop weights of samplers that have no name."""
        await self.futures.stop()
        self.checkpoints.delete_unnamed()
        self._journal.close()

    async def end_session(self, name: str) -> None:
        """End a session; its adapters are dropped, its checkpoints stay."""
        session: Session = self.clients.end(name)
        await self.futures.end_session(name)
        for model in session.models.values():
            await self.training.forget(model.id)
            self.checkpoints.delete_unnamed(model.id)


def _metadata(fields: Fields) -> dict[str, str]:
    values = fields.table("user_metadata").values
    if len(values) > 64 or not all(isinstance(v, str) and len(k) <= 256 and len(v) <= 4096 for k, v in values.items()):
        raise BadRequest("user_metadata must have at most 64 short texts")
    return dict(values)

"""What each kind of training request does to an adapter: the same for a client's and for a replay's."""

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from titan_rl.mesh.members.adapter_endpoints import AdamSettings
from titan_rl.service.adapters.training import AdapterTraining
from titan_rl.service.futures import Answer
from titan_rl.service.wire.messages import CONTENT_TYPE
from titan_rl.service.wire.reading import Fields, PassRequest, read_adam, read_pass
from titan_rl.service.wire.writing import pass_answer

Done = Callable[[], Awaitable[Answer]]


def json_answer(**fields: Any) -> Answer:
    return Answer(json.dumps(fields).encode())


class TrainingRequests:
    """Requests as what is to be done."""

    def __init__(self, training: AdapterTraining, seed: int) -> None:
        """``seed``: of adapters whose clients give none."""
        self.training, self._seed = training, seed

    def create(self, model: str, fields: Fields) -> Done:
        """New adapter of a client. Errors: BadRequest."""
        seed = fields.table("lora_config").whole("seed", self._seed)

        async def work() -> Answer:
            await self.training.create(model, seed)
            return json_answer(model_id=model, type="create_model")

        return work

    def load(self, model: str, fields: Fields, path: str, state: Path) -> Done:
        """Adapter that goes on from a saved state. Errors: BadRequest."""
        with_optimizer = fields.flag("optimizer")

        async def work() -> Answer:
            await self.training.restore(model, state.absolute(), with_optimizer=with_optimizer)
            return json_answer(path=path, model_id=model, type="load_weights")

        return work

    def forward_backward(self, model: str, request: PassRequest) -> Done:
        async def work() -> Answer:
            examples, loss, settings = request.examples, request.loss, request.settings
            answer = await self.training.run(model, examples, loss, settings, backward=request.backward)
            return Answer(pass_answer(answer.logprobs, {"loss:sum": answer.loss}), CONTENT_TYPE)

        return work

    def optim_step(self, model: str, fields: Fields) -> Done:
        """Errors: BadRequest."""
        settings: AdamSettings = read_adam(fields)

        async def work() -> Answer:
            norm = await self.training.step(model, settings)
            return json_answer(metrics={"grad_norm:unclipped": norm, "learning_rate": settings.lr})

        return work

    def again(self, kind: str, model: str, body: bytes, state: Path) -> Done:
        """Recorded request. ``state``: that it loads, if it loads one. Errors: BadRequest."""
        if kind == "forward_backward":
            return self.forward_backward(model, read_pass(body))
        fields = Fields.of(body)
        if kind == "create_model":
            return self.create(model, fields)
        if kind == "load_weights":
            return self.load(model, fields, fields.text("path"), state)
        return self.optim_step(model, fields)

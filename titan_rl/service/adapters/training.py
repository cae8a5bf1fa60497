"""Adapters of clients on the trainer's ranks, and what brings them back when a rank dies.

    create, passes, steps ─▶ history since the last saved state ─▶ after a repair: the state, then the history again

States are files. On one kind of processor the same requests give the same bits, so a client whose trainer died sees a
slow answer, and nothing else.
"""

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from titan_rl.algorithms.token_losses import TOKEN_LOSSES
from titan_rl.config.sections.schema import Config
from titan_rl.data.storage.files import replacing
from titan_rl.data.types import Layout
from titan_rl.mesh.channel.batches import StagedRows
from titan_rl.mesh.members.adapter_endpoints import AdamSettings, AdapterEndpoints, Answered, PassResult
from titan_rl.mesh.members.trainers import Trainers
from titan_rl.mesh.meshes import Meshes
from titan_rl.mesh.supervision.remote_call import RemoteCall
from titan_rl.models.weights.peft_files import CONFIG, WEIGHTS
from titan_rl.service.rows import PackedExamples, TrainingExample, pack_examples

T = TypeVar("T")
_STEPS_BETWEEN_STATES = 8
"""Optimizer steps of a client after which its state is written; what came since is repeated after a repair."""
_SHOWN = "served"
"""Name under which ranks hold the weights that generators are given."""


class RequestFailed(ValueError):
    """A client's request cannot be done; says why."""


@dataclass(frozen=True)
class PassAnswer:
    """Answer of a forward, or a forward and backward pass."""

    loss: float
    logprobs: list
    """Of each example, float32 [T]."""


Redo = Callable[[Trainers], Awaitable[object]]


@dataclass
class _History:
    """What makes a client's adapter what it is."""

    begin: Redo
    since: list[tuple[Redo, bool]] = field(default_factory=list)
    """Passes and steps since, and whether each is a step."""
    is_parked: bool = False
    """Whether the ranks do without it, until the next request."""

    @property
    def num_steps(self) -> int:
        return sum(is_step for _, is_step in self.since)

    async def again(self, trainers: Trainers) -> None:
        """Make the adapter again, on ranks that do not have it."""
        await self.begin(trainers)
        for redo, _ in self.since:
            await redo(trainers)

    def drop_gradients(self) -> None:
        """Drop passes behind the last step."""
        while self.since and not self.since[-1][1]:
            self.since.pop()


class AdapterTraining:
    """Owner of the clients' adapters. One request is at the trainer at a time.

    Errors of all calls: RequestFailed; ActorFault when the trainer cannot be repaired."""

    def __init__(self, meshes: Meshes, config: Config, layout: Layout, folder: Path) -> None:
        """``folder``: of the states that a repair begins from."""
        self._meshes, self._layout, self._folder = meshes, layout, folder
        self._transport, self._share = config.mesh.transport, config.rollout.share_prefix
        self._histories: dict[str, _History] = {}
        self._shown: Path | None = None
        """PEFT directory whose weights generators have; None: the base model's."""
        self._num_shown = 0

    # clients

    async def create(self, name: str, seed: int) -> None:
        """Create a client's adapter."""
        await self._begin(name, lambda trainers: _each(trainers, AdapterEndpoints.create_adapter(name, seed)))

    async def restore(self, name: str, state: Path, *, with_optimizer: bool) -> None:
        """Begin a client's adapter, or replace it, by a saved state."""
        own = self._state(name)  # a repair must find it, whatever becomes of the checkpoint
        await asyncio.to_thread(_copy, state, own)
        restoring = AdapterEndpoints.restore_adapter_state(name, str(own), with_optimizer)
        await self._begin(name, lambda trainers: _answers(trainers, restoring))

    async def _begin(self, name: str, begin: Redo) -> None:
        await self._ask(begin)
        self._histories[name] = _History(begin)

    async def forget(self, name: str) -> None:
        """Forget a client's adapter."""
        if self._histories.pop(name, None) is not None:
            await self._ask(lambda trainers: _each(trainers, AdapterEndpoints.forget_adapter(name)))
            self._state(name).unlink(missing_ok=True)

    async def park(self, name: str) -> None:
        """Have the ranks forget a client's adapter until its next request."""
        history = self._histories.get(name)
        if history is None or history.is_parked:
            return

        async def work(trainers: Trainers) -> None:
            await _each(trainers, AdapterEndpoints.forget_adapter(name))
            history.is_parked = True

        await self._ask(work)

    # passes and steps

    async def run(
        self, name: str, examples: list[TrainingExample], loss: str, settings: Mapping[str, float], *, backward: bool
    ) -> PassAnswer:
        """Forward and backward pass, or a forward pass alone."""
        try:
            skips_zeros = TOKEN_LOSSES[loss].skips_zeros
            packed = pack_examples(examples, self._layout, share=self._share, skips_zeros=skips_zeros)
        except ValueError as error:
            raise RequestFailed(str(error)) from None

        async def work(trainers: Trainers) -> PassAnswer:
            with StagedRows.by([[rows] for rows in packed.rows], self._transport) as handles:
                request = AdapterEndpoints.adapter_pass(name, handles, loss, settings, backward)
                return _pass_answer(await _answers(trainers, request), packed)

        history = self._history(name)
        try:
            answer = await self._ask(work, history)
        except RequestFailed:
            history.drop_gradients()
            raise
        if backward:
            history.since.append((work, False))
        return answer

    async def step(self, name: str, settings: AdamSettings) -> float:
        """AdamW step; the gradients' norm before clipping."""

        async def work(trainers: Trainers) -> float:
            return (await _answers(trainers, AdapterEndpoints.adapter_step(name, settings)))[0]

        history = self._history(name)
        try:
            norm = await self._ask(work, history)
        except RequestFailed:
            history.drop_gradients()
            raise
        history.since.append((work, True))
        if history.num_steps >= _STEPS_BETWEEN_STATES:
            await self.save(name, self._state(name))
            restoring = AdapterEndpoints.restore_adapter_state(name, str(self._state(name)), True)
            self._histories[name] = _History(lambda trainers: _answers(trainers, restoring))
        return norm

    # files

    async def save(self, name: str, state: Path) -> None:
        """Write a client's state: weights, moments and steps."""
        state.parent.mkdir(parents=True, exist_ok=True)
        saving = AdapterEndpoints.save_adapter_state(name, str(state))
        await self._ask(lambda trainers: _each(trainers, saving), self._history(name))

    async def save_weights(self, name: str, folder: Path) -> None:
        """Write a client's adapter in PEFT's format."""
        saving = AdapterEndpoints.save_adapter_weights(name, str(folder))
        await self._ask(lambda trainers: _each(trainers, saving), self._history(name))

    def _state(self, name: str) -> Path:
        return self._folder / f"{name.replace(':', '_')}.safetensors"

    # generators

    async def show(self, folder: Path | None) -> None:
        """Bring weights into the model, to be staged for generators. ``folder``: PEFT's; None: the base model."""
        own = None
        if folder is not None:  # a repair must find it, whatever becomes of the checkpoint
            self._num_shown += 1
            own = self._folder / f"{_SHOWN}-{self._num_shown % 2}"
            for name in (CONFIG, WEIGHTS):
                await asyncio.to_thread(_copy, folder / name, own / name)
        before, self._shown = self._shown, own
        try:
            await self._show(self._meshes.trainer.trainers)
        except RequestFailed:
            self._shown = before
            raise

    async def _show(self, trainers: Trainers) -> None:
        if self._shown is None:
            await _each(trainers, AdapterEndpoints.create_adapter(_SHOWN, 0))
        else:
            await _answers(trainers, AdapterEndpoints.load_adapter_weights(_SHOWN, str(self._shown)))

    # repair

    async def catch_up(self, trainers: Trainers, step: int | None) -> int:
        """Bring back all adapters on ranks that have joined anew; the number of requests that were repeated."""
        there = [history for history in self._histories.values() if not history.is_parked]
        for history in there:
            await history.again(trainers)
        await self._show(trainers)
        return sum(len(history.since) for history in there)

    def _history(self, name: str) -> _History:
        """Errors: RequestFailed for an adapter that was never made."""
        if name not in self._histories:
            raise RequestFailed(f"there is no adapter of {name}: making it failed")
        return self._histories[name]

    async def _ask(self, work: Callable[[Trainers], Awaitable[T]], history: _History | None = None) -> T:
        """``history``: of the adapter that must be there."""
        trainer = self._meshes.trainer

        async def asked() -> T:
            if history is not None and history.is_parked:
                await history.again(trainer.trainers)
                history.is_parked = False
            return await work(trainer.trainers)

        return await trainer.ask(asked)


def _copy(file: Path, to: Path) -> None:
    """Errors: RequestFailed for a file that is gone; DiskFull."""
    to.parent.mkdir(parents=True, exist_ok=True)
    try:
        with replacing(to) as beside:
            shutil.copyfile(file, beside)
    except FileNotFoundError:
        raise RequestFailed(f"{file.parent.name} was deleted: take another checkpoint") from None


async def _each(trainers: Trainers, request: RemoteCall[T]) -> list[T]:
    return await trainers.call(request, what=f"trainer {request.endpoint}")


async def _answers(trainers: Trainers, request: RemoteCall[Answered[T]]) -> list[T]:
    """Answers of all ranks. Errors: RequestFailed with the first refusal."""
    answers = await _each(trainers, request)
    for answer in answers:
        if answer.refusal:
            raise RequestFailed(answer.refusal)
    return [answer.value for answer in answers]  # type: ignore[misc]  # None, too, only where that is the answer


def _pass_answer(results: list[PassResult], packed: PackedExamples) -> PassAnswer:
    """``results``: of each rank."""
    by_group: dict[int, dict] = {}
    for result in results:
        if result.logprobs:
            by_group.setdefault(result.group, {}).update(result.logprobs)
    return PassAnswer(results[0].loss, packed.logprobs(by_group))

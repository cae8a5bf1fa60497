"""The actors of a run, started beside no run, and what can be asked of them.

Nothing of the user's is written: a tiny model, logs and all else lie in a folder of the doctor's.
"""

import asyncio
import pickle
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import cloudpickle
import numpy as np
import pandas as pd

from titan_rl.algorithms.batches.batching import step_batches, with_task
from titan_rl.config.mixture import first_name, teachers_of
from titan_rl.controller.initial_policy import base_model
from titan_rl.controller.interactive.trainer import token_table
from titan_rl.controller.preflight.checks import Checked
from titan_rl.controller.wiring import Actors
from titan_rl.data.batches.packing import pack, token_weights
from titan_rl.data.nonfinite import NonfiniteBatch
from titan_rl.data.seeds import named_seed
from titan_rl.data.storage.routed_experts import filled
from titan_rl.data.storage.sampling_mask import joined
from titan_rl.data.types import (
    Batch,
    Completion,
    Decoding,
    Group,
    Layout,
    Provenance,
    Request,
    Sample,
    Sampling,
    StepMetrics,
)
from titan_rl.diagnostics.doctor import actor_queries as probes
from titan_rl.diagnostics.doctor.check_errors import CheckFailed
from titan_rl.environments.prompts.stream import PromptStream
from titan_rl.environments.rollout.decoding import decoding_of
from titan_rl.mesh.members.endpoints import GeneratorEndpoints, TrainerEndpoints, VerifierEndpoints
from titan_rl.mesh.meshes import ALL_PARTS
from titan_rl.mesh.supervision.actor_process import ActorProcess
from titan_rl.mesh.supervision.calls import call
from titan_rl.mesh.supervision.remote_call import RemoteCall
from titan_rl.records.run_directory.rundir import RunDir

if TYPE_CHECKING:
    from titan_rl.actors.verifier import Verifier
    from titan_rl.generator.engine import GenerationEngine
    from titan_rl.trainer.step.learner import Learner

T = TypeVar("T")
_SAMPLES, _MOST_PROMPTS = 64, 8
"""Answers to the run's own prompts that are looked at, and prompts at most."""
_MOST_NEW_TOKENS = 64


@dataclass(frozen=True)
class Reading:
    """Result of one forward and backward pass on a batch."""

    batch: Batch
    metrics: StepMetrics
    tokens: pd.DataFrame
    """Of each trained token: prompt_id, sample, place among the sample's trained tokens, token, and the
    log-probabilities of generator and trainer."""


def sample_of(prompt: np.ndarray, completion: Completion, prompt_id: str, number: int) -> Sample:
    """An answer of the engine's as something to train on, with no advantage."""
    wrote = len(completion.tokens)
    provenance = np.repeat([Provenance.TEMPLATE, Provenance.MODEL], [len(prompt), wrote]).astype(np.int8)
    if completion.forced is not None:
        provenance[len(prompt) :][completion.forced] = Provenance.FORCED
    return Sample(
        tokens=np.concatenate([prompt, completion.tokens]).astype(np.int32),
        provenance=provenance,
        logprobs=np.concatenate([np.zeros(len(prompt)), completion.logprobs]).astype(np.float32),
        advantage=0.0,
        prompt_id=prompt_id,
        sample=number,
        mask=joined([None, completion.mask], [len(prompt), wrote]),
        routed_experts=None
        if completion.routed_experts is None
        else filled(None, completion.routed_experts, len(prompt) + wrote),
        penalties=completion.penalties,
        starts=(len(prompt),),
    )


class ActorsUnderTest:
    """Started actors of a run, as an async context manager. Errors of what is asked: what an actor raises; ActorFault;
    CheckFailed for a loss or a gradient that is NaN or Inf."""

    def __init__(self, checked: Checked, folder: Path) -> None:
        """``folder``: of the doctor's own."""
        recovery = replace(checked.config.recovery, standby=False, warm_spares=0)
        self.checked = replace(checked, config=replace(checked.config, recovery=recovery))
        self.config, self.folder = self.checked.config, folder
        self.layout: Layout = checked.titan.layout
        self.messages: list[str] = []
        """Log lines of the mesh, of deaths and repairs."""
        self.version = self.step = -1
        """Of the weights that generators have; of the trainer's updates."""
        self.stream = PromptStream(checked.task, self.config.run.seed)
        self._num_requests = 0

    async def __aenter__(self) -> "ActorsUnderTest":
        run_dir = RunDir(self.folder)
        self.path = base_model(self.config, run_dir)
        parts = frozenset({"trainer"}) if self.config.data.file else ALL_PARTS
        logs = self.folder / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        self._actors = Actors(self.checked, self.path, parts, log=self.messages.append, logs=logs)
        await self._actors.__aenter__()
        self.meshes, self.trainer = self._actors.meshes, self._actors.meshes.trainer
        self.parts = parts
        self.step = 0
        try:
            await self.trainer.begin_at(0)
        except BaseException:
            await self.meshes.stop()
            raise
        return self

    async def __aexit__(self, *failure: Any) -> None:
        await self._actors.__aexit__(*failure)

    # weights

    async def sync(self) -> int:
        """The trainer's weights become the generators' next version."""
        self.version += 1
        await self.meshes.weights.stage(self.version)
        await self.meshes.weights.announce(self.version)
        return self.version

    async def ask_trainer(self, function: "Callable[[Learner], T]") -> list[T]:
        """Results of a function of each rank's learner."""
        return _answers(await self.trainer.call(TrainerEndpoints.examine(cloudpickle.dumps(function))))

    async def ask_generators(self, function: "Callable[[GenerationEngine], T]") -> list[T]:
        """Results of a function of each rank's engine; helpers that sleep hold no weights."""
        ranks = [rank for replica in self.meshes.generators.healthy for rank in replica.ranks]
        return await self._ask_all(ranks, GeneratorEndpoints.examine(cloudpickle.dumps(function)))

    async def ask_verifiers(self, function: "Callable[[Verifier], T]") -> list[T]:
        examining = VerifierEndpoints.examine(cloudpickle.dumps(function))
        return await self._ask_all(list(self.meshes.verifiers.procs.values()), examining)

    async def _ask_all(self, processes: Sequence[ActorProcess], request: RemoteCall[tuple[bytes, str]]) -> list:
        seconds = self.config.mesh.step_timeout
        return _answers([await call(p, request, seconds=seconds, what="examining actors") for p in processes])

    # answers

    @property
    def max_new_tokens(self) -> int:
        return min(self.config.rollout.max_new_tokens, _MOST_NEW_TOKENS)

    @property
    def replays_routing(self) -> bool:
        return self.config.algorithm.routing == "replay"

    async def sample_groups(self) -> list[Group]:
        """Groups of fresh prompts of the run's task, through the verifiers, at the run's settings."""
        rollout = self.config.rollout
        count = min(rollout.prompts_per_step, _MOST_PROMPTS, max(2, _SAMPLES // rollout.group_size))
        lengths = self.max_new_tokens, rollout.temperature, self.meshes.max_tokens, min(rollout.max_turns, 8)
        decoding = decoding_of(rollout)
        sampling = Sampling(rollout.group_size, *lengths, decoding=decoding, routed_experts=self.replays_routing)
        prompts = list(islice(self.stream, count))
        groups = await asyncio.gather(*(self.meshes.dispatcher.run_group(prompt, sampling) for prompt in prompts))
        return [replace(group, task=prompt.task) for group, prompt in zip(groups, prompts, strict=True)]

    async def complete(
        self, tokens: np.ndarray, count: int, most: int, name: str = "", decoding: Decoding | None = None
    ) -> list[Completion]:
        """Answers of an engine to tokens, by ``count`` seeds at the run's temperature; the same ones for a ``name``.
        ``decoding``: the run's by default."""
        self._num_requests += not name
        label = name or str(self._num_requests)
        seeds = [named_seed(self.config.run.seed, f"doctor {label}", number) for number in range(count)]
        room = min(most, self.meshes.max_tokens - len(tokens))
        rollout = self.config.rollout
        decoding = decoding_of(rollout) if decoding is None else decoding
        settings = rollout.temperature, decoding
        request = Request(tokens, seeds, room, *settings, routed_experts=self.replays_routing)
        return await self.meshes.dispatcher.complete(request)

    # the trainer

    def batch(self, groups: list[Group], *, one_by_one: bool = False) -> Batch:
        """Batch of all usable rollouts, packed as in the run; ``one_by_one``: each sample in a row of its own, in
        another order."""
        config, layout = self.config, self.layout
        algorithm = replace(config.algorithm, updates_per_batch=1, train_truncated=True)
        rollout = replace(config.rollout, share_prefix=config.rollout.share_prefix and not one_by_one)
        if one_by_one:
            longest = max(len(rollout.tokens) for group in groups for rollout in group.rollouts)
            groups, layout = groups[::-1], replace(layout, row_tokens=longest)
        config = replace(config, algorithm=algorithm, rollout=rollout)
        [batch] = step_batches(groups, self.checked.algorithm, config, layout)
        return batch

    def batch_of_samples(self, groups: list[list[Sample]]) -> Batch:
        aggregation = self.config.algorithm.aggregation, self.config.rollout.max_new_tokens
        if self.checked.algorithm.needs.teacher:
            groups = [
                with_task(samples, first_name(self.config.task), teachers_of(self.config))
                for samples in groups
                if samples
            ]
        return pack(
            groups,
            **asdict(self.layout),
            share_prefix=self.config.rollout.share_prefix,
            weigh=lambda samples: token_weights(samples, *aggregation),
        )

    async def read(self, batch: Batch) -> Reading:
        """The trainer's own forward and backward; its gradients stay until the next."""
        metrics = await self.trainer.forward_backward(batch)
        if isinstance(metrics, NonfiniteBatch):
            raise CheckFailed("the loss or its gradient is NaN or Inf", str(metrics))
        numbers = list(range(len(batch.rows)))
        answers = await self.ask_trainer(lambda learner: (learner.share(numbers), learner.logprobs()))
        by_row = {}
        for share, logprobs in answers:
            rows = [(group, number) for group in share for number in range(len(batch.rows[group]))]
            by_row |= {rows[index]: logprob_S for index, logprob_S in logprobs.items() if index < len(rows)}
        return Reading(batch, metrics, token_table(batch, by_row))

    @asynccontextmanager
    async def rolled_back(self) -> AsyncIterator[None]:
        """Whatever is trained and synced inside is undone at its end: each check finds the run's first weights, with an
        optimizer and a schedule that have made no update."""
        version = self.version
        await self.ask_trainer(probes.keep)
        try:
            yield
        finally:
            await self.ask_trainer(probes.put_back)
            if self.version != version:
                await self.sync()

    async def update(self) -> None:
        """The optimizer's step on the gradients of the last reading."""
        self.step += 1
        answer = await self.trainer.optim_step(self.step)
        if isinstance(answer, NonfiniteBatch):
            raise CheckFailed("the update produced NaN or Inf", str(answer))


def _answers(answers: list[tuple[bytes, str]]) -> list[Any]:
    """Errors: RuntimeError for a rank on which a question failed."""
    if failed := [failure for _, failure in answers if failure]:
        raise RuntimeError(failed[0])
    return [pickle.loads(value) for value, _ in answers]

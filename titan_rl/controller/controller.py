"""The loop. It moves prompts, small records and versions; tensors go from actor to actor.

    prompts ─▶ groups ─▶ batch ─▶ optimizer step ─▶ weights v+1
       ▲                                               │
       └──────────── admission (staleness) ◀── live ◀──┘

Admission decides who may be sampled under the live version; groups are trained in the order in which they were
admitted, so what a batch holds does not depend on who was faster. With ``max_staleness = 0`` a batch is sampled,
trained and published in turn; with more, sampling goes on meanwhile. Generators take a published version while the
trainer goes on, if it can. There is no second code path.
"""

import asyncio
import json
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

from titan_rl.algorithms.batching import discard_reason, sample_outcomes, step_batches, update_parts
from titan_rl.algorithms.registry import make_algorithm
from titan_rl.config.schema import Config
from titan_rl.controller.admission import Admission
from titan_rl.controller.bad_batches import BadNumbersError, BadStreak
from titan_rl.controller.checkpointing import Saving
from titan_rl.controller.display import Display
from titan_rl.controller.elastic import take_wish
from titan_rl.controller.evaluate import evaluate
from titan_rl.controller.recovery import Recovery
from titan_rl.data.types import BadNumbers, Batch, EngineStatistics, Group, Prompt, Sampling, StepMetrics
from titan_rl.environments.prompts import PromptStream
from titan_rl.mesh.meshes import Meshes
from titan_rl.mesh.supervision.deadlines import DeadlineError, within
from titan_rl.records.checkpoints import CheckpointFolder, ControllerState
from titan_rl.records.events import EventLog
from titan_rl.records.ledger import Fates, Ledger
from titan_rl.records.metrics import (
    MetricsLog,
    agreement_limit,
    mean_metrics,
    sampling_metrics,
    speeds,
    trained_metrics,
)
from titan_rl.records.rollouts import set_aside_rollouts, write_rollouts
from titan_rl.records.rundir import RunDir
from titan_rl.records.statistics import Proportion
from titan_rl.records.summary import Progress
from titan_rl.trainer.titan_config import TitanConfig

_RESCUE_SECONDS = 60.0
_WISH_SECONDS = 0.5
_CHANGES = {"started", "died", "trainer_whole", "generator_serves", "verifier_serves"}
"""Events after which a process has come or gone, or has another name."""
_MAX_DISCARDS = 20
"""Batches' worth of groups that may be discarded in a row before the run gives up."""


class Stopped(Exception):
    """The user asked to stop."""


@dataclass(frozen=True)
class InFlight:
    prompt: Prompt
    group: asyncio.Task[Group]


class Laps:
    """Seconds of the phases of a step, one after the other; one that comes again adds up."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._start = self._last = time.perf_counter()

    def end(self, phase: str) -> None:
        now = time.perf_counter()
        self.seconds[phase], self._last = self.seconds.get(phase, 0.0) + now - self._last, now

    @property
    def total(self) -> float:
        return self._last - self._start


class Controller:
    """Owns the order of things. Everything else is owned by the components that it is given."""

    def __init__(
        self,
        config: Config,
        titan: TitanConfig,
        run_dir: RunDir,
        meshes: Meshes,
        stream: PromptStream,
        held_out: list[Prompt],
        ledger: Ledger,
        metrics: MetricsLog,
        display: Display,
    ):
        self.config, self.titan, self.run_dir, self.meshes = config, titan, run_dir, meshes
        self.stream, self.held_out, self.ledger = stream, held_out, ledger
        self.metrics, self.display = metrics, display
        self.algorithm = make_algorithm(config.algorithm, config.run.plugin_path)
        meshes.say, meshes.tell = display.say, self._note
        meshes.dispatcher.reissued = ledger.count_retry
        self.events = EventLog(run_dir.root)
        self.saving = Saving(
            CheckpointFolder(run_dir.checkpoints, config.checkpoint.keep_latest_k),
            meshes,
            ledger,
            timeout=config.mesh.step_timeout,
            say=display.say,
            record=metrics.write,
        )
        self.progress = Progress()
        self.recovery = Recovery(
            *(config, titan, run_dir, meshes, stream, ledger, self.saving, metrics, self.progress),
            say=display.say,
            note=self._note,
        )
        meshes.catch_up = self.recovery.catch_up
        self.stop_requested = asyncio.Event()
        self._started = time.perf_counter()
        self._in_flight: deque[InFlight] = deque()
        self._backlog: deque[Prompt] = deque()
        self._num_discarded_in_a_row = 0
        self._bad_streak = BadStreak()
        self._weights_are_finite = True
        self._trainer_is_idle = False
        self._delivery: asyncio.Task[None] | None = None
        self._granting: asyncio.Task[None] | None = None
        self._agreement_limit = agreement_limit(config.generator.dtype, titan.training.mixed_precision_param)
        self._is_on_policy = not config.rollout.max_staleness and config.algorithm.updates_per_batch == 1
        self._has_warned = False

    # the run

    async def run(self, resume: bool) -> None:
        """Errors: Stopped after a clean stop; anything else is a fault. Both save what can be saved."""
        try:
            self._enter("starting")
            await self._interruptible(self.meshes.start())
            self._granting = asyncio.create_task(self._grant_wishes())
            self._write_pids()
            self.display.say(f"actors up after {self._elapsed():.1f} s, weights by {self.meshes.weights.transports}")
            self._trainer_is_idle = True
            await (self._resume() if resume else self._begin())
            start, before = time.perf_counter(), self.progress.seconds_training
            while self.progress.step < self.titan.training.steps:
                await self._step()
                self.progress.seconds_training = before + time.perf_counter() - start
            await self._finish()
        except BaseException as error:
            await self._rescue(error)
            raise
        finally:
            for task in [in_flight.group for in_flight in self._in_flight] + [self._delivery, self._granting]:
                if task is not None:
                    task.cancel()

    async def _grant_wishes(self) -> None:
        """Somebody may want more generators, or fewer."""
        while True:
            await asyncio.sleep(_WISH_SECONDS)
            if (count := take_wish(self.run_dir)) is not None:
                self.display.say(
                    f"{count} generators are wanted, {len(self.meshes.generators.router.members)} there are"
                )
                self.meshes.generators.scale(count)

    def _note(self, kind: str, **fields) -> None:
        self.events.write(kind, **fields)
        if kind in _CHANGES:
            self._write_pids()

    def _write_pids(self) -> None:
        beside = self.run_dir.pids.with_suffix(".new")
        beside.write_text(json.dumps(self.meshes.pids, indent=2) + "\n")
        beside.replace(self.run_dir.pids)  # a reader never meets half of it

    def _enter(self, phase: str) -> None:
        self.run_dir.phase.write_text(f"{self.progress.step} {phase}")

    def _elapsed(self) -> float:
        return time.perf_counter() - self._started

    async def _begin(self) -> None:
        await self._interruptible(self.recovery.warm_up())
        await self.meshes.begin_at(0)
        self._open_admission(0)
        await self._go_live(0)
        self.progress.held_out_before = await self._evaluate("before reinforcement learning")
        if self.config.recovery.bad_numbers == "rollback":
            await self._save()  # something to go back to from the first step on

    async def _resume(self) -> None:
        """To where the ledger says that the run was, from the newest checkpoint or, without one, from the beginning.

        The steps between are trained again from the rollouts that were written down; nothing is sampled twice.
        """
        start = time.perf_counter()
        path = await self.recovery.load_newest()
        if path is None:
            await self._begin()
            await self._delivered()
        first = self.progress.step
        await self._interruptible(self.recovery.train_recorded())
        last = self.progress.step
        await self._go_on_from_here()
        self.display.say(
            f"resumed from {path or 'the base model'}: {last - first} steps trained again, now at step {last}, "
            f"{len(self._backlog)} prompts pending"
        )
        self._note(
            "resumed", checkpoint_step=first, step=last, redone=last - first, seconds=time.perf_counter() - start
        )

    async def _go_on_from_here(self) -> None:
        """The trainer is at ``progress.step`` by another way than the step before."""
        self._backlog = self.recovery.rewind(self.progress.step)
        self._open_admission(self.progress.step)
        await self._go_live(self.progress.step)

    def _open_admission(self, version: int) -> None:
        rollout = self.config.rollout
        self.admission = Admission(rollout.prompts_per_step, rollout.max_staleness, version)

    async def _finish(self) -> None:
        await self._delivered()
        self.ledger.verify()
        self.progress.held_out_after = await self._evaluate("after")
        await self._save()
        await self.saving.finish()
        await self.meshes.call_trainer("save_hf", str(self.run_dir.model))

    async def _rescue(self, error: BaseException) -> None:
        """Save a whole checkpoint if the trainer is between two steps and has something new."""
        if isinstance(error, Stopped):
            with suppress(Exception):  # it is a stop that was asked for, whatever else goes wrong now
                await within(_RESCUE_SECONDS, "the last weight update", self._delivered())
        with suppress(Exception):
            await within(_RESCUE_SECONDS, "writing the checkpoint before", self.saving.finish())
        if not self._trainer_is_idle or self.progress.step == self.saving.saved_step:
            return
        if not self.progress.step and not isinstance(error, BadNumbersError):
            return
        if not self._weights_are_finite:
            self.display.say(
                "the weights are not finite, so they are not saved: the newest checkpoint is the last good"
            )
            return
        try:
            await within(_RESCUE_SECONDS, "saving the last checkpoint", self._save())
            await within(_RESCUE_SECONDS, "writing the last checkpoint", self.saving.finish())
            if isinstance(error, Stopped):
                await self.meshes.call_trainer("save_hf", str(self.run_dir.model))
        except Exception as failure:  # the error that ended the run matters more
            self.display.say(f"could not save step {self.progress.step}: {failure}")

    async def _interruptible(self, awaitable):
        """The awaitable's result, or Stopped as soon as the user asks."""
        work = asyncio.ensure_future(awaitable)
        stop = asyncio.ensure_future(self.stop_requested.wait())
        await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if not work.done():
            work.cancel()
            raise Stopped
        return work.result()

    # one step

    async def _step(self) -> None:
        laps = Laps()
        metrics = None
        while metrics is None:
            self._enter("generating")
            groups = await self._interruptible(self._collect())
            laps.end("wait")
            self._enter("training")
            batches = step_batches(groups, self.algorithm, self.config, self.titan.layout)
            metrics = await self._train(groups, batches)
            laps.end("train")
        self._enter("publishing")
        await self._delivered()
        step = self.progress.step
        await self._go_live(
            step, lambda statistics, seconds: self._record(step, groups, batches, metrics, statistics, laps, seconds)
        )
        laps.end("publish")
        if self._is_due(self.config.eval.every) and self.progress.step < self.titan.training.steps:
            await self._evaluate(f"at step {self.progress.step}")
        if self._is_due(self.config.checkpoint.every):
            self._enter("saving")
            await self._save()

    def _is_due(self, every: int) -> bool:
        return every > 0 and self.progress.step % every == 0

    async def _collect(self) -> list[Group]:
        """The next batch's groups, in the order of their admission."""
        groups: list[Group] = []
        while len(groups) < self.config.rollout.prompts_per_step:
            group = await self._next_group()
            reason = discard_reason(group, self.config.algorithm)
            if reason is None:
                groups.append(group)
                self._num_discarded_in_a_row = 0
            else:
                self._discard(group, reason)
        return groups

    async def _next_group(self) -> Group:
        """The one that was admitted first; meanwhile whatever may be admitted is."""
        while True:
            self._admit()
            if self._in_flight and self._in_flight[0].group.done():
                return self._in_flight.popleft().group.result()
            awaited = {in_flight.group for in_flight in islice(self._in_flight, 1)}
            if self._delivery is not None:
                awaited.add(self._delivery)
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            if self._delivery is not None and self._delivery.done():
                await self._delivered()

    def _discard(self, group: Group, reason: str) -> None:
        self.ledger.settle(self._fates([group]))
        self.admission.give_back()
        self._num_discarded_in_a_row += 1
        if self._num_discarded_in_a_row >= _MAX_DISCARDS * self.config.rollout.prompts_per_step:
            raise RuntimeError(
                f"the last {self._num_discarded_in_a_row} groups were all discarded, the last for {reason}"
            )

    def _fates(self, groups: list[Group], fault: str | None = None) -> Fates:
        """``fault``: why samples that could have been trained on were not."""
        size, algorithm = self.config.rollout.group_size, self.config.algorithm
        return {g.prompt_id: [reason or fault for reason in sample_outcomes(g, algorithm, size)] for g in groups}

    def _admit(self) -> None:
        prompts, new = [], []
        while self.admission.can_admit():
            self.admission.admit()
            if self._backlog:
                prompts.append(self._backlog.popleft())
            else:
                new.append(next(self.stream))
                prompts.append(new[-1])
        if new:
            self.ledger.issue([prompt.id for prompt in new], self.config.rollout.group_size)
        for prompt in prompts:
            group = asyncio.create_task(self._sample(prompt))
            group.add_done_callback(lambda task: task.cancelled() or task.exception())  # the first to fail is told
            self._in_flight.append(InFlight(prompt, group))

    async def _sample(self, prompt: Prompt) -> Group:
        rollout = self.config.rollout
        sampling = Sampling(rollout.group_size, rollout.max_new_tokens, rollout.temperature, self.meshes.max_tokens)
        for attempt in range(1 + rollout.max_retries):
            if attempt:
                self.ledger.count_retry(prompt.id)
            try:
                group = await self.meshes.dispatcher.run_group(prompt, sampling)
            except DeadlineError:
                group = Group(prompt.id, [], refused="timeout")
            if not group.refused and all(r.status != "infra_error" for r in group.rollouts):
                break
        return group

    async def _train(self, groups: list[Group], batches: list[Batch]) -> StepMetrics | None:
        """The optimizer steps of a batch, while its rollouts are written down; then it counts as trained.

        None if bad numbers kept it from being a step: another batch is wanted. Errors: BadNumbersError.
        """
        step = self.progress.step + 1
        writing = asyncio.create_task(asyncio.to_thread(write_rollouts, self.run_dir.rollouts, step, groups))
        self._trainer_is_idle = False
        answers = await self.meshes.train(batches, step)
        self._trainer_is_idle = True
        await writing
        parts = list(zip(update_parts(groups, self.config.algorithm), answers, strict=True))
        trained = [group for part, answer in parts if isinstance(answer, StepMetrics) for group in part]
        bad = [group for part, answer in parts if isinstance(answer, BadNumbers) for group in part]
        self.ledger.settle(self._fates(trained), step)
        self.ledger.settle(self._fates(bad, "bad_numbers"))
        self.ledger.check((len(self._in_flight) + len(self._backlog)) * self.config.rollout.group_size)
        if trained:
            self.progress.step = step
        if bad:
            await self._after_bad_numbers(step, [a for a in answers if isinstance(a, BadNumbers)], len(bad), trained)
        else:
            self._bad_streak.good(step)
        if self.progress.step != step:
            return None
        if self.progress.seconds_to_first_step is None:
            self.progress.seconds_to_first_step = self._elapsed()
        return mean_metrics([answer for answer in answers if isinstance(answer, StepMetrics)])

    async def _after_bad_numbers(self, step: int, answers: list[BadNumbers], num_groups: int, trained: list) -> None:
        """Say which samples they came from; then stop, go back to the last checkpoint, or simply go on."""
        self._bad_streak.bad(step)
        recovery, count = self.config.recovery, self._bad_streak.length
        self._weights_are_finite = not any(answer.weights for answer in answers)
        for answer in answers:
            self.display.say(f"step {step}: {answer}; the update was left out")
        self.metrics.write({"step": step, "bad_batches_in_a_row": count})
        if not trained:
            kept = await asyncio.to_thread(set_aside_rollouts, self.run_dir.rollouts, step)
            self.display.say(f"its {num_groups} groups are discarded, and kept in {kept}")
            for _ in range(num_groups):
                self.admission.give_back()
        if count >= recovery.max_bad_steps:
            raise BadNumbersError(f"{count} batches in a row had bad numbers, the last at step {step}: {answers[-1]}")
        if recovery.bad_numbers == "rollback":
            await self._roll_back()

    async def _roll_back(self) -> None:
        """Everything as it was at the newest checkpoint; what was discarded stays so."""
        await self._delivered()
        await self.saving.finish()
        for in_flight in self._in_flight:
            in_flight.group.cancel()
        self._in_flight.clear()
        path = await self.recovery.load_newest()
        if path is None:
            raise RuntimeError(f"no checkpoint in {self.saving.folder.root} is whole: nothing to go back to")
        await self._go_on_from_here()
        self.display.say(f"back to {path}, {len(self._backlog)} prompts pending")
        self._weights_are_finite = True

    async def _go_live(
        self, version: int, record: Callable[[list[EngineStatistics], float], None] = lambda statistics, seconds: None
    ) -> None:
        """Publish the weights; generators take them beside what comes next, and then more may be admitted."""
        start = time.perf_counter()
        await self.meshes.publish(version)

        async def deliver() -> None:
            statistics = await self.meshes.deliver(version)
            self.admission.advance(version)
            record(statistics, time.perf_counter() - start)

        self._delivery = asyncio.create_task(deliver())

    async def _delivered(self) -> None:
        """Until the last published version is live. Errors: what kept it from being so."""
        if self._delivery is not None:
            await self._delivery
            self._delivery = None

    def _record(
        self,
        step: int,
        groups: list[Group],
        batches: list[Batch],
        metrics: StepMetrics,
        statistics: list[EngineStatistics],
        laps: Laps,
        seconds_sync: float,
    ) -> None:
        seconds = {
            "generate": max((engine.seconds_busy for engine in statistics), default=0.0),
            "score": sum(group.seconds_score for group in groups) / self.config.verifier.procs,
            "wait": laps.seconds["wait"],
            "forward_backward": metrics.seconds_forward_backward,
            "optimizer": metrics.seconds_optimizer,
            "publish": laps.seconds["publish"],
            "weight_sync": seconds_sync,
            "generator_pause": max((engine.seconds_update for engine in statistics), default=0.0),
            "step": laps.total,
        }
        generated = sum(engine.num_tokens for engine in statistics)
        trained = sum(batch.num_tokens for batch in batches)
        record = {"step": step, **sampling_metrics(groups, step - 1), **trained_metrics(metrics)}
        record |= {f"seconds_{name}": value for name, value in seconds.items()}
        record |= speeds(seconds, generated, trained) | self.meshes.stragglers.slowest()
        for name, ratio in self.meshes.stragglers.new().items():
            self.display.say(f"step {step}: {name} is slow: {ratio:.1f} times its peers' median of the last steps")
            self._note("straggler", name=name, ratio=ratio, step=step)
        self.metrics.write(record)
        self.display.step(record)
        if self._is_on_policy and not self._has_warned and metrics.agreement_mean > self._agreement_limit:
            self._has_warned = True
            self.display.say(
                f"step {step}: trainer and generator disagree about the tokens that were sampled, by a factor of "
                f"{metrics.agreement_mean:.4f} on average: what is trained is not quite what was sampled"
            )

    # what happens besides steps

    async def _evaluate(self, when: str) -> Proportion:
        await self._delivered()
        result = await self._interruptible(evaluate(self.meshes, self.held_out, self.config.rollout.max_new_tokens))
        self.metrics.write({"step": self.progress.step, "held_out_accuracy": result.value})
        self.display.say(f"held-out accuracy {when}: {result}")
        return result

    async def _save(self) -> None:
        """Begin a checkpoint of this step; it is written while the run goes on."""
        progress = self.progress
        before = progress.held_out_before
        await self.saving.begin(
            ControllerState(
                progress.step, self.stream.position, before.as_dict() if before else None, progress.seconds_training
            )
        )

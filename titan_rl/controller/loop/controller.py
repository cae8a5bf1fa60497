"""The loop. It moves prompts, small records and versions; tensors go from actor to actor.

    prompts ─▶ groups ─▶ batch ─▶ optimizer step ─▶ weights v+1
       ▲                                               │
       └──────────── admission (staleness) ◀── live ◀──┘

A step is three verbs. With ``max_staleness = 0`` a batch is sampled, trained and published in turn; with more, sampling
goes on meanwhile. Generators take a published version while the trainer goes on, if it can. There is no second path.

    stage      consumes              waits for                           who unblocks it
    ---------  --------------------  ----------------------------------  ------------------------------------------
    sample     prompts               the group that was admitted first;  a verifier's answer; a version that goes live
               (rollout_queue.py)    a free slot (admission.py)          (weight_sync.py), which frees slots
    train      groups, as batches    every trainer rank's answer         the ranks; one that died is replaced first
                                                                         (mesh/control/trainer_repair.py)
    publish    the new weights       the version before to be live;      the generators; those that fail are taken out
                                     every rank's copy to be staged      (mesh/control/weight_sync.py)
    save       the trainer's state   the checkpoint before it            the ranks' writing threads (checkpointing.py)

Every one of these waits has a deadline (``mesh.step_timeout``, ``verifier.episode_timeout``), and all but train and
publish end when the user asks to stop (shutdown.py).
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from titan_rl.algorithms.base import Algorithm
from titan_rl.algorithms.batches.batching import step_batches, update_parts
from titan_rl.config.sections.schema import Config
from titan_rl.controller.initial_policy import keep_policy
from titan_rl.controller.loop.evaluate import evaluate
from titan_rl.controller.loop.interface import Loop
from titan_rl.controller.loop.reporting import PhaseTimer, Reporter, StepReport
from titan_rl.controller.loop.rollout_queue import Collected, RolloutQueue
from titan_rl.controller.loop.shutdown import Shutdown, Stopped, StopRequest
from titan_rl.controller.loop.step_recorder import StepRecorder
from titan_rl.controller.loop.suites import evaluate_suites
from titan_rl.controller.preflight.live_settings import Effect, Effects
from titan_rl.controller.recovery.checkpointing import Checkpointing
from titan_rl.controller.recovery.frozen_weights import FrozenWeights
from titan_rl.controller.recovery.nonfinite_batches import NonfiniteBatches
from titan_rl.controller.recovery.recorded_rollouts import Recovery
from titan_rl.data.nonfinite import NonfiniteBatch
from titan_rl.data.types import Batch, EngineStatistics, Group, Layout, Prompt, StepMetrics
from titan_rl.environments.rollout.suites import Suite
from titan_rl.mesh.control.weight_sync import OnLive
from titan_rl.mesh.meshes import Meshes
from titan_rl.mesh.processes.deadlines import within
from titan_rl.records.checkpoints.checkpoints import ControllerState
from titan_rl.records.metrics import mean_metrics
from titan_rl.records.run_directory.rundir import RunDir
from titan_rl.records.run_directory.summary import Progress
from titan_rl.records.statistics import Proportion
from titan_rl.records.steps.rollouts import write_rollouts

_DELIVERY_SECONDS = 60.0
"""For which a run that is stopped waits for its last weights to be live, so that its last step is reported."""
Update = Callable[[int], Awaitable[list[StepMetrics | NonfiniteBatch]]]


@dataclass(frozen=True)
class Components:
    """Components of the loop. Each owns its own state, and none knows the loop."""

    meshes: Meshes
    queue: RolloutQueue
    recovery: Recovery
    checkpointing: Checkpointing
    nonfinite_batches: NonfiniteBatches
    frozen: FrozenWeights
    reporter: Reporter
    progress: Progress


class Controller(Loop):
    """Loop of a run with generators. Owns the order of stages."""

    def __init__(
        self,
        config: Config,
        algorithm: Algorithm,
        layout: Layout,
        run_dir: RunDir,
        held_out: list[Prompt],
        suites: Sequence[Suite],
        stop: StopRequest,
        components: Components,
    ):
        self.config, self.algorithm, self.layout = config, algorithm, layout
        self.run_dir, self.held_out, self.suites, self.stop = run_dir, held_out, suites, stop
        self.meshes, self.trainer = components.meshes, components.meshes.trainer
        self.queue, self.weights, self.recovery = components.queue, components.meshes.weights, components.recovery
        self.checkpointing, self.nonfinite_batches = components.checkpointing, components.nonfinite_batches
        self.frozen = components.frozen
        self.reporter, self.progress = components.reporter, components.progress
        self.log = components.reporter.display.log
        self.shutdown = Shutdown(
            *(run_dir, self.trainer, self.checkpointing, self.nonfinite_batches, self.progress),
            save_last=partial(self.save, is_last=True),
            log=self.log,
            export_dtype=config.checkpoint.export_dtype,
            export_quantization=config.checkpoint.export_quantization,
        )
        self.step_recorder = StepRecorder(run_dir, components.meshes.record)
        self._is_between_steps = True

    # the beginning and the end of a run

    async def begin(self) -> None:
        """SFT steps if there are any, version 0, and what the model can do before any training."""
        on_step = partial(self.reporter.display.sft_step, self.config.sft.steps)
        self.reporter.display.enter("supervised steps")
        await self.stop.interrupts(self.recovery.sft(self.trainer, self.meshes.dispatcher, on_step))
        await keep_policy(self.config, self.algorithm, self.run_dir, self.meshes)
        await self.frozen.begin()
        await self.trainer.begin_at(0)
        self.queue.admission.restart(0)
        await self._send_weights(0)
        self.progress.held_out_before = await self.evaluate("before reinforcement learning")
        if self.config.recovery.nonfinite == "rollback":
            await self.save()  # something to go back to from the first step on

    async def resume(self) -> None:
        """Catch up to the ledger's last step, from the newest checkpoint or from the beginning.

        The steps between are trained again from the rollouts that were written down; nothing is sampled twice.
        """
        start = time.perf_counter()
        path = await self.recovery.load_newest(self.trainer)
        if path is None:
            await self.begin()
            await self.weights.until_live()
        else:
            self.checkpointing.started_from(self.progress.step)
            await self.frozen.begin()
        first = self.progress.step
        await self.recovery.train_recorded(self.trainer, self.stop.check)
        last = self.progress.step
        await self._go_on_from_here()
        self.log(
            f"resumed from {path or 'the base model'}: {last - first} steps trained again, now at step {last}, "
            f"{self.queue.num_waiting} prompts pending"
        )
        seconds = time.perf_counter() - start
        self.reporter.record_event("resumed", checkpoint_step=first, step=last, redone=last - first, seconds=seconds)

    async def _go_on_from_here(self) -> None:
        """The trainer is at ``progress.step`` by another way than the step before."""
        self.queue.restart(self.recovery.rewind(self.progress.step), self.progress.step)
        await self._send_weights(self.progress.step)

    async def take_settings(self, algorithm: Algorithm, effects: Effects) -> None:
        """Settings have changed between two steps, of which the newest checkpoint is the last (change_settings.py)."""
        self.algorithm = self.recovery.algorithm = algorithm
        await self.weights.until_live()
        if Effect.SAMPLING in effects:  # what is under way was asked for under the settings before
            self.queue.restart(self.recovery.rewind(self.progress.step), self.progress.step)
            self.queue.admission.advance(self.progress.step)
        if Effect.REWARD in effects:
            await self.meshes.verifiers.begin_anew()
        if Effect.TRAINER in effects:
            await self.trainer.begin_anew()
        elif Effect.UPDATES in effects:
            await self.trainer.take_settings()

    async def finish(self) -> None:
        """After the last step: what the model can do now, a checkpoint, and the model as a Hugging Face directory."""
        await self.reported()
        self.queue.ledger.verify()
        await self.frozen.check()
        self.progress.held_out_after = await self.evaluate("after")
        self.reporter.enter(self.progress.step, "saving the model")
        await self.shutdown.complete()

    async def rescue(self, error: BaseException) -> None:
        """Save a complete checkpoint if the trainer is between two steps and has something new."""
        if isinstance(error, Stopped):
            with suppress(Exception):  # it is a stop that was asked for, whatever else goes wrong now
                await within(_DELIVERY_SECONDS, "the last weight update", self.weights.until_live())
        await self.shutdown.rescue(error, is_between_steps=self._is_between_steps)

    def cancel(self) -> None:
        """Cancel sampling and weight sync beside the current step."""
        self.queue.cancel()
        self.weights.cancel()

    # one step

    async def step(self) -> None:
        """Sample, train, publish; then what is due besides.

        Errors: Stopped; NonfiniteBatchesError; an actor's fault."""
        timer = PhaseTimer()
        collected, batches, metrics = await self._sample_and_train(timer)
        await self.publish(StepReport(self.progress.step, collected, batches, metrics, timer))

    async def publish(self, report: StepReport) -> None:
        """Publish the weights of a step, report it when they are live, evaluate and save if due."""
        self.reporter.enter(report.step, "publishing")
        await self.weights.until_live()
        await self._send_weights(report.step, partial(self._report, report))
        report.timer.end("publish")
        if self._is_due(self.config.eval.every) and self.progress.step < self.progress.steps_asked:
            await self.evaluate(f"at step {self.progress.step}")
        if self.checkpointing.is_due(self.progress.step, self.config.checkpoint.every):
            self.reporter.enter(self.progress.step, "saving")
            await self.save()

    async def _sample_and_train(self, timer: PhaseTimer) -> tuple[Collected, list[Batch], StepMetrics]:
        """The first batch that can be applied: one with non-finite values does not make a step."""
        while True:
            collected = await self.sample()
            timer.end("wait")
            batches = self.batches(collected.groups)
            metrics = await self.train(collected, partial(self.trainer.train, batches))
            timer.end("train")
            if metrics is not None:
                await self.step_recorder.trained(self.progress.step, collected.groups, batches)
                return collected, batches, metrics

    def batches(self, groups: list[Group]) -> list[Batch]:
        """Batches of a step, one for each update."""
        return step_batches(groups, self.algorithm, self.config, self.layout)

    async def sample(self) -> Collected:
        """The groups of the next step. Errors: Stopped; an actor's fault."""
        self.reporter.enter(self.progress.step, "generating")
        collected = await self.stop.interrupts(self.queue.collect())
        self.reporter.collected(self.progress.step + 1, collected)
        return collected

    async def train(self, collected: Collected, update: Update) -> StepMetrics | None:
        """The optimizer steps of a batch, while its rollouts are written down; then it counts as trained.

        ``update(step)`` makes them. None if non-finite values kept it from being a step. Errors: NonfiniteBatchesError.
        """
        step = self.progress.step + 1
        self.reporter.enter(self.progress.step, "training")
        write = asyncio.to_thread(write_rollouts, self.run_dir.rollouts, step, collected.groups)
        writing = asyncio.create_task(write)
        self._is_between_steps = False
        results = await update(step)
        await writing
        return await self._count(step, collected, results)

    async def _count(
        self, step: int, collected: Collected, results: list[StepMetrics | NonfiniteBatch]
    ) -> StepMetrics | None:
        """Settle a batch of which these updates came; None if none was applied."""
        parts = list(zip(update_parts(collected.groups, self.config.algorithm), results, strict=True))
        trained = [group for part, answer in parts if isinstance(answer, StepMetrics) for group in part]
        bad = [group for part, answer in parts if isinstance(answer, NonfiniteBatch) for group in part]
        if trained:
            self.reporter.curriculum_updated(step, self.recovery.stream.record_step(step, collected.sampled))
        self.queue.settle(trained, bad, step)
        if trained:
            self.progress.step = step
        self._is_between_steps = True  # not before: what cannot be written down did not happen, so it is not saved
        if bad:
            await self._after_nonfinite_batch(step, results, bad, is_lost=not trained)
        else:
            self.nonfinite_batches.end_streak(step)
        if self.progress.step != step:
            return None
        if self.progress.seconds_to_first_step is None:
            self.progress.seconds_to_first_step = time.perf_counter() - self.progress.started
        return mean_metrics([answer for answer in results if isinstance(answer, StepMetrics)])

    async def _after_nonfinite_batch(
        self, step: int, results: list[StepMetrics | NonfiniteBatch], bad: list[Group], is_lost: bool
    ) -> None:
        """Name the samples; then stop, go back to the last checkpoint, or simply go on."""
        if is_lost:
            self.queue.give_back_batch()
        findings = [answer for answer in results if isinstance(answer, NonfiniteBatch)]
        await self.nonfinite_batches.record(step, findings, len(bad), is_lost)
        if self.config.recovery.nonfinite == "rollback":
            await self._roll_back()

    async def _roll_back(self) -> None:
        """Everything as it was at the newest checkpoint; what was discarded stays so."""
        await self.weights.until_live()
        await self.checkpointing.finish()
        self.queue.cancel()
        path = await self.recovery.load_newest(self.trainer)
        if path is None:
            raise RuntimeError(f"no checkpoint in {self.checkpointing.folder.root} is complete: nothing to go back to")
        self.checkpointing.started_from(self.progress.step)
        await self._go_on_from_here()
        self.log(f"back to {path}, {self.queue.num_waiting} prompts pending")
        self.nonfinite_batches.rolled_back()

    async def _send_weights(self, version: int, then: OnLive = lambda statistics, seconds: None) -> None:
        """A version that is live lets more groups be admitted."""

        def on_live(statistics: list[EngineStatistics], seconds: float) -> None:
            self.queue.admission.advance(version)
            then(statistics, seconds)

        await self.weights.send(version, on_live)

    def _report(self, report: StepReport, statistics: list[EngineStatistics], seconds: float) -> None:
        self.reporter.step(report, statistics, seconds)
        self.step_recorder.live(report)

    # what happens besides steps

    def _is_due(self, every: int) -> bool:
        return every > 0 and self.progress.step % every == 0

    async def reported(self) -> None:
        """Wait until the last step is reported."""
        await self.weights.until_live()
        await self.step_recorder.written()

    async def evaluate(self, when: str) -> Proportion:
        """Held-out accuracy of the weights that were published last, after that the suites.

        Errors: Stopped; those of ``evaluate`` and ``evaluate_suites``."""
        await self.weights.until_live()
        self.reporter.display.enter("evaluating")
        work = evaluate(self.meshes, self.held_out, self.config)
        with self.meshes.record.span("evaluate", "controller"):
            result = await self.stop.interrupts(work)
        self.reporter.evaluated(self.progress.step, when, result)
        record = partial(self.reporter.suite_evaluated, self.progress.step)
        work = evaluate_suites(self.meshes, self.suites, self.config, record)
        with self.meshes.record.span("evaluate suites", "controller"):
            await self.stop.interrupts(work)
        return result

    async def save(self, *, is_last: bool = False) -> None:
        """Begin a checkpoint of this step; it is written while the run goes on. ``is_last``: no update follows."""
        progress, before = self.progress, self.progress.held_out_before
        position = self.recovery.stream.position
        seconds = progress.seconds_training
        await self.checkpointing.begin(
            ControllerState(progress.step, position, before.as_dict() if before else None, seconds), is_last=is_last
        )

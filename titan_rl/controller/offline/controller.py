"""Loop of a run on data files: rows go to the trainer, metrics come back.

It shares with controller.py what both need, and the session drives either.

    data ─▶ batch ─▶ optimizer step ─▶ metrics
             (its examples follow from the step's number: steps.py)
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from titan_rl.algorithms.base import Algorithm
from titan_rl.controller.initial_policy import keep_policy
from titan_rl.controller.loop.interface import HeldOut, Loop
from titan_rl.controller.loop.reporting import PhaseTimer, Reporter
from titan_rl.controller.loop.shutdown import Shutdown, StopRequest
from titan_rl.controller.loop.suites import evaluate_suites
from titan_rl.controller.offline.recovery import DataRecovery
from titan_rl.controller.offline.steps import DataSteps
from titan_rl.controller.preflight.device import tolerance_here
from titan_rl.controller.preflight.live_settings import Effect, Effects
from titan_rl.controller.recovery.checkpointing import Checkpointing
from titan_rl.controller.recovery.frozen_weights import FrozenWeights
from titan_rl.controller.recovery.nonfinite_batches import NonfiniteBatches
from titan_rl.data.nonfinite import NonfiniteBatch
from titan_rl.data.types import Batch, StepMetrics
from titan_rl.environments.rollout.suites import Suite
from titan_rl.mesh.meshes import Meshes
from titan_rl.records.checkpoints.checkpoints import ControllerState
from titan_rl.records.metrics import UPDATE_LEFT_OUT, read_metrics, trained_metrics
from titan_rl.records.run_directory.rundir import RunDir
from titan_rl.records.run_directory.summary import Progress
from titan_rl.records.steps.skipped_rows import SkippedRows
from titan_rl.trainer.model.determinism import is_equal

_OF_ROLLOUTS = ("agreement_mean", "agreement_max", "kl_k3")
"""Metrics of a step that compare the trainer with who sampled."""
_COMPARED = ("loss", "grad_norm")


@dataclass(frozen=True)
class DataComponents:
    """Components of the loop. Each owns its own state, and none knows the loop."""

    meshes: Meshes
    steps: DataSteps
    recovery: DataRecovery
    checkpointing: Checkpointing
    nonfinite_batches: NonfiniteBatches
    frozen: FrozenWeights
    reporter: Reporter
    progress: Progress
    left_out: SkippedRows


class OfflineController(Loop):
    """Loop of a run on data files. Owns the order of stages."""

    def __init__(self, run_dir: RunDir, suites: Sequence[Suite], stop: StopRequest, parts: DataComponents):
        self.run_dir, self.suites, self.stop, self.frozen = run_dir, suites, stop, parts.frozen
        self.meshes, self.trainer = parts.meshes, parts.meshes.trainer
        self.steps, self.recovery, self.checkpointing = parts.steps, parts.recovery, parts.checkpointing
        self.nonfinite_batches, self.reporter, self.progress = parts.nonfinite_batches, parts.reporter, parts.progress
        self.left_out = parts.left_out
        self.log = parts.reporter.display.log
        self.shutdown = Shutdown(
            *(run_dir, self.trainer, self.checkpointing, self.nonfinite_batches, self.progress),
            save_last=partial(self.save, is_last=True),
            log=self.log,
            export_dtype=self.steps.config.checkpoint.export_dtype,
            export_quantization=self.steps.config.checkpoint.export_quantization,
        )
        self._is_between_steps = True
        self._num_published = -1
        """Step whose weights the generators have, in a run with suites."""
        self._recorded = {int(record["step"]): record for record in read_metrics(run_dir.root) if "loss" in record}
        """Steps that the run has done before it was resumed."""

    # the beginning and the end of a run

    async def begin(self) -> None:
        """SFT steps if there are any, and what the model can do before any training."""
        self._log_data()
        on_step = partial(self.reporter.display.sft_step, self.steps.config.sft.steps)
        self.reporter.display.enter("supervised steps")
        await self.stop.interrupts(self.recovery.sft(self.trainer, on_step))
        await keep_policy(self.steps.config, self.steps.algorithm, self.run_dir, self.meshes)
        await self.frozen.begin()
        await self.trainer.begin_at(0)
        result = await self.evaluate("before training")
        self.progress.held_out_before = result.accuracy

    async def resume(self) -> None:
        """From the newest checkpoint or, without one, from the beginning; the steps after it draw the same data."""
        start = time.perf_counter()
        path = await self.recovery.load_newest(self.trainer)
        if path is None:
            await self.begin()
        else:
            self._log_data()
            await self.frozen.begin()
            self.checkpointing.started_from(self.progress.step)
        self.log(f"resumed from {path or 'the base model'} at step {self.progress.step}")
        self.reporter.record_event("resumed", step=self.progress.step, seconds=time.perf_counter() - start)

    def _log_data(self) -> None:
        dataset = self.steps.dataset
        count, place = len(dataset.too_long), self.run_dir.left_out_rows
        skipped = f", {count} left out as too long ({place} names them)" if count else ""
        self.log(f"data: {len(dataset.train)} rows to train on, {len(dataset.held_out)} held out{skipped}")

    async def take_settings(self, algorithm: Algorithm, effects: Effects) -> None:
        """As that of a run with a generator (controller.py)."""
        self.steps.algorithm = algorithm
        if Effect.TRAINER in effects:
            await self.trainer.begin_anew()
        elif Effect.UPDATES in effects:
            await self.trainer.take_settings()

    async def finish(self) -> None:
        """After the last step: what the model can do now, a checkpoint, and the model as a Hugging Face directory."""
        result = await self.evaluate("after")
        await self.frozen.check()
        self.progress.held_out_after = result.accuracy
        self.reporter.enter(self.progress.step, "saving the model")
        await self.shutdown.complete()

    async def rescue(self, error: BaseException) -> None:
        """Save a complete checkpoint if the trainer is between two steps and has something new."""
        await self.shutdown.rescue(error, is_between_steps=self._is_between_steps)

    def cancel(self) -> None:
        """Nothing is under way besides the step at hand."""

    # one step

    async def step(self) -> None:
        """Train; then what is due besides. Errors: Stopped; NonfiniteBatchesError; an actor's fault."""
        self.stop.check()
        await self._train(PhaseTimer())
        config = self.steps.config
        if self._is_due(config.eval.every) and self.progress.step < self.progress.steps_asked:
            await self.evaluate(f"at step {self.progress.step}")
        if self.checkpointing.is_due(self.progress.step, config.checkpoint.every):
            self.reporter.enter(self.progress.step, "saving")
            await self.save()

    async def _train(self, timer: PhaseTimer) -> None:
        """A step on all rows that are drawn for it; without those whose numbers are not finite, once they are known."""
        step = self.progress.step + 1
        self.reporter.enter(self.progress.step, "training")
        batch, result = await self._attempt(step)
        while isinstance(result, NonfiniteBatch) and self.progress.step < step:
            batch, result = await self._attempt(step)
        timer.end("train")
        if self.progress.seconds_to_first_step is None:
            self.progress.seconds_to_first_step = time.perf_counter() - self.progress.started
        if isinstance(result, StepMetrics):
            self.nonfinite_batches.end_streak(step)
            self.reporter.trained(self._record(step, batch, result, timer))
            self._compare(step, result)

    async def _attempt(self, step: int) -> tuple[Batch, StepMetrics | NonfiniteBatch]:
        """After non-finite values, which change nothing, the step is still to be done if rows are to blame. If none
        is, it counts as done: the same rows would bring them again, and so they do whenever the step is done again.

        Errors: NonfiniteBatchesError."""
        self._is_between_steps = False
        batch, result = await self.steps.train(self.trainer, step)
        is_done = isinstance(result, StepMetrics) or not self._leave_out(step, result)
        self.progress.step, self._is_between_steps = step if is_done else step - 1, True
        if isinstance(result, NonfiniteBatch):
            if is_done:
                self.reporter.metrics.write({"step": step, UPDATE_LEFT_OUT: 1})
            await self.nonfinite_batches.record(step, [result], len(self.steps.examples(step)), is_lost=False)
        return batch, result

    def _leave_out(self, step: int, finding: NonfiniteBatch) -> bool:
        """From this step on leave out the rows that non-finite values came from. False if that is no remedy: where
        weights are not finite, or no row is to blame, or all are, which tells of the model and not of them."""
        why = {culprit.prompt_id: culprit.what for culprit in finding.culprits}
        drawn = {example.place for example in self.steps.examples(step)}
        if finding.weights or not why or drawn <= why.keys():
            return False
        self.left_out.leave_out(why, step)
        self.log(f"step {step}: left out from now on, as {self.run_dir.left_out_rows} tells: {', '.join(why)}")
        self.reporter.record_event("rows_left_out", step=step, rows=why)
        return True

    def _record(self, step: int, batch: Batch, metrics: StepMetrics, timer: PhaseTimer) -> dict[str, float]:
        record = {"step": step, "epoch": self.steps.position(step) / len(self.steps.dataset.train)}
        record |= {name: value for name, value in trained_metrics(metrics).items() if name not in _OF_ROLLOUTS}
        record |= self.steps.means(metrics, self.steps.examples(step))
        seconds = {
            "forward_backward": metrics.seconds_forward_backward,
            "optimizer": metrics.seconds_optimizer,
            "step": timer.total,
        }
        record |= {f"seconds_{name}": value for name, value in seconds.items()}
        speed = batch.num_tokens / max(timer.total, 1e-9)
        return record | {"num_tokens": batch.num_tokens, "tokens_per_second_step": speed}

    def _compare(self, step: int, metrics: StepMetrics) -> None:
        """With the same step before the run was resumed: it ought to come out as it did: on a CPU bit for bit."""
        if (recorded := self._recorded.pop(step, None)) is None:
            return
        new, old = {name: getattr(metrics, name) for name in _COMPARED}, {name: recorded[name] for name in _COMPARED}
        self.reporter.record_event("redone", step=step, loss=new["loss"], recorded_loss=old["loss"], same=new == old)
        within = tolerance_here(self.steps.config)
        if not all(is_equal(new[name], old[name], within, of_order=1.0) for name in new):
            self.log(f"step {step} came out otherwise when trained again: {new}, not {old}")

    # what happens besides steps

    def _is_due(self, every: int) -> bool:
        return every > 0 and self.progress.step % every == 0

    async def reported(self) -> None:
        """The last step is, as soon as it is done."""

    async def evaluate(self, when: str) -> HeldOut:
        """Loss and accuracy on held-out data, after that the suites.

        Errors: Stopped, and the trainer ends what it was asked last; an actor's fault."""
        self.reporter.display.enter("evaluating")
        result = await self.stop.interrupts(self.steps.held_out(self.trainer))
        self.reporter.data_evaluated(self.progress.step, when, result.metrics, result.accuracy)
        if self.suites:
            await self._evaluate_suites(self.progress.step)
        return result

    async def _evaluate_suites(self, step: int) -> None:
        """Generators take the weights of this step first."""
        weights = self.meshes.weights
        if self._num_published != step:
            await weights.send(step, lambda statistics, seconds: None)
            self._num_published = step
        await weights.until_live()
        record = partial(self.reporter.suite_evaluated, step)
        await self.stop.interrupts(evaluate_suites(self.meshes, self.suites, self.steps.config, record))

    async def save(self, *, is_last: bool = False) -> None:
        """Begin a checkpoint of this step; it is written while the run goes on. ``is_last``: no update follows."""
        progress, before = self.progress, self.progress.held_out_before
        position = self.steps.position(progress.step)
        state = ControllerState(progress.step, position, before and before.as_dict(), progress.seconds_training)
        await self.checkpointing.begin(state, is_last=is_last)

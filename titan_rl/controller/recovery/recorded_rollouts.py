"""The way back to a step of a run with a generator: its recorded rollouts are trained once more.

Nothing is sampled here, and nothing is decided: the controller says when.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import islice

from titan_rl.algorithms.base import Algorithm
from titan_rl.algorithms.batches.batching import sft_batches, step_batches
from titan_rl.config.sections.schema import Config
from titan_rl.controller.preflight.device import tolerance_here
from titan_rl.controller.recovery.catch_up import RecoveryBase
from titan_rl.data.callbacks import Log, OnLoss, RecordEvent, ignore_loss
from titan_rl.data.types import Batch, Group, Layout, Prompt, StepMetrics
from titan_rl.environments.prompts.stream import PromptStream, sft_stream
from titan_rl.environments.rollout.decoding import decoding_of
from titan_rl.mesh.control.dispatcher import Dispatcher
from titan_rl.mesh.control.trainer_repair import TrainerMesh
from titan_rl.mesh.members.trainers import Trainers
from titan_rl.records.checkpoints.checkpoints import CheckpointFolder, ControllerState
from titan_rl.records.ledger.ledger import Ledger
from titan_rl.records.metrics import MetricsLog, mean_metrics, read_metrics, sampling_metrics, trained_metrics
from titan_rl.records.run_directory.rundir import RunDir
from titan_rl.records.run_directory.summary import Progress
from titan_rl.records.steps.rollouts import Limits, RolloutsError, last_recorded, read_rollouts
from titan_rl.trainer.model.determinism import is_equal


class Recovery(RecoveryBase):
    """Brings prompt stream and ledger to that step, too."""

    def __init__(
        self,
        config: Config,
        algorithm: Algorithm,
        layout: Layout,
        run_dir: RunDir,
        folder: CheckpointFolder,
        stream: PromptStream,
        ledger: Ledger,
        metrics: MetricsLog,
        progress: Progress,
        *,
        limits: Limits,
        log: Log,
        record_event: RecordEvent,
    ):
        """``limits``: of what a recorded rollout may be, under the decoding settings at the start."""
        super().__init__(folder, progress, log)
        self.config, self.algorithm, self.layout, self.limits = config, algorithm, layout, limits
        self.run_dir, self.stream, self.ledger = run_dir, stream, ledger
        self.metrics, self.record_event = metrics, record_event

    async def sft(self, trainer: TrainerMesh, dispatcher: Dispatcher, on_step: OnLoss = ignore_loss) -> None:
        """Supervised steps on demonstrations from a stream of their own."""
        settings = self.config.sft
        if not settings.steps:
            return
        start = time.perf_counter()
        stream = sft_stream(self.stream.task, self.config.run.seed)
        rollouts = await dispatcher.demonstrate(list(islice(stream, settings.steps * settings.examples_per_step)))
        rows = [batch.rows for batch in sft_batches(rollouts, self.config, self.layout)]
        await self._take_sft(trainer, rows, start, on_step)

    def _go_to(self, state: ControllerState) -> None:
        super()._go_to(state)
        self.stream.position = state.stream_position

    def rewind(self, step: int) -> deque[Prompt]:
        """Prompts that were issued and are not trained by this step must be sampled first: these, in order."""
        pending = self.ledger.rewind(step, self.config.rollout.group_size)
        self.stream.resume_after(self.ledger.last_issued())
        if self.stream.curriculum is not None:
            self.stream.curriculum.restore(step)
        return deque(self.stream.by_id(prompt_id) for prompt_id in pending)

    async def train_recorded(self, trainer: TrainerMesh, check_stop: Callable[[], None] = lambda: None) -> None:
        """Train the recorded steps again, up to the first unreadable one; the rest is sampled again.

        ``check_stop`` is called before each. Errors: what it raises."""
        last = last_recorded(self.run_dir.rollouts, self.progress.step, self.ledger.last_trained_step())
        recorded = {int(record["step"]): record for record in read_metrics(self.run_dir.root) if "loss" in record}
        for step in range(self.progress.step + 1, last + 1):
            check_stop()
            try:
                await self._train_again(trainer, step, recorded.get(step))
            except RolloutsError as error:
                self.log(f"{error}; what was trained from step {step} on is sampled again")
                return

    async def _batches(self, step: int) -> tuple[list[Group], list[Batch]]:
        """A recorded step's groups, and its batches. Decoding settings may be others by now."""
        limits = replace(self.limits, decoding=decoding_of(self.config.rollout))
        groups = await asyncio.to_thread(read_rollouts, self.run_dir.rollouts, step, limits)
        return groups, step_batches(groups, self.algorithm, self.config, self.layout)

    async def _train_again(self, trainer: TrainerMesh, step: int, recorded: dict[str, float] | None) -> None:
        """A recorded step. It ought to come out as it did: on a CPU bit for bit (trainer/model/determinism.py)."""
        groups, batches = await self._batches(step)
        results = await trainer.train(batches, step)
        self.progress.step = step
        steps = [answer for answer in results if isinstance(answer, StepMetrics)]
        again = trained_metrics(mean_metrics(steps)) if steps else {}
        if recorded is None:  # the run ended before it was told
            budget = self.config.rollout.thinking_budget
            self.metrics.write({"step": step, **sampling_metrics(groups, step - 1, budget), **again})
            recorded = again
        new, old = ({name: numbers.get(name) for name in ("loss", "grad_norm")} for numbers in (again, recorded))
        self.record_event("redone", step=step, loss=new["loss"], recorded_loss=old["loss"], same=new == old)
        if not all(is_equal(new[name], old[name], tolerance_here(self.config), of_order=1.0) for name in new):
            self.log(f"step {step} came out otherwise when trained again: {new}, not {old}")

    async def _step_again(self, trainers: Trainers, step: int) -> None:
        _, batches = await self._batches(step)
        await trainers.train(batches, step)

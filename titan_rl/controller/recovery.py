"""Ways to a step that a run has been at: its newest whole checkpoint, or the base model and its warm-up; then the
recorded rollouts of the steps that are missing.

Nothing is sampled here, and nothing is decided: the controller says when.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from itertools import islice
from pathlib import Path

from titan_rl.algorithms.batching import sft_batches, step_batches
from titan_rl.algorithms.registry import make_algorithm
from titan_rl.config.schema import Config
from titan_rl.controller.checkpointing import Saving
from titan_rl.data.types import Prompt, StepMetrics
from titan_rl.environments.prompts import PromptStream, warm_up_stream
from titan_rl.mesh.meshes import Meshes
from titan_rl.records.checkpoints import ControllerState
from titan_rl.records.ledger import Ledger
from titan_rl.records.metrics import MetricsLog, mean_metrics, read_metrics, sampling_metrics, trained_metrics
from titan_rl.records.rollouts import last_recorded, read_rollouts
from titan_rl.records.rundir import RunDir
from titan_rl.records.statistics import Proportion
from titan_rl.records.summary import Progress
from titan_rl.trainer.titan_config import TitanConfig


class Recovery:
    """Brings trainer, prompt stream, ledger and progress to one step."""

    def __init__(
        self,
        config: Config,
        titan: TitanConfig,
        run_dir: RunDir,
        meshes: Meshes,
        stream: PromptStream,
        ledger: Ledger,
        saving: Saving,
        metrics: MetricsLog,
        progress: Progress,
        *,
        say: Callable[[str], None],
        note: Callable[..., None],
    ):
        self.config, self.titan, self.run_dir, self.meshes = config, titan, run_dir, meshes
        self.stream, self.ledger, self.saving = stream, ledger, saving
        self.metrics, self.progress, self.say, self.note = metrics, progress, say, note
        self.algorithm = make_algorithm(config.algorithm, config.run.plugin_path)
        self._warm_up_rows: list = []
        """Of a warm-up that is behind us."""

    async def warm_up(self) -> None:
        """Supervised steps on demonstrations from a stream of their own."""
        warmup = self.config.sft
        if not warmup.steps:
            return
        start = time.perf_counter()
        stream = warm_up_stream(self.stream.task, self.config.run.seed)
        rollouts = await self.meshes.dispatcher.demonstrate(
            list(islice(stream, warmup.steps * warmup.examples_per_step))
        )
        rows = [batch.rows for batch in sft_batches(rollouts, self.config, self.titan.layout)]
        losses = await self.meshes.warm_up(rows)
        self._warm_up_rows = rows
        self.progress.seconds_warm_up = time.perf_counter() - start
        self.say(
            f"warm-up: {len(losses)} supervised steps in {self.progress.seconds_warm_up:.1f} s, "
            f"loss {losses[0]:.3f} to {losses[-1]:.3f}"
        )

    async def _newest_whole(self) -> tuple[Path, ControllerState] | None:
        return await asyncio.to_thread(self.saving.folder.newest_whole, say=self.say)

    async def load_newest(self) -> Path | None:
        """The checkpoint that trainer, prompt stream and progress are at now; None if none is whole."""
        if (found := await self._newest_whole()) is None:
            return None
        path, state = found
        await self.meshes.call_trainer("load_checkpoint", str(path))
        await self.meshes.begin_at(state.step)
        self.saving.folder.drop_after(state.step)
        self.stream.position = state.stream_position
        self.progress.step = self.saving.saved_step = state.step
        self.progress.seconds_training = state.seconds_training
        if (before := state.held_out_before) is not None:
            self.progress.held_out_before = Proportion(before["correct"], before["count"])
        return path

    def rewind(self, step: int) -> deque[Prompt]:
        """Whoever was issued and is not trained by this step is to be sampled first; these prompts, in order."""
        pending = self.ledger.rewind(step, self.config.rollout.group_size)
        self.stream.go_beyond(self.ledger.last_issued())
        return deque(self.stream.by_id(prompt_id) for prompt_id in pending)

    async def train_recorded(self) -> None:
        """All steps that the ledger knows as trained and that are written down, up to the first that is not."""
        last = last_recorded(self.run_dir.rollouts, self.progress.step, self.ledger.last_trained_step())
        recorded = {int(record["step"]): record for record in read_metrics(self.run_dir.root) if "loss" in record}
        for step in range(self.progress.step + 1, last + 1):
            await self._train_again(step, recorded.get(step))

    async def _train_again(self, step: int, recorded: dict[str, float] | None) -> None:
        """A recorded step. It ought to come out as it did, bit for bit."""
        groups = await asyncio.to_thread(read_rollouts, self.run_dir.rollouts, step)
        answers = await self.meshes.train(step_batches(groups, self.algorithm, self.config, self.titan.layout), step)
        self.progress.step = step
        done = [answer for answer in answers if isinstance(answer, StepMetrics)]
        again = trained_metrics(mean_metrics(done)) if done else {}
        if recorded is None:  # the run ended before it was told
            self.metrics.write({"step": step, **sampling_metrics(groups, step - 1), **again})
            recorded = again
        new, old = ({name: numbers.get(name) for name in ("loss", "grad_norm")} for numbers in (again, recorded))
        self.note("redone", step=step, loss=new["loss"], recorded_loss=old["loss"], same=new == old)
        if new != old:
            self.say(f"step {step} came out otherwise when trained again: {new}, not {old}")

    async def catch_up(self, step: int | None) -> int:
        """A mended trainer is at this step, or (None) at the file's weights: bring it to the steps that are done.

        The number of these steps.
        """
        if step is None:
            if (found := await self._newest_whole()) is not None:
                path, state = found
                step = state.step
                await self.meshes.call_trainer_without_mending("load_checkpoint", str(path))
            else:
                step = 0
                if self._warm_up_rows:
                    await self.meshes.warm_up_without_mending(self._warm_up_rows)
        for redone in range(step + 1, self.progress.step + 1):
            groups = await asyncio.to_thread(read_rollouts, self.run_dir.rollouts, redone)
            await self.meshes.train_without_mending(
                step_batches(groups, self.algorithm, self.config, self.titan.layout), redone
            )
        return self.progress.step - step

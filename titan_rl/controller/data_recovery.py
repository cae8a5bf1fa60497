"""Ways to a step of a run without a generator: its newest complete checkpoint, or the base model and its SFT steps;
then the same data once more."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from titan_rl.controller.data_steps import DataSteps
from titan_rl.mesh.trainer_mesh import TrainerMesh
from titan_rl.mesh.trainers import Trainers
from titan_rl.records.checkpoints import CheckpointFolder
from titan_rl.records.statistics import Proportion
from titan_rl.records.summary import Progress


class DataRecovery:
    """Brings the trainer and the progress to one step."""

    def __init__(self, steps: DataSteps, folder: CheckpointFolder, progress: Progress, say: Callable[[str], None]):
        self.steps, self.folder, self.progress, self.say = steps, folder, progress, say
        self._sft_rows: list = []
        """Of the SFT steps, once they are done: a trainer without any state must take them again."""

    async def sft(self, trainer: TrainerMesh) -> None:
        """The supervised steps before the first, if there are any."""
        if not self.steps.config.sft.steps:
            return
        start = time.perf_counter()
        rows = await asyncio.to_thread(self.steps.sft_rows)
        losses = await trainer.sft(rows)
        self._sft_rows = rows
        self.progress.seconds_sft = time.perf_counter() - start
        self.say(
            f"SFT: {len(losses)} supervised steps in {self.progress.seconds_sft:.1f} s, "
            f"loss {losses[0]:.3f} to {losses[-1]:.3f}"
        )

    async def load_newest(self, trainer: TrainerMesh) -> Path | None:
        """The checkpoint that trainer and progress are at now; None if none is complete."""
        if (found := await asyncio.to_thread(self.folder.newest_complete, say=self.say)) is None:
            return None
        path, state = found
        await trainer.call("load_checkpoint", str(path))
        await trainer.begin_at(state.step)
        self.folder.drop_after(state.step)
        self.progress.step, self.progress.seconds_training = state.step, state.seconds_training
        if (before := state.held_out_before) is not None:
            self.progress.held_out_before = Proportion(before["correct"], before["count"])
        return path

    async def catch_up(self, trainers: Trainers, step: int | None) -> int:
        """Repaired ranks are at this step, or (None) at the file's weights: bring them to the steps that are done.

        Gives the number of steps that were done again. Errors: ActorDied, which the caller repairs.
        """
        if step is None:
            step = await self._begin_again(trainers)
        for redone in range(step + 1, self.progress.step + 1):
            await self.steps.train(trainers, redone)
        return self.progress.step - step

    async def _begin_again(self, trainers: Trainers) -> int:
        """From a disk or from the beginning; the step that the ranks are at then."""
        if (found := await asyncio.to_thread(self.folder.newest_complete, say=self.say)) is not None:
            path, state = found
            await trainers.call("load_checkpoint", str(path), what=f"loading {path}")
            return state.step
        if self._sft_rows:
            await trainers.sft(self._sft_rows)
        return 0

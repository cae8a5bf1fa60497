"""Catch-up: newest complete checkpoint or base model with SFT steps, then the missing steps again.

What these are made of, its two kinds say (recovery.py, offline/recovery.py).
"""

import asyncio
import time
from abc import ABC, abstractmethod
from pathlib import Path

from titan_rl.data.callbacks import Log, OnLoss
from titan_rl.data.types import Row
from titan_rl.mesh.control.trainer_repair import TrainerMesh
from titan_rl.mesh.hosts.host_path import HostPath
from titan_rl.mesh.members.endpoints import TrainerEndpoints
from titan_rl.mesh.members.trainers import Trainers
from titan_rl.records.checkpoints.checkpoints import CheckpointFolder, ControllerState
from titan_rl.records.run_directory.summary import Progress
from titan_rl.records.statistics import Proportion


class RecoveryBase(ABC):
    """Brings the trainer and the progress to one step."""

    def __init__(self, folder: CheckpointFolder, progress: Progress, log: Log):
        self.folder, self.progress, self.log = folder, progress, log
        self._sft_rows: list[list[list[Row]]] = []
        """Of the SFT steps, once they are done: a trainer without any state must take them again."""

    @abstractmethod
    async def _step_again(self, trainers: Trainers, step: int) -> None:
        """A step that the run has done; the ranks are at the one before."""

    async def _take_sft(self, trainer: TrainerMesh, rows: list[list[list[Row]]], start: float, on_step: OnLoss) -> None:
        """The supervised steps before the first. ``start``: when work on them began, by ``time.perf_counter``."""
        losses = await trainer.sft(rows, on_step)
        self._sft_rows = rows
        self.progress.seconds_sft = time.perf_counter() - start
        self.log(
            f"SFT: {len(losses)} supervised steps in {self.progress.seconds_sft:.1f} s, "
            f"loss {losses[0]:.3f} to {losses[-1]:.3f}"
        )

    async def _newest_complete(self) -> tuple[Path, ControllerState] | None:
        return await asyncio.to_thread(self.folder.newest_complete, log=self.log)

    async def load_newest(self, trainer: TrainerMesh) -> Path | None:
        """The checkpoint that trainer and progress are at now; None if none is complete."""
        if (newest := await self._newest_complete()) is None:
            return None
        path, state = newest
        await trainer.call(TrainerEndpoints.load_checkpoint(HostPath(path)))
        await trainer.begin_at(state.step)
        self.folder.drop_after(state.step)
        self._go_to(state)
        return path

    def _go_to(self, state: ControllerState) -> None:
        """Set the controller to its state at a checkpoint."""
        self.progress.step, self.progress.seconds_training = state.step, state.seconds_training
        if (before := state.held_out_before) is not None:
            self.progress.held_out_before = Proportion.from_dict(before)

    async def catch_up(self, trainers: Trainers, step: int | None) -> int:
        """Repaired ranks are at this step, or (None) at the file's weights: bring them to the steps that are done.

        Gives the number of steps that were done again. Errors: ActorDied, which the caller repairs.
        """
        if step is None:
            step = await self._begin_again(trainers)
        for redone in range(step + 1, self.progress.step + 1):
            await self._step_again(trainers, redone)
        return self.progress.step - step

    async def _begin_again(self, trainers: Trainers) -> int:
        """From a disk or from the beginning; the step that the ranks are at then."""
        if (newest := await self._newest_complete()) is not None:
            path, state = newest
            await trainers.call(TrainerEndpoints.load_checkpoint(HostPath(path)), what=f"loading {path}")
            return state.step
        if self._sft_rows:
            await trainers.sft(self._sft_rows)
        return 0

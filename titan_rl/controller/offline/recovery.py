"""The way back to a step of a run without a generator: its data is drawn once more."""

import asyncio
import time

from titan_rl.controller.offline.steps import DataSteps
from titan_rl.controller.recovery.catch_up import RecoveryBase
from titan_rl.data.callbacks import Log, OnLoss, ignore_loss
from titan_rl.mesh.control.trainer_repair import TrainerMesh
from titan_rl.mesh.members.trainers import Trainers
from titan_rl.records.checkpoints.checkpoints import CheckpointFolder
from titan_rl.records.run_directory.summary import Progress


class DataRecovery(RecoveryBase):
    def __init__(self, steps: DataSteps, folder: CheckpointFolder, progress: Progress, log: Log):
        super().__init__(folder, progress, log)
        self.steps = steps

    async def sft(self, trainer: TrainerMesh, on_step: OnLoss = ignore_loss) -> None:
        """The supervised steps before the first, if there are any."""
        if self.steps.config.sft.steps:
            start = time.perf_counter()
            await self._take_sft(trainer, await asyncio.to_thread(self.steps.sft_rows), start, on_step)

    async def _step_again(self, trainers: Trainers, step: int) -> None:
        await self.steps.train(trainers, step)

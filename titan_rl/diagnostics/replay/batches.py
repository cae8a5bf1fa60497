"""Batches of a replay: recorded rollouts, or the data rows of a step without skipped ones."""

import asyncio
import math
from itertools import islice

from titan_rl.algorithms.batches.batching import sft_batches, step_batches
from titan_rl.controller.offline.steps import DataSteps
from titan_rl.controller.preflight.checks import Checked
from titan_rl.data.nonfinite import NonfiniteBatch
from titan_rl.data.text.tokenizer import load_tokenizer
from titan_rl.data.types import Rollout, Row, StepMetrics
from titan_rl.environments.prompts.stream import sft_stream
from titan_rl.environments.rollout.demonstrations import demonstrate_all
from titan_rl.mesh.control.trainer_repair import TrainerMesh
from titan_rl.records.metrics import UPDATE_LEFT_OUT, mean_metrics, read_metrics
from titan_rl.records.run_directory.rundir import RunDir
from titan_rl.records.steps.rollouts import has_rollouts, read_rollouts
from titan_rl.records.steps.skipped_rows import SkippedRows

NOTHING = math.nan
"""The loss of a step whose update was left out."""
Recorded = dict[int, tuple[float, float]]
"""Loss and gradient norm by step."""


class RolloutSteps:
    """Replayed steps of a run with generators."""

    def __init__(self, run_dir: RunDir, checked: Checked, model_path: str) -> None:
        self.run_dir, self.checked, self.model_path = run_dir, checked, model_path

    def sft_rows(self) -> list[list[list[Row]]]:
        """Rows of the run's SFT steps."""
        checked = self.checked
        return [batch.rows for batch in sft_batches(self._demonstrations(), checked.config, checked.titan.layout)]

    def _demonstrations(self) -> list[Rollout]:
        checked, config = self.checked, self.checked.config
        tokenizer = load_tokenizer(self.model_path, config)
        prompts = islice(sft_stream(checked.task, config.run.seed), config.sft.steps * config.sft.examples_per_step)
        return asyncio.run(demonstrate_all(prompts, checked.task, tokenizer, config.verifier.step_timeout))

    async def train(self, trainer: TrainerMesh, step: int) -> list[StepMetrics | NonfiniteBatch]:
        checked, groups = self.checked, read_rollouts(self.run_dir.rollouts, step)
        return await trainer.train(step_batches(groups, checked.algorithm, checked.config, checked.titan.layout), step)


class DataReplay:
    """Replayed steps of a run without a generator."""

    def __init__(self, run_dir: RunDir, checked: Checked) -> None:
        assert checked.dataset is not None, "a run with a dataset alone is replayed so (steps_of_replay)"
        left_out = SkippedRows(run_dir.left_out_rows)
        parts = checked.config, checked.algorithm, checked.titan.layout, checked.dataset
        self._steps = DataSteps(*parts, is_left_out=left_out.is_out)

    def sft_rows(self) -> list[list[list[Row]]]:
        return self._steps.sft_rows()

    async def train(self, trainer: TrainerMesh, step: int) -> list[StepMetrics | NonfiniteBatch]:
        return [(await self._steps.train(trainer, step))[1]]


def steps_of_replay(run_dir: RunDir, checked: Checked, model_path: str) -> RolloutSteps | DataReplay:
    """Replayed steps of a run, with or without generators."""
    if checked.dataset is not None:
        return DataReplay(run_dir, checked)
    return RolloutSteps(run_dir, checked, model_path)


def as_metrics(answers: list[StepMetrics | NonfiniteBatch]) -> StepMetrics:
    """Metrics of the applied update, as the run recorded it; ``NOTHING`` for a step without one."""
    if done := [answer for answer in answers if isinstance(answer, StepMetrics)]:
        return mean_metrics(done)
    return StepMetrics(loss=NOTHING, grad_norm=NOTHING)


def recorded_steps(run_dir: RunDir, *, on_data: bool) -> Recorded:
    """Steps that can be trained again: with rollouts, those whose rollouts are there too; on data, all that were done,
    with ``NOTHING`` where no update was applied."""
    steps: Recorded = {}
    for record in read_metrics(run_dir.root):
        step = int(record["step"])
        if {"loss", "grad_norm"} <= record.keys():
            if on_data or has_rollouts(run_dir.rollouts, step):
                steps[step] = record["loss"], record["grad_norm"]
        elif on_data and UPDATE_LEFT_OUT in record:
            steps[step] = NOTHING, NOTHING
    return steps

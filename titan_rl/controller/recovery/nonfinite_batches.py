"""Handling of non-finite batches: names, limit of consecutive ones, records."""

import asyncio

from titan_rl.config.sections.schema import RecoveryConfig
from titan_rl.data.callbacks import Log, RecordMetrics
from titan_rl.data.nonfinite import NonfiniteBatch
from titan_rl.records.run_directory.rundir import RunDir
from titan_rl.records.steps.rollouts import set_aside_rollouts


class NonfiniteBatchesError(RuntimeError):
    """Too many batches in a row whose loss or gradient was not finite."""


class NonfiniteStreak:
    """Streak of non-finite batches. A step repeated after a rollback does not end it."""

    def __init__(self) -> None:
        self.length = self._newest = 0

    def bad(self, step: int) -> None:
        self.length, self._newest = self.length + 1, max(step, self._newest)

    def good(self, step: int) -> None:
        if step >= self._newest:
            self.length = 0


class NonfiniteBatches:
    """Owner of the streak of non-finite batches and of whether weights are finite."""

    def __init__(
        self,
        settings: RecoveryConfig,
        run_dir: RunDir,
        *,
        log: Log,
        record_metrics: RecordMetrics,
    ):
        self.settings, self.run_dir, self.log, self.record_metrics = settings, run_dir, log, record_metrics
        self._streak = NonfiniteStreak()
        self.weights_are_finite = True

    def end_streak(self, step: int) -> None:
        """End the streak at a step whose updates were all applied."""
        self._streak.good(step)

    def rolled_back(self) -> None:
        """Mark the weights as finite after a rollback."""
        self.weights_are_finite = True

    async def record(self, step: int, findings: list[NonfiniteBatch], num_groups: int, is_lost: bool) -> None:
        """Record skipped updates of a step. ``is_lost``: all of them, so another batch must make the step.

        Errors: NonfiniteBatchesError after ``recovery.max_nonfinite_steps`` in a row.
        """
        self._streak.bad(step)
        count = self._streak.length
        self.weights_are_finite = not any(answer.weights for answer in findings)
        for answer in findings:
            self.log(f"step {step}: {answer}; the update was left out")
        self.record_metrics({"step": step, "nonfinite_batches_in_a_row": count})
        if is_lost:
            kept = await asyncio.to_thread(set_aside_rollouts, self.run_dir.rollouts, step)
            self.log(f"its {num_groups} groups are discarded, and kept in {kept}")
        if count >= self.settings.max_nonfinite_steps:
            raise NonfiniteBatchesError(
                f"{count} batches in a row had NaN or Inf, the last at step {step}: {findings[-1]}"
            )

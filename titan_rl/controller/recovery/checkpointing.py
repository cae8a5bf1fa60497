"""The controller's side of checkpoints: begun between two steps, written meanwhile, committed when complete.

    begin ──▶ ranks copy their state ──▶ threads of theirs write ──▶ checksums, ledger to disk, rename
    (steps wait for this)                (steps go on)

The last one of a run is written without a copy. At most one is in flight; the next waits for it. Where one cannot be
written, the run says so and goes on, and the checkpoints before it stay.
"""

import asyncio
import time
from pathlib import Path

from titan_rl.data.callbacks import Log, RecordMetrics
from titan_rl.mesh.control.trainer_repair import TrainerMesh
from titan_rl.mesh.hosts.host_path import HostPath
from titan_rl.mesh.members.endpoints import TrainerEndpoints
from titan_rl.mesh.processes.deadlines import within
from titan_rl.records.checkpoints.checkpoints import CheckpointFolder, ControllerState
from titan_rl.records.ledger.ledger import Ledger
from titan_rl.trainer.state.plain_state import state_flaw

_POLL_SECONDS = 0.1


class SaveError(RuntimeError):
    """A checkpoint could not be written; says why."""


async def written(trainer: TrainerMesh, folder: Path, timeout: float) -> None:
    """Wait until every rank has written its part. Errors: SaveError; DeadlineError; an actor's fault."""

    async def wait() -> None:
        while True:
            outcomes = await trainer.call(TrainerEndpoints.checkpoint_outcome())
            if failures := sorted({outcome for outcome in outcomes if outcome}):
                raise SaveError(failures[0])
            if None not in outcomes:
                return await trainer.collect(HostPath(folder))
            await asyncio.sleep(_POLL_SECONDS)

    await within(timeout, f"writing {folder}", wait())


class Checkpointing:
    """Owns the checkpoint that is being written."""

    def __init__(
        self,
        folder: CheckpointFolder,
        trainer: TrainerMesh,
        ledger: Ledger,
        *,
        timeout: float,
        log: Log,
        record_metrics: RecordMetrics,
    ):
        """``timeout``: seconds that writing one may take."""
        self.folder, self.trainer, self.ledger, self.timeout = folder, trainer, ledger, timeout
        self.log, self.record_metrics = log, record_metrics
        self.saved_step = -1
        """The newest step that this process saved or started from."""
        self._is_overdue = False
        """Whether the last one failed of a trainer rank that died."""
        self._writing: asyncio.Task[None] | None = None

    def is_due(self, step: int, every: int) -> bool:
        """Whether to save after a step; at once, where a death has cost the last checkpoint. ``every``: 0: never."""
        return every > 0 and (self._is_overdue or step % every == 0)

    def started_from(self, step: int) -> None:
        """Set the checkpoint that the run resumed from."""
        self.saved_step = step

    async def begin(self, state: ControllerState, *, is_last: bool = False) -> None:
        """Begin a checkpoint of the trainer's state. ``is_last``: no update follows. Errors: an actor's fault."""
        await self.finish()
        self._is_overdue, start = False, time.perf_counter()
        try:
            folder = await asyncio.to_thread(self.folder.begin, state.step)
        except OSError as error:
            self._warn(state.step, error)
            return
        place = HostPath(folder), self.folder.shards(folder)
        await self.trainer.call(TrainerEndpoints.begin_checkpoint(*place, not is_last))
        self._writing = asyncio.create_task(self._write(folder, state, start, time.perf_counter() - start))

    async def _write(self, folder: Path, state: ControllerState, start: float, seconds_begin: float) -> None:
        num_repaired = self.trainer.num_repaired
        try:
            await written(self.trainer, folder, self.timeout)
            await asyncio.to_thread(self._gather, folder)
            await asyncio.to_thread(self.ledger.sync)
            await asyncio.to_thread(self.folder.commit, folder, state)
        except Exception as error:  # whatever it was: training does not depend on it
            await asyncio.to_thread(self.folder.abandon, folder)
            self._is_overdue = self.trainer.num_repaired > num_repaired
            self._warn(state.step, error)
            return
        self.saved_step = state.step
        seconds = {"seconds_checkpoint_begin": seconds_begin, "seconds_checkpoint": time.perf_counter() - start}
        self.record_metrics({"step": state.step, "checkpoint_failed": 0.0, **seconds})

    def _gather(self, folder: Path) -> None:
        """What ranks have written into a store. Errors: SaveError if files are missing there, since some host has
        another place under that name."""
        for part in self.folder.gather(folder):
            if flaw := state_flaw(part):
                raise SaveError(f"{self.folder.shards(folder)}: {flaw}; is it the same place on all hosts?")

    def _warn(self, step: int, error: Exception) -> None:
        kept = ", ".join(str(step) for step in self.folder.steps()) or "none"
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        self.log(f"warning: step {step} could not be saved: {reason}; the run goes on, checkpoints that stay: {kept}")
        self.record_metrics({"step": step, "checkpoint_failed": 1.0})

    async def finish(self) -> None:
        """Wait for the checkpoint in progress, even one that fails."""
        if self._writing is not None:
            await self._writing
            self._writing = None

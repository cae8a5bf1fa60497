"""The end of a run: requests to stop, and what is saved at last.

A stop ends at once what waits for samples; what changes the weights ends first.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from titan_rl.config.sections.kinds import Quantization
from titan_rl.data.callbacks import Log
from titan_rl.mesh.hosts.host_path import HostPath
from titan_rl.mesh.processes.deadlines import within

if TYPE_CHECKING:  # their imports take seconds, which a signal need not wait for
    from titan_rl.controller.recovery.checkpointing import Checkpointing
    from titan_rl.controller.recovery.nonfinite_batches import NonfiniteBatches
    from titan_rl.mesh.control.trainer_repair import TrainerMesh
    from titan_rl.records.run_directory.rundir import RunDir
    from titan_rl.records.run_directory.summary import Progress

T = TypeVar("T")
STOPPED_AT_ONCE = "stopped by the user at once"
_UNWIND_SECONDS = 5.0
"""How long the end of what is cancelled is waited for."""


class Stopped(Exception):
    """The run was stopped on request."""

    def __init__(self, why: str = ""):
        """``why``: what forced it; empty if it is the user's wish."""
        super().__init__(*([why] if why else []))
        self.why = why


class Lost(Exception):
    """The run has lost what it cannot go on without."""


class StopRequest:
    """Request to stop the run: by a signal, a program, or a fatal loss. It stands once made."""

    def __init__(self) -> None:
        self._requested = asyncio.Event()
        self.why = ""
        """What forced it; empty if it is the user's wish."""
        self.is_forced = False
        """Whether nothing is worth waiting for."""
        self.is_urgent = False
        """Whether the user has asked twice: nothing more is saved."""
        self.driver: asyncio.Task[Any] | None = None
        """Who is cancelled then."""
        self._failed = asyncio.Event()
        self._fault: Exception | None = None
        """Fault that must end the run, and that no call has raised."""

    @property
    def is_requested(self) -> bool:
        return self._requested.is_set()

    def ask(self, why: str = "") -> None:
        self.why = self.why or why
        self._requested.set()

    def force(self, why: str) -> None:
        """End at once, whatever the run waits for."""
        self.is_forced = True
        self.ask(why)
        self._cancel_driver()

    def fail(self, fault: Exception) -> None:
        """End with this fault whatever waits ``unless_failed``; what can be saved still is."""
        self._fault = self._fault or fault
        self._failed.set()

    def hurry(self) -> None:
        """End at once, unsaved: the user's second request."""
        self.is_urgent = True
        self.ask()
        self._cancel_driver()

    def _cancel_driver(self) -> None:
        if self.driver is not None:
            self.driver.cancel()

    def check(self) -> None:
        """Errors: Stopped, if a stop was asked for."""
        if self.is_requested:
            raise Stopped(self.why)

    async def interrupts(self, awaitable: Awaitable[T]) -> T:
        """The awaitable's result. Errors: Stopped as soon as a stop is asked for; the awaitable is cancelled then."""
        work = asyncio.ensure_future(awaitable)
        if not await _is_done_before(self._requested, work) or work.cancelled():
            raise Stopped(self.why)
        return work.result()

    async def unless_failed(self, awaitable: Awaitable[T]) -> T:
        """The awaitable's result. Errors: the fault of ``fail`` as soon as it is told; the awaitable is cancelled."""
        work = asyncio.ensure_future(awaitable)
        if not await _is_done_before(self._failed, work):
            assert self._fault is not None  # or nothing has failed
            raise self._fault
        return work.result()

    async def until_urgent(self, save: Callable[[], Awaitable[None]]) -> None:
        """Save at the end of a run, until ``hurry`` or ``force``."""
        if self.is_urgent or self.is_forced:
            return
        self.driver = asyncio.ensure_future(save())
        try:
            await self.driver
        except asyncio.CancelledError:
            if not (self.is_urgent or self.is_forced):
                raise
        finally:
            self.driver = None


async def _is_done_before(event: asyncio.Event, work: "asyncio.Future[Any]") -> bool:
    """Whether the work is done before the event happens; or else it is cancelled."""
    happens = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait({work, happens}, return_when=asyncio.FIRST_COMPLETED)
        return work.done()
    finally:
        happens.cancel()
        if not work.done():
            work.cancel()
            await asyncio.wait({work}, timeout=_UNWIND_SECONDS)


class Shutdown:
    """Last checkpoint and export of a run. The loop passes whether the trainer is between two steps."""

    def __init__(
        self,
        run_dir: "RunDir",
        trainer: "TrainerMesh",
        checkpointing: "Checkpointing",
        nonfinite_batches: "NonfiniteBatches",
        progress: "Progress",
        *,
        save_last: Callable[[], Awaitable[None]],
        log: Log,
        export_dtype: str,
        export_quantization: Quantization = "none",
    ):
        """``save_last``: begins a checkpoint of the step at hand, after which no update follows. ``export_dtype`` and
        ``export_quantization``: of the model that is left."""
        self.run_dir, self.trainer, self.checkpointing = run_dir, trainer, checkpointing
        self.nonfinite_batches, self.progress, self.save_last, self.log = nonfinite_batches, progress, save_last, log
        self.export = export_dtype, export_quantization

    async def complete(self) -> None:
        """A checkpoint, and the model as a Hugging Face directory (with its adapter, if it has one): in the trainer's
        turn, since both take memory, and nobody samples any more."""
        await self.trainer.take_devices()
        await self.save_last()
        await self.checkpointing.finish()
        await self._save_model()

    async def rescue(self, error: BaseException, *, is_between_steps: bool) -> None:
        """A complete checkpoint, if there is something new to save; the model too, if the user stopped the run. It may
        take as long as any other checkpoint."""
        seconds, step = self.checkpointing.timeout, self.progress.step
        with suppress(Exception):  # the error that ended the run matters more
            await within(seconds, "writing the checkpoint before", self.checkpointing.finish())
        if not is_between_steps:
            return
        try:
            if self._has_news(error):
                await within(seconds, "saving the last checkpoint", self.save_last())
                await within(seconds, "writing the last checkpoint", self.checkpointing.finish())
                if self.checkpointing.saved_step == step:
                    self.log(f"step {step} is saved")
            if isinstance(error, Stopped) and step and self.checkpointing.saved_step == step:
                await self._save_model()
        except Exception as failure:  # the error that ended the run matters more
            self.log(f"could not save step {step}: {failure}")

    def _has_news(self, error: BaseException) -> bool:
        from titan_rl.controller.recovery.nonfinite_batches import NonfiniteBatchesError

        if self.progress.step == self.checkpointing.saved_step:
            return False
        if not self.progress.step and not isinstance(error, NonfiniteBatchesError):
            return False
        if not self.nonfinite_batches.weights_are_finite:
            self.log("the weights are not finite, so they are not saved: the newest checkpoint is the last good")
        return self.nonfinite_batches.weights_are_finite

    async def _save_model(self) -> None:
        from titan_rl.mesh.members.endpoints import TrainerEndpoints

        run_dir = self.run_dir
        folders = HostPath(run_dir.model), HostPath(run_dir.adapter), HostPath(run_dir.root)
        begun = time.time()
        await self.trainer.call(TrainerEndpoints.save_hf(*folders, *self.export))
        for folder in run_dir.stale_exports(begun):
            self.log(f"{folder} is of an earlier end of this run, which has none any more: it is older than the model")
        self.progress.model_step = self.progress.step

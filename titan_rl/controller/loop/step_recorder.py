"""Recorder of spans and of the trainer's per-token results, beside the run's work.

Written beside the run's work, and left out on a full disk.
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import ParamSpec

from titan_rl.controller.loop.reporting import StepReport
from titan_rl.data.storage.files import unless_full
from titan_rl.data.types import Batch, Group
from titan_rl.mesh.processes.background import retrieve_exception
from titan_rl.mesh.telemetry.step_record import ActorSpan, StepRecord
from titan_rl.records.run_directory.rundir import RunDir
from titan_rl.records.steps.trace import write_trace
from titan_rl.records.steps.trained import write_trained

P = ParamSpec("P")
_PHASES = {"wait": "wait for rollouts", "train": "train", "publish": "publish"}


class StepRecorder:
    """Writer of traces and per-token results in the background. Owns the write in progress."""

    def __init__(self, run_dir: RunDir, record: StepRecord):
        self.run_dir, self.record = run_dir, record
        self._writing: asyncio.Future[None] | None = None

    async def trained(self, step: int, groups: list[Group], batches: Sequence[Batch]) -> None:
        """Begin to write a trained step, after the write before it."""
        await self._begin(write_trained, self.run_dir.trained, step, groups, batches, self.record.take_results())

    def live(self, report: StepReport) -> None:
        """Write the trace of a step whose weights are live."""
        spans = [*self.record.take_spans(), *of_controller(report), *of_groups(report.collected.sampled)]
        with unless_full():
            write_trace(self.run_dir.root, report.step, spans)

    async def _begin(self, write: Callable[P, None], *arguments: P.args, **keywords: P.kwargs) -> None:
        await self.written()

        def work() -> None:
            with unless_full():
                write(*arguments, **keywords)

        self._writing = asyncio.ensure_future(asyncio.to_thread(work))
        self._writing.add_done_callback(retrieve_exception)

    async def written(self) -> None:
        """Wait for the write in progress. Errors: any write error but a full disk."""
        writing, self._writing = self._writing, None
        if writing is not None:
            await writing


def of_controller(report: StepReport) -> Iterator[ActorSpan]:
    for span in report.timer.spans:
        yield ActorSpan("controller", _PHASES.get(span.name, span.name), span.begin, span.seconds)


def of_groups(groups: Sequence[Group]) -> Iterator[ActorSpan]:
    """Episodes and their scoring, by who drove them."""
    for group in groups:
        if group.begun and group.verifier:
            yield ActorSpan(group.verifier, "episode", group.begun, group.seconds_generate)
            yield ActorSpan(group.verifier, "scoring", group.begun + group.seconds_generate, group.seconds_score)

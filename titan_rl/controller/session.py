"""A run as an object: checked, started, driven step by step or to its end, closed.

    session = await Session.open(load_config("configs/quickstart.toml"))
    await session.step(2)
    print(await session.evaluate())
    await session.close()

It lives in whatever event loop is running, and makes none. Everything is wired here, once, from the bottom up: what
is below never reaches back.
"""

import asyncio
import os
import sys
import time
from collections.abc import Generator
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from titan_rl.config.command_line import TrainCommand, check_started_once
from titan_rl.config.errors import AlreadyComplete, NamedFault
from titan_rl.config.io.printable import say
from titan_rl.config.sections.schema import Config
from titan_rl.controller.console.display import Display
from titan_rl.controller.console.end_summary import end_summary, stopping
from titan_rl.controller.console.sandbox_bounds import log_sandbox_bounds
from titan_rl.controller.initial_policy import base_model, kept_policy
from titan_rl.controller.loop.admission import Admission
from titan_rl.controller.loop.controller import Components, Controller
from titan_rl.controller.loop.interface import HeldOut, Loop
from titan_rl.controller.loop.reporting import Reporter
from titan_rl.controller.loop.rollout_queue import RolloutQueue
from titan_rl.controller.loop.scaling import grant_scale_requests
from titan_rl.controller.loop.shutdown import STOPPED_AT_ONCE, Lost, Stopped, StopRequest
from titan_rl.controller.offline.controller import DataComponents, OfflineController
from titan_rl.controller.offline.recovery import DataRecovery
from titan_rl.controller.offline.steps import DataSteps
from titan_rl.controller.planning.device_plan import DevicePlan
from titan_rl.controller.planning.device_report import fit_and_place
from titan_rl.controller.preflight.checks import Checked, check, tokenizer_of
from titan_rl.controller.preflight.data_checks import label_notice, row_notices, template_notice, weight_notices
from titan_rl.controller.preflight.device import is_on_cpu, record_trainer_device
from titan_rl.controller.preflight.engine_checks import kernel_notices
from titan_rl.controller.preflight.host_checks import on_hosts
from titan_rl.controller.preflight.ineffective_settings import learning_rate_notices
from titan_rl.controller.preflight.resume import check_resumable, limits_of
from titan_rl.controller.preflight.resumed_settings import is_complete, resumed_settings
from titan_rl.controller.preflight.role_checks import teacher_notice
from titan_rl.controller.preflight.setting_changes import with_changes
from titan_rl.controller.recovery.checkpointing import Checkpointing
from titan_rl.controller.recovery.frozen_weights import FrozenWeights
from titan_rl.controller.recovery.nonfinite_batches import NonfiniteBatches
from titan_rl.controller.recovery.recorded_rollouts import Recovery
from titan_rl.controller.wiring import make_meshes
from titan_rl.data.callbacks import Log
from titan_rl.data.rows.datasets import Dataset
from titan_rl.data.storage.files import unless_full
from titan_rl.environments.prompts.curriculum import Curriculum
from titan_rl.environments.prompts.stream import PromptStream
from titan_rl.environments.rollout.answer_lengths import answer_notice
from titan_rl.environments.sandbox.groups import sweep_own_root
from titan_rl.environments.scoring.reward_trial import RewardTrial
from titan_rl.mesh.launch.torchrun import OtherRanks
from titan_rl.mesh.meshes import ALL_PARTS, MeshCallbacks, Meshes, ProcessPlacement
from titan_rl.mesh.processes.processes import watch
from titan_rl.records.checkpoints.checkpoints import CheckpointFolder
from titan_rl.records.ledger.ledger import Ledger
from titan_rl.records.metrics import MetricsLog, agreement_limit
from titan_rl.records.plot import plot_curves
from titan_rl.records.run_directory.events import EventLog
from titan_rl.records.run_directory.path_checks import check_no_modules
from titan_rl.records.run_directory.rundir import RunDir, claim, new_run_dir, passed_over, run_dir_to_resume
from titan_rl.records.run_directory.sources import check_sources, find_sources, write_sources
from titan_rl.records.run_directory.summary import COMPLETED, Progress, write_summary
from titan_rl.records.statistics import Proportion
from titan_rl.records.steps.skipped_rows import SkippedRows
from titan_rl.records.trackers import Trackers

T = TypeVar("T")
IDLE = "idle"
"""Phase of a run whose driver asks nothing of it."""
_CHANGES = {"started", "died", "stopped", "trainer_device", "trainer_repaired", "generator_serves", "verifier_serves"}
"""Events after which a process has come or gone, or has another name."""


class Session:
    """A training run. Errors of ``start``, ``step``, ``run`` and ``evaluate``: Stopped, or a fault by name; ``close``
    must follow, and saves what can be saved."""

    def __init__(
        self,
        checked: Checked,
        run_dir: RunDir,
        resume: bool = False,
        ranks: OtherRanks | None = None,
        command: TrainCommand | None = None,
        trial: RewardTrial | None = None,
    ):
        self._trial = trial
        self.checked, self.run_dir, self.is_resumed = checked, run_dir, resume
        self.command = command or TrainCommand()
        self.config, self.titan, self._ranks = checked.config, checked.titan, ranks
        self.progress = Progress(steps_asked=self.titan.training.steps)
        self.stop_request = StopRequest()
        self.why_ended = ""  # in words, once it has
        self.plan: DevicePlan | None = None
        self._meshes: Meshes | None = None
        self._controller: Loop | None = None
        self._granting: asyncio.Task[None] | None = None
        self._is_finished = False
        self._open_records()

    @classmethod
    def open(
        cls,
        config: Config,
        command: TrainCommand | None = None,
        *,
        resume: bool = False,
        ranks: OtherRanks | None = None,
        trial: RewardTrial | None = None,
        leave_complete: bool = False,
    ) -> "Session":
        """Check everything and take the run directory. Errors: ConfigError, with nothing started and nothing made.

        ``command``: its TOML names the run directory if ``run.dir`` does not. ``ranks``: torchrun's other processes,
        which become its hosts. ``trial``: of its user code, which has begun. ``leave_complete``: AlreadyComplete
        instead of a run that would only be evaluated again. Await it to start it.
        """
        check_started_once(os.environ)
        name = command.config_file if command else None
        run_dir = run_dir_to_resume(config, name) if resume else new_run_dir(config, name)
        if resume and not config.run.dir and (line := passed_over(run_dir)):
            say(line, sys.stderr)  # at once: what is refused next is that run's
        config, held = with_changes(config, run_dir) if resume else (config, [])
        checked = check(config)
        fitting, plan, messages = fit_and_place(checked, under_torchrun=ranks is not None)
        messages = [*messages, *learning_rate_notices(checked.config, checked.algorithm, checked.titan)]
        messages += teacher_notice(checked.config, checked.algorithm)
        messages += template_notice(checked.config, checked.task) + row_notices(checked.task, checked.dataset)
        messages += answer_notice(checked.config, checked.task, partial(tokenizer_of, checked.config))
        messages += weight_notices(checked.config)
        messages += label_notice(checked.algorithm, checked.dataset)
        messages += kernel_notices(checked.config, on_cpu=is_on_cpu(checked.config))
        sources, earlier = find_sources(config), 0
        if resume:
            check_no_modules(run_dir.root)
            earlier = check_resumable(run_dir, checked)
            check_sources(run_dir, sources)
            if leave_complete and is_complete(run_dir, checked):
                steps = checked.titan.training.steps
                raise AlreadyComplete(f"all {steps} steps of {run_dir.root} are done: raise training.steps to train on")
            messages = [*messages, *resumed_settings(run_dir, checked)]
        messages += [] if trial is None else trial.notices()
        if not resume and not config.run.dir:
            run_dir = claim(run_dir)
        run_dir.open(checked.as_dict(), earlier)
        if not run_dir.sources.exists():
            write_sources(run_dir, sources)
        session = cls(fitting, run_dir, resume, ranks, command, trial)
        session.plan = plan
        for line in [*messages, *(f"{change}; without {run_dir.changes} it is as you ask" for change in held)]:
            session.log(line)
        return session

    def _open_records(self) -> None:
        config, run_dir = self.config, self.run_dir
        self._exits = ExitStack()
        self.display = self._exits.enter_context(Display(self.progress.steps_asked, run_dir.log))
        self.log: Log = self.display.log
        self.ledger, self.events = Ledger(run_dir.ledger), EventLog(run_dir.root)
        trackers = Trackers(config.metrics, run_dir.root, self.checked.as_dict(), self.log)
        self.metrics = MetricsLog(run_dir.root, trackers)
        self.stream = PromptStream(self.checked.task, config.run.seed, curriculum=self._curriculum())
        self._left_out = SkippedRows(run_dir.left_out_rows)
        self._folder = CheckpointFolder.of(run_dir, config.checkpoint.keep_latest_k, config.checkpoint.store)

    def _curriculum(self) -> Curriculum | None:
        config, task = self.config, self.checked.task
        if not config.curriculum.is_on:
            return None
        return Curriculum(config.curriculum, task, config.run.seed, config.rollout.group_size, self.run_dir.pass_rates)

    # a run

    @property
    def meshes(self) -> Meshes:
        """All actors. Errors: RuntimeError before the start."""
        return _started(self._meshes)

    @property
    def controller(self) -> Loop:
        """The loop. Errors: RuntimeError before the start."""
        return _started(self._controller)

    @property
    def has_meshes(self) -> bool:
        """Whether the actors are made; they may still be starting."""
        return self._meshes is not None

    def __await__(self) -> Generator[Any, None, "Session"]:
        return self._start_or_close().__await__()

    async def __aenter__(self) -> "Session":
        return self if self._controller is not None else await self._start_or_close()

    async def _start_or_close(self) -> "Session":
        try:
            return await self.stop_request.unless_failed(self.start())
        except BaseException as error:  # cancelled included: nobody else can stop what has started
            await self.close(error)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close(error)

    async def start(self) -> "Session":
        """Start all actors; the run is then at its first step, or at its last one."""
        self.log(f"run directory {self.run_dir.root}")
        self.display.enter("starting the actors")
        if self._ranks is not None:
            watch(self._ranks.starter, lambda: self.stop_request.ask("torchrun died"))
        with unless_full():
            self.run_dir.phase.write_text("0 starting")
        path = await asyncio.to_thread(base_model, self.config, self.run_dir)
        dataset = self.checked.dataset
        recovery = self._recovery() if dataset is None else self._data_recovery(dataset)
        self._meshes = self._make_meshes(path, recovery)
        await self.stop_request.interrupts(self._meshes.start())
        for line in [] if self._trial is None else self._trial.late_notices():
            self.log(line)
        await record_trainer_device(self._meshes.trainer, self.config, self.record_event)
        self._controller = self._make_controller(self._meshes, recovery)
        await (self._controller.resume() if self.is_resumed else self._controller.begin())
        return self

    def _make_controller(self, meshes: Meshes, recovery: Recovery | DataRecovery) -> Loop:
        """The actors are up."""
        seconds = time.perf_counter() - self.progress.started
        log_sandbox_bounds(self.log, self.record_event)
        if isinstance(recovery, DataRecovery):
            self.log(f"trainer up after {seconds:.1f} s")
            return self._data_controller(meshes, recovery)
        config = self.checked.config
        replays = ", routed experts replayed" if config.algorithm.routing == "replay" else ""
        method = config.generator.speculative.method
        drafts = f", drafts by {method}" if method != "none" else ""
        admission = ", requests admitted by the KV cache" if config.generator.adaptive_max_num_seqs else ""
        weights = f"weights by {meshes.weights.transports}"
        helpers = "".join(f", generator {number} helps while the trainer waits" for number in meshes.generators.helpers)
        self.log(f"actors up after {seconds:.1f} s, {weights}{replays}{drafts}{admission}{helpers}")
        self._granting = asyncio.create_task(grant_scale_requests(self.run_dir, meshes.generators, self.log))
        return self._rollout_controller(meshes, recovery)

    async def step(self, count: int = 1) -> None:
        """Run ``count`` steps, at most up to ``training.steps``."""
        for _ in range(count):
            if self.progress.step >= self.progress.steps_asked:
                return
            start = time.perf_counter()
            await self.controller.step()
            self.progress.seconds_training += time.perf_counter() - start

    async def run(self) -> None:
        """Run the remaining steps, the evaluation, a checkpoint and the export."""
        while self.progress.step < self.progress.steps_asked:  # which may go back, to a checkpoint
            await self.step()
        await self.controller.finish()
        self._is_finished = True

    @property
    def has_started(self) -> bool:
        """Whether the run is at its first step, or was."""
        return self._controller is not None

    def rest(self) -> None:
        """Say that nothing goes on until the next call."""
        self.display.enter("")
        with unless_full():
            self.run_dir.phase.write_text(f"{self.progress.step} {IDLE}")

    async def reported(self) -> None:
        """Wait until the last step's metrics are written, with its weights live."""
        await self.controller.reported()

    async def evaluate(self) -> Proportion | HeldOut:
        """Held-out accuracy now, or loss and accuracy on held-out data."""
        return await self.controller.evaluate(f"at step {self.progress.step}")

    async def save(self) -> None:
        """Begin a checkpoint of the step at hand."""
        await self.controller.save()

    def stop(self) -> None:
        """Stop the run after the current step; its driver gets Stopped."""
        if not self.stop_request.is_requested:
            self.log(stopping(self.run_dir, self.command))
        self.stop_request.ask()

    async def close(self, error: BaseException | None = None, why: str | None = None) -> dict[str, Any]:
        """Save what is new, end all processes, and sum the run up: what summary.json holds. Never raises for a fault.

        ``error``: what ended the run, if it is no end as planned. ``why``: that, in words.
        """
        why = why or (one_line(error) if error else COMPLETED if self._is_finished else "closed")
        try:
            if isinstance(error, Lost):
                self.log("nothing more can be saved; --resume goes on")
            elif self._controller is not None and not self._is_finished:
                await self.stop_request.until_urgent(partial(self._controller.rescue, error or Stopped()))
        finally:
            if self.stop_request.is_urgent and isinstance(error, Stopped):
                why = STOPPED_AT_ONCE
            self.why_ended = why
            summary = await self._end(why)
        self.display.close_table()
        for line in end_summary(why, summary, self.progress, self.run_dir, self.command):
            self.log(line)
        self._exits.close()
        self.run_dir.close()
        return summary

    async def _end(self, why: str) -> dict[str, Any]:
        if self._controller is not None:
            self._controller.cancel()
        if self._granting is not None:
            self._granting.cancel()
        plotted = asyncio.create_task(asyncio.to_thread(self._plot))
        if self._meshes is not None:
            self.display.enter("stopping the actors")
            await self._meshes.stop()
        sweep_own_root()
        with unless_full():
            self.metrics.close()
        summary = write_summary(self.run_dir, self.progress, why, self.ledger.account())
        self.ledger.close()
        self.stream.close()
        self.events.close()
        await plotted
        return summary

    def _plot(self) -> None:
        with unless_full():
            plot_curves(self.run_dir.root, self.run_dir.curves)

    # wiring

    def _recovery(self) -> Recovery:
        return Recovery(
            *(self.config, self.checked.algorithm, self.titan.layout, self.run_dir, self._folder),
            *(self.stream, self.ledger, self.metrics, self.progress),
            limits=limits_of(self.checked),
            log=self.log,
            record_event=self.record_event,
        )

    def _make_meshes(self, model_path: str, recovery: Recovery | DataRecovery) -> Meshes:
        return make_meshes(
            *(self.config, self.titan, model_path),
            family=self.checked.family,
            needs=self.checked.algorithm.needs,
            kept_policy=kept_policy(self.config, self.checked.algorithm, self.run_dir),
            logs=self.run_dir.logs.absolute(),
            callbacks=MeshCallbacks(
                *(self.log, self.record_event, self.ledger.count_retry),
                on_lost=self.stop_request.force,
                on_fault=self.stop_request.fail,
            ),
            catch_up=recovery.catch_up,
            parts=ALL_PARTS if self.config.has_generators else frozenset({"trainer"}),
            placement=ProcessPlacement(
                **self.checked.launchers,
                ranks=self._ranks,
                devices=None if self.plan is None else self.plan.devices,
                on_hosts=on_hosts(self.config, self.run_dir),
            ),
        )

    def _rollout_controller(self, meshes: Meshes, recovery: Recovery) -> Controller:
        config, rollout = self.config, self.config.rollout
        reporter, checkpointing, nonfinite_batches = self._common(meshes)
        admission = Admission(rollout.prompts_per_step, rollout.max_staleness)
        queue = RolloutQueue(
            *(config, self.stream, self.ledger, meshes.dispatcher, admission, meshes.weights),
            max_tokens=meshes.max_tokens,
            reprompt_template=self.checked.algorithm.reprompt_template,
            on_score_failed=reporter.score_failed,
            on_score_retried=reporter.score_retried,
        )
        frozen = self._frozen(meshes)
        parts = Components(
            *(meshes, queue, recovery, checkpointing, nonfinite_batches, frozen, reporter, self.progress)
        )
        return Controller(
            *(config, self.checked.algorithm, self.titan.layout, self.run_dir),
            *(self.checked.held_out, self.checked.suites, self.stop_request, parts),
        )

    def _common(self, meshes: Meshes) -> tuple[Reporter, Checkpointing, NonfiniteBatches]:
        """What either loop needs."""
        config, titan = self.config, self.titan
        limit = agreement_limit(
            *(config.generator.dtype, titan.training.mixed_precision_param),
            fp8=config.uses_fp8,
            batch_invariant=titan.debug.batch_invariant,
        )
        reporter = Reporter(
            *(config, self.run_dir, self.metrics, self.display, meshes.stragglers, self.record_event),
            agreement_limit=limit,
        )
        checkpointing = Checkpointing(
            *(self._folder, meshes.trainer, self.ledger),
            timeout=config.mesh.step_timeout,
            log=self.log,
            record_metrics=self.metrics.write,
        )
        nonfinite_batches = NonfiniteBatches(
            config.recovery, self.run_dir, log=self.log, record_metrics=self.metrics.write
        )
        return reporter, checkpointing, nonfinite_batches

    def _frozen(self, meshes: Meshes) -> FrozenWeights:
        return FrozenWeights(
            self.checked.algorithm.needs, meshes, self.record_event, has_adapters=bool(self.config.lora.rank)
        )

    def _data_recovery(self, dataset: Dataset) -> DataRecovery:
        self._left_out.list_too_long(dataset.too_long)
        steps = DataSteps(
            *(self.config, self.checked.algorithm, self.titan.layout, dataset), is_left_out=self._left_out.is_out
        )
        return DataRecovery(steps, self._folder, self.progress, self.log)

    def _data_controller(self, meshes: Meshes, recovery: DataRecovery) -> OfflineController:
        reporter, checkpointing, nonfinite_batches = self._common(meshes)
        frozen = self._frozen(meshes)
        parts = DataComponents(
            *(meshes, recovery.steps, recovery, checkpointing, nonfinite_batches, frozen, reporter, self.progress),
            left_out=self._left_out,
        )
        return OfflineController(self.run_dir, self.checked.suites, self.stop_request, parts)

    def record_event(self, kind: str, **fields: Any) -> None:
        """Record an event; process ids too, where it changes them."""
        self.events.write(kind, **fields)
        if kind in _CHANGES:
            self._write_pids()

    def _write_pids(self) -> None:
        if self._meshes is not None:
            with unless_full():
                self.run_dir.write_pids(self._meshes.pids)


def _started(part: T | None) -> T:
    if part is None:
        raise RuntimeError("the run has not started: await the session first")
    return part


def one_line(error: BaseException) -> str:
    """Error as one line, without the traceback of another process in it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    name = "" if isinstance(error, NamedFault) else f"{type(error).__name__}: "
    return f"{name}{lines[0]}" + (f" {lines[-1]}" if len(lines) > 1 else "")

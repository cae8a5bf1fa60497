"""``titan-rl chaos``: checks the options, makes the runs, and reports on them."""

import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from titan_rl.config.command_line import EXIT_FAULT, EXIT_OK, EXIT_STOPPED, EXIT_USER
from titan_rl.config.io.printable import say
from titan_rl.config.load import ConfigError, load_config
from titan_rl.config.sections.schema import Config
from titan_rl.diagnostics.chaos import report as reports
from titan_rl.diagnostics.chaos.audit import audit, summary
from titan_rl.diagnostics.chaos.baseline import MAX_SEEDS, against_undisturbed, among_seeds, held_out_accuracy
from titan_rl.diagnostics.chaos.experiment import Experiment
from titan_rl.diagnostics.chaos.injection import Injection
from titan_rl.diagnostics.chaos.outcomes import outcome_of
from titan_rl.diagnostics.chaos.run_process import RunProcess, TimedOut
from titan_rl.diagnostics.chaos.schedule import KINDS, OF_TRAINER, kinds_of, last_fault_step, schedule_faults
from titan_rl.trainer.titan_config import build_titan

_MENDS = {
    "host": "--mesh.worker_loops 2",
    "reward_model": "--reward_model.path",
    "reference": "--reference.placement own",
    "teacher": "--teacher.placement own",
    "critic": "--critic.placement own",
    "implicit_reward": "--implicit_reward.placement own",
}
Overrides = dict[str, dict[str, Any]]
_Handler = Callable[[int, FrameType | None], Any] | int | None


@dataclass(frozen=True)
class Options:
    """Options of the experiment."""

    kills: int = 20
    seed: int = 1
    targets: tuple[str, ...] | None = None
    """Kinds of processes that were asked for; None: every kind that the run has (``kinds``)."""
    undisturbed: bool = False
    fault_free_seeds: int = 0
    timeout: float = 4 * 3600.0
    """Seconds for all runs together."""
    as_json: bool = False

    def kinds(self, config: Config) -> tuple[str, ...]:
        """Kinds of processes that faults are injected into."""
        return kinds_of(config) if self.targets is None else self.targets


def chaos(config_file: str | None, overrides: Overrides, options: Options) -> int:
    """0 if the run did all its steps, lost no sample and left no process; 1 if not; 130 for Ctrl-C.

    Errors: ConfigError; no process is left running.
    """
    config = load_config(config_file, overrides)
    steps = build_titan(config).training.steps
    _check(options, config, steps)
    scratch = None if config.run.dir else tempfile.mkdtemp(prefix="titan_rl_chaos_")
    root = Path(config.run.dir if scratch is None else f"{scratch}/run")
    is_kept = False
    try:
        _check_empty(_roots(root, options))
        report = _Runs(root, config_file, overrides, options, config, steps).report()
        is_kept = not report["ok"]
    except KeyboardInterrupt:
        say("titan-rl: stopped; no process is left", sys.stderr)
        return EXIT_STOPPED
    finally:
        if scratch is not None and not is_kept:
            shutil.rmtree(scratch, ignore_errors=True)
    say(json.dumps(report, indent=2) if options.as_json else reports.for_people(report))
    if is_kept:
        say(f"titan-rl: the run is kept in {root}, its output in {root}.out", sys.stderr)
    return EXIT_OK if report["ok"] else EXIT_FAULT


def _check(options: Options, config: Config, steps: int) -> None:
    _check_targets(options.kinds(config), config)
    if options.kills < 1:
        raise ConfigError("chaos needs at least one fault: give --kills 1 or more")
    if last_fault_step(steps, config.checkpoint.every) < 1:
        raise ConfigError(
            f"{steps} steps are too few: give more --training.steps (no fault is injected in the last three, plus "
            f"checkpoint.every, plus a tenth of all)"
        )
    if options.fault_free_seeds and not 2 <= options.fault_free_seeds <= MAX_SEEDS:
        raise ConfigError(f"--fault-free-seeds takes 2 to {MAX_SEEDS}: fewer give no interval")
    if not options.timeout > 0:
        raise ConfigError("--timeout takes seconds above 0")


def _check_targets(targets: tuple[str, ...], config: Config) -> None:
    if unknown := [kind for kind in targets if kind not in KINDS]:
        raise ConfigError(f"no such target: {unknown[0]!r}; --targets takes some of {','.join(KINDS)}")
    if not targets or len(set(targets)) < len(targets):
        raise ConfigError(f"--targets takes some of {','.join(KINDS)}, each once")
    for kind in targets:
        if kind not in kinds_of(config):
            raise ConfigError(f"the run has no {kind} in processes of its own: give {_MENDS[kind]}, or other --targets")
    if (mortal := [kind for kind in targets if kind in OF_TRAINER]) and not config.recovery.snapshot_every:
        raise ConfigError(f"recovery.snapshot_every = 0 lets a {mortal[0]}'s death end the run: give other --targets")


def _roots(root: Path, options: Options) -> list[Path]:
    """Of the run with faults, the undisturbed one if it is asked for, and those of other seeds."""
    undisturbed = [beside(root, "undisturbed")] if options.undisturbed else []
    return [root, *undisturbed, *(beside(root, f"seed-{i}") for i in range(1, options.fault_free_seeds + 1))]


def beside(root: Path, name: str) -> Path:
    return root.parent / f"{root.name}-{name}"


def _check_empty(roots: list[Path]) -> None:
    for root in roots:
        if root.exists() and (not root.is_dir() or any(root.iterdir())):
            raise ConfigError(f"{root} is not empty: give another --run.dir")


@contextmanager
def _on_signals(handlers: Mapping[signal.Signals, _Handler]) -> Iterator[None]:
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _as_ctrl_c() -> dict[signal.Signals, _Handler]:
    """Ctrl-C too: a shell that starts a command in the background has it ignored, and Python leaves that so. A closed
    terminal too, unless ``nohup`` has it ignored."""
    ends = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        ends.append(signal.SIGHUP)
    return dict.fromkeys(ends, _interrupt)


_IGNORE_SIGNALS: dict[signal.Signals, _Handler] = dict.fromkeys(
    (signal.SIGTERM, signal.SIGINT, signal.SIGHUP), signal.SIG_IGN
)
"""While processes are ended: a second Ctrl-C must not leave some of them."""


class _Runs:
    """The run with faults and those without, one after the other."""

    def __init__(
        self,
        root: Path,
        config_file: str | None,
        overrides: Overrides,
        options: Options,
        config: Config,
        steps: int,
    ) -> None:
        self.root, self.config_file, self.overrides = root, config_file, overrides
        self.options, self.config, self.steps = options, config, steps
        self.deadline = time.monotonic() + options.timeout
        self._processes: list[RunProcess] = []
        self._reported: set[int] = set()

    def _new_process(self, root: Path, overrides: Overrides) -> RunProcess:
        root.parent.mkdir(parents=True, exist_ok=True)
        self._processes.append(RunProcess(root, self.config_file, overrides, self.deadline))
        return self._processes[-1]

    def report(self) -> dict[str, Any]:
        """No process is left afterwards, in any case. Errors: ConfigError if the run refuses its config."""
        try:
            with _on_signals(_as_ctrl_c()):
                report = self._with_faults()
                if not report["timed_out"] and report["exit_code"] == 0:
                    report |= self._baselines(report)
        finally:
            with _on_signals(_IGNORE_SIGNALS):
                for process in self._processes:
                    process.end()
        report["flaws"] = reports.flaws(report)
        return {"ok": not report["flaws"]} | report

    # with faults

    def _with_faults(self) -> dict[str, Any]:
        options, every = self.options, self.config.checkpoint.every
        last, kinds = last_fault_step(self.steps, every), options.kinds(self.config)
        faults = schedule_faults(options.kills, options.seed, last, kinds)
        process = self._new_process(self.root, self.overrides)
        experiment = Experiment(
            process, faults, options.seed, every, lambda done: self._print_progress(done, process.events())
        )
        start, timed_out, code = time.monotonic(), False, None
        try:
            code = experiment.run()
        except TimedOut:
            timed_out = True
            process.end()
        seconds, survivors = time.monotonic() - start, process.left_behind()
        if code == EXIT_USER and process.num_starts == 1:
            raise ConfigError(process.last_line().removeprefix("titan-rl: "))
        self._print_progress(experiment.injections, process.events(), is_last=True)
        return self._figures(experiment.injections, process.events(), survivors) | {
            "timed_out": timed_out,
            "exit_code": code,
            "seconds": round(seconds, 3),
            "controller_starts": process.num_starts,
        }

    def _print_progress(self, injections: list[Injection], events: list[dict[str, Any]], is_last: bool = False) -> None:
        """A line for each fault as soon as its outcome is known."""
        for number in (number for number in range(len(injections)) if number not in self._reported):
            outcome = outcome_of(injections[number], events)
            if is_last or outcome.repaired_after is not None:
                self._reported.add(number)
                words = reports.line(reports.row(injections[number], outcome))
                say(f"fault {number + 1:>3}/{self.options.kills}  {words}", sys.stderr)

    def _figures(
        self, injections: list[Injection], events: list[dict[str, Any]], survivors: list[int]
    ) -> dict[str, Any]:
        summed = summary(self.root)
        rows = [reports.row(one, outcome_of(one, events)) for one in injections]
        controllers = [one for one in injections if one.kind == "controller"]
        return {
            "run": str(self.root),
            "seed": self.options.seed,
            "steps_done": summed.get("steps_done"),
            "steps_asked": self.steps,
            "why_ended": summed.get("why_ended"),
            "held_out_accuracy": held_out_accuracy(self.root),
            "faults_asked": self.options.kills,
            "faults_witnessed": sum(one.is_witnessed for one in injections),
            "faults_repaired": sum(row["repaired_after"] is not None for row in rows),
            "processes_left": survivors,
            "orphans_left": sum(one.orphans_gone_after is None for one in controllers),
            "samples": audit(self.root, self.config, self.steps),
            "samples_may_be_pending": self.config.rollout.max_staleness > 0,
            **reports.redone_losses(events),
            **reports.tables(rows),
            "faults": rows,
        }

    # without faults

    def _baselines(self, report: dict[str, Any]) -> dict[str, Any]:
        """The comparison with runs without faults. One that fails or takes too long is reported as such."""
        comparisons: dict[str, Any] = {}
        if self.options.undisturbed:
            root = beside(self.root, "undisturbed")
            code = self._run_baseline(root, self.overrides)
            comparisons["undisturbed"] = {
                "exit_code": code,
                **against_undisturbed(self.root, root),
                "held_out_accuracy": held_out_accuracy(root),
            }
        if self.options.fault_free_seeds:
            accuracies = [self._accuracy_of_seed(i) for i in range(1, self.options.fault_free_seeds + 1)]
            comparisons["fault_free_seeds"] = among_seeds(report["held_out_accuracy"], accuracies)
        return comparisons

    def _accuracy_of_seed(self, number: int) -> float | None:
        root, run = beside(self.root, f"seed-{number}"), self.overrides.get("run", {})
        self._run_baseline(root, self.overrides | {"run": run | {"seed": self.config.run.seed + number}})
        return held_out_accuracy(root)

    def _run_baseline(self, root: Path, overrides: Overrides) -> int | None:
        """The exit code; None if it took too long."""
        say(f"baseline {root.name}: a run without faults, to compare with", sys.stderr)
        process = self._new_process(root, overrides)
        try:
            process.start()
            code = process.await_end()
        except TimedOut:
            code = None
            process.end()
        process.left_behind()
        return code

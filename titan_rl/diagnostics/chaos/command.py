"""``titan-rl chaos``: what was asked is checked, the runs are made, and what became of them is told."""

import json
import shutil
import signal
import sys
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from titan_rl.config.load import ConfigError, load_config
from titan_rl.config.schema import Config
from titan_rl.diagnostics.chaos import report as reports
from titan_rl.diagnostics.chaos.audit import account, summary
from titan_rl.diagnostics.chaos.baseline import MAX_SEEDS, against_undisturbed, among_seeds, held_out_accuracy
from titan_rl.diagnostics.chaos.experiment import Siege
from titan_rl.diagnostics.chaos.injection import Struck
from titan_rl.diagnostics.chaos.outcomes import match
from titan_rl.diagnostics.chaos.run_process import TimedOut, Training
from titan_rl.diagnostics.chaos.schedule import KINDS, draw_faults, kinds_of, last_step_to_strike
from titan_rl.trainer.titan_config import build_titan

EXIT_OK, EXIT_FAULT, EXIT_USER, EXIT_STOPPED = 0, 1, 2, 130

Overrides = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Options:
    """What is asked of a run under fire."""

    kills: int = 20
    seed: int = 1
    victims: tuple[str, ...] | None = None
    """None: every kind that the run has."""
    undisturbed: bool = False
    fault_free_seeds: int = 0
    timeout: float = 4 * 3600.0
    """Seconds for all runs together."""
    as_json: bool = False


def chaos(config_file: str | None, overrides: Overrides, options: Options) -> int:
    """0 if the run went through all its steps, lost nothing and left nobody behind; 1 if not; 130 for Ctrl-C.

    Errors: ConfigError, with nothing left running.
    """
    config = load_config(config_file, overrides)
    steps = build_titan(config).training.steps
    if options.victims is None:
        options = replace(options, victims=kinds_of(config.mesh.hosts))
    _check(options, config, steps)
    scratch = None if config.run.dir else tempfile.mkdtemp(prefix="titan_rl_chaos_")
    root = Path(config.run.dir if scratch is None else f"{scratch}/run")
    is_kept = False
    try:
        _check_empty(_roots(root, options))
        report = _Runs(root, config_file, overrides, options, config, steps).report()
        is_kept = not report["ok"]
    except KeyboardInterrupt:
        print("titan-rl: stopped, and nobody is left", file=sys.stderr)
        return EXIT_STOPPED
    finally:
        if scratch is not None and not is_kept:
            shutil.rmtree(scratch, ignore_errors=True)
    print(json.dumps(report, indent=2) if options.as_json else reports.for_people(report))
    if is_kept:
        print(f"titan-rl: the run is kept in {root}, what it said in {root}.out", file=sys.stderr)
    return EXIT_OK if report["ok"] else EXIT_FAULT


def _check(options: Options, config: Config, steps: int) -> None:
    if unknown := [kind for kind in options.victims if kind not in KINDS]:
        raise ConfigError(f"no such victim: {unknown[0]!r}; --victims takes some of {','.join(KINDS)}")
    if not options.victims or len(set(options.victims)) < len(options.victims):
        raise ConfigError(f"--victims takes some of {','.join(KINDS)}, each once")
    if "host" in options.victims and not config.mesh.hosts:
        raise ConfigError("the run has no hosts of its own: give --mesh.hosts 2, say, or other --victims")
    if options.kills < 1:
        raise ConfigError("chaos needs at least one fault: give --kills 1 or more")
    if last_step_to_strike(steps, config.checkpoint.every) < 1:
        raise ConfigError(
            f"{steps} steps are too few to strike in: give more --training.steps (a tenth of them, three and "
            f"checkpoint.every are left alone at the end)"
        )
    if "trainer" in options.victims and not config.recovery.snapshot_every:
        raise ConfigError("recovery.snapshot_every = 0 lets a trainer's death end the run: give other --victims")
    if options.fault_free_seeds and not 2 <= options.fault_free_seeds <= MAX_SEEDS:
        raise ConfigError(f"--fault-free-seeds takes 2 to {MAX_SEEDS}: fewer give no interval")
    if not options.timeout > 0:
        raise ConfigError("--timeout takes seconds above 0")


def _roots(root: Path, options: Options) -> list[Path]:
    """The run under fire, the undisturbed one if there is one, and those of other seeds."""
    undisturbed = [beside(root, "undisturbed")] if options.undisturbed else []
    return [root, *undisturbed, *(beside(root, f"seed-{i}") for i in range(1, options.fault_free_seeds + 1))]


def beside(root: Path, name: str) -> Path:
    return root.parent / f"{root.name}-{name}"


def _check_empty(roots: list[Path]) -> None:
    for root in roots:
        if root.exists() and (not root.is_dir() or any(root.iterdir())):
            raise ConfigError(f"{root} is not empty: give another --run.dir")


@contextmanager
def _on_signals(handlers: dict[signal.Signals, Any]):
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _interrupt(number, frame) -> None:
    raise KeyboardInterrupt


_AS_CTRL_C = {signal.SIGTERM: _interrupt}
_DEAF = {signal.SIGTERM: signal.SIG_IGN, signal.SIGINT: signal.SIG_IGN}
"""While processes are ended: a second Ctrl-C must not leave some."""


class _Runs:
    """The run under fire and those without faults, one after the other."""

    def __init__(
        self,
        root: Path,
        config_file: str | None,
        overrides: Overrides,
        options: Options,
        config: Config,
        steps: int,
    ):
        self.root, self.config_file, self.overrides = root, config_file, overrides
        self.options, self.config, self.steps = options, config, steps
        self.deadline = time.monotonic() + options.timeout
        self._trainings: list[Training] = []
        self._told: set[int] = set()

    def _training(self, root: Path, overrides: Overrides) -> Training:
        root.parent.mkdir(parents=True, exist_ok=True)
        self._trainings.append(Training(root, self.config_file, overrides, self.deadline))
        return self._trainings[-1]

    def report(self) -> dict[str, Any]:
        """Nobody is left afterwards, whatever happens. Errors: ConfigError if the training refuses its config."""
        try:
            with _on_signals(_AS_CTRL_C):
                report = self._under_fire()
                if not report["timed_out"] and report["exit_code"] == 0:
                    report |= self._in_peace(report)
        finally:
            with _on_signals(_DEAF):
                for training in self._trainings:
                    training.end()
        report["flaws"] = reports.flaws(report)
        return {"ok": not report["flaws"]} | report

    # under fire

    def _under_fire(self) -> dict[str, Any]:
        options, every = self.options, self.config.checkpoint.every
        faults = draw_faults(options.kills, options.seed, last_step_to_strike(self.steps, every), options.victims)
        training = self._training(self.root, self.overrides)
        siege = Siege(training, faults, options.seed, every, lambda struck: self._tell(struck, training.events()))
        start, timed_out, code = time.monotonic(), False, None
        try:
            code = siege.run()
        except TimedOut:
            timed_out = True
            training.end()
        seconds, left = time.monotonic() - start, training.left_behind()
        if code == EXIT_USER and training.num_starts == 1:
            raise ConfigError(training.last_words().removeprefix("titan-rl: "))
        self._tell(siege.struck, training.events(), at_last=True)
        return self._figures(siege.struck, training.events(), left) | {
            "timed_out": timed_out,
            "exit_code": code,
            "seconds": round(seconds, 3),
            "controller_starts": training.num_starts,
        }

    def _tell(self, struck: list[Struck], events: list[dict], at_last: bool = False) -> None:
        """A line for each fault as soon as all is known of it."""
        for number in (number for number in range(len(struck)) if number not in self._told):
            outcome = match(struck[number], events)
            if at_last or outcome.whole_after is not None:
                self._told.add(number)
                words = reports.line(reports.row(struck[number], outcome))
                print(f"fault {number + 1:>3}/{self.options.kills}  {words}", file=sys.stderr, flush=True)

    def _figures(self, struck: list[Struck], events: list[dict], left: list[int]) -> dict[str, Any]:
        summed = summary(self.root)
        rows = [reports.row(one, match(one, events)) for one in struck]
        controllers = [one for one in struck if one.kind == "controller"]
        return {
            "run": str(self.root),
            "seed": self.options.seed,
            "steps_done": summed.get("steps_done"),
            "steps_asked": self.steps,
            "why_ended": summed.get("why_ended"),
            "held_out_accuracy": held_out_accuracy(self.root),
            "faults_asked": self.options.kills,
            "faults_witnessed": sum(one.is_witnessed for one in struck),
            "faults_seen_whole": sum(row["whole_after"] is not None for row in rows),
            "processes_left": left,
            "orphans_left": sum(one.orphans_gone_after is None for one in controllers),
            "samples": account(self.root, self.config, self.steps),
            "samples_may_be_pending": self.config.rollout.max_staleness > 0,
            **reports.redone_losses(events),
            **reports.tables(rows),
            "faults": rows,
        }

    # in peace

    def _in_peace(self, report: dict[str, Any]) -> dict[str, Any]:
        """What runs without faults say about this one. One that fails or takes too long is told as such."""
        told: dict[str, Any] = {}
        if self.options.undisturbed:
            root = beside(self.root, "undisturbed")
            code = self._run_in_peace(root, self.overrides)
            told["undisturbed"] = {
                "exit_code": code,
                **against_undisturbed(self.root, root),
                "held_out_accuracy": held_out_accuracy(root),
            }
        if self.options.fault_free_seeds:
            accuracies = [self._accuracy_of_seed(i) for i in range(1, self.options.fault_free_seeds + 1)]
            told["fault_free_seeds"] = among_seeds(report["held_out_accuracy"], accuracies)
        return told

    def _accuracy_of_seed(self, number: int) -> float | None:
        root, run = beside(self.root, f"seed-{number}"), self.overrides.get("run", {})
        self._run_in_peace(root, self.overrides | {"run": run | {"seed": self.config.run.seed + number}})
        return held_out_accuracy(root)

    def _run_in_peace(self, root: Path, overrides: Overrides) -> int | None:
        print(f"a run without faults, {root.name}, to compare with", file=sys.stderr, flush=True)
        training = self._training(root, overrides)
        try:
            training.start()
            code = training.await_end()
        except TimedOut:
            code = None
            training.end()
        training.left_behind()
        return code

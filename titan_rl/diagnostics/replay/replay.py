"""Training again from what a run recorded, bit for bit: how to find out why a step went wrong.

Rollouts of each step are in the run directory, or its rows are drawn by its number (batches.py), so neither
generators nor verifiers are needed: trainer actors in the run's own layout begin at a checkpoint (or at the base model
and its warm-up, which the seed makes) and take the recorded steps. Nothing of the run directory is written to.
"""

import asyncio
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from titan_rl.config.io.terminal import Terminal
from titan_rl.config.load import ConfigError
from titan_rl.controller.initial_policy import base_model, check_kept, kept_policy
from titan_rl.controller.preflight.checks import Checked, resolve, with_dataset
from titan_rl.controller.preflight.device import trainer_device
from titan_rl.controller.preflight.recorded_config import load_recorded, one_configuration
from titan_rl.controller.preflight.resume import check_own_models, check_readable, limits_of, read_settings
from titan_rl.controller.recovery.checkpointing import written
from titan_rl.controller.wiring import Actors
from titan_rl.data.types import StepMetrics
from titan_rl.diagnostics.replay.batches import Recorded, as_metrics, recorded_steps, steps_of_replay
from titan_rl.diagnostics.replay.comparison import (
    ComparedState,
    ComparedStep,
    compared,
    equal_in_words,
    recorded_places,
)
from titan_rl.mesh.hosts.host_path import HostPath
from titan_rl.mesh.members.endpoints import TrainerEndpoints
from titan_rl.records.checkpoints.checkpoints import CheckpointFolder
from titan_rl.records.run_directory.path_checks import check_no_modules
from titan_rl.records.run_directory.rundir import RunDir, existing_run_dir
from titan_rl.records.run_directory.sources import check_sources, find_sources
from titan_rl.records.steps.rollouts import RolloutsError, read_rollouts
from titan_rl.train import drive
from titan_rl.trainer.model.determinism import RankPlatform, tolerance


@dataclass(frozen=True)
class Plan:
    """Plan of a replay: steps ``first`` to ``last`` from ``checkpoint``, or from the base model."""

    run_dir: RunDir
    checked: Checked
    first: int
    last: int
    checkpoint: Path | None = None
    sft: bool = False
    """Whether the base model takes the run's SFT steps first."""
    keep_in: Path | None = None
    """Where a checkpoint of the last step goes."""


async def replay_steps(
    plan: Plan,
    on_step: Callable[[int, StepMetrics], None] = lambda step, metrics: None,
    on_device: Callable[[RankPlatform], None] = lambda device: None,
) -> list[StepMetrics]:
    """Train on fresh trainer actors; ``on_step`` is called after each step, ``on_device`` once, before the first."""
    checked, config = plan.checked, plan.checked.config
    path = base_model(config, plan.run_dir)
    # a death ends it: it can be asked again
    unguarded = replace(checked, config=replace(config, recovery=replace(config.recovery, snapshot_every=0)))
    all_metrics, again = [], steps_of_replay(plan.run_dir, checked, path)
    policy = kept_policy(config, checked.algorithm, plan.run_dir)
    async with Actors(unguarded, path, frozenset({"trainer"}), policy) as actors:
        trainer = actors.meshes.trainer
        on_device(await trainer_device(trainer, actors.checked.config))
        if plan.checkpoint is not None:
            await trainer.call(TrainerEndpoints.load_checkpoint(HostPath(plan.checkpoint)))
        elif plan.sft and config.sft.steps:
            await trainer.sft(await asyncio.to_thread(again.sft_rows))
        for step in range(plan.first, plan.last + 1):
            metrics = as_metrics(await again.train(trainer, step))
            all_metrics.append(metrics)
            on_step(step, metrics)
        if plan.keep_in is not None:
            await trainer.call(TrainerEndpoints.begin_checkpoint(HostPath(plan.keep_in)))
            await written(trainer, plan.keep_in, config.mesh.step_timeout)
        return all_metrics


def recorded(run_dir: RunDir) -> Recorded:
    """Loss and gradient norm of each step that can be trained again. Errors: ConfigError."""
    return recorded_steps(run_dir, on_data=_learned_from_data(run_dir))


def _learned_from_data(run_dir: RunDir) -> bool:
    return bool(read_settings(run_dir.config).get("data.file"))


def plan_replay(
    root: Path, first: int, last: int, folders: Sequence[str] = (), log: Callable[[str], None] = lambda text: None
) -> Plan:
    """Checked plan of a replay of steps ``first`` to ``last``.

    ``folders``: where the command says that code is (controller/preflight/recorded_config.py). ``log`` gets a line for
    each of the checkpoints that are passed over. Errors: ConfigError if there is no such run, no such steps, no
    checkpoint to begin from, or something of it is damaged.
    """
    run_dir = existing_run_dir(root)
    check_no_modules(root)
    if not run_dir.config.is_file():
        raise ConfigError(f"{root} holds no config.json: give a run directory, such as runs/quickstart-<date>-<time>")
    if not 1 <= first <= last:
        raise ConfigError(f"--from {first} --to {last}: give steps of the run, the first no later than the last")
    steps = sorted(recorded(run_dir))
    begin, checkpoint = _beginning(run_dir, first, log)
    if missing := next((step for step in range(first, last + 1) if step not in steps), None):
        there = f"steps {steps[0]} to {steps[-1]} are" if steps else "no step is"
        raise ConfigError(f"step {missing} is not recorded in {root}, where {there}: change --from and --to")
    if missing := next((step for step in range(begin, first) if step not in steps), None):
        raise ConfigError(f"step {missing}, on the way from {checkpoint} to {first}, is not recorded in {root}")
    config = load_recorded(run_dir, one_configuration(run_dir, begin, last), folders)
    checked = resolve(config)
    if _learned_from_data(run_dir):
        checked = with_dataset(checked)
        check_sources(run_dir, find_sources(config), "or leave the replay")
    plan = Plan(run_dir, checked, begin, last, checkpoint, sft=True)
    _check_readable(plan)
    return plan


def _folder(run_dir: RunDir) -> CheckpointFolder:
    return CheckpointFolder.of(run_dir, 1, str(read_settings(run_dir.config).get("checkpoint.store", "")))


def _beginning(run_dir: RunDir, first: int, log: Callable[[str], None]) -> tuple[int, Path | None]:
    """The first step to train, and the checkpoint before it. Errors: ConfigError."""
    folder = _folder(run_dir)
    if checkpoint := folder.newest_complete(first - 1, log):
        check_readable(checkpoint[0])
        return checkpoint[1].step + 1, checkpoint[0]
    if first > 1:
        later = next((step + 1 for step in sorted(folder.steps()) if not folder.flaw(step)), None)
        raise ConfigError(
            f"{run_dir.root} holds no whole checkpoint of a step before {first} ({folder.flaws()}): begin with "
            f"--from 1, which starts from the base model{f', or with --from {later}' if later else ''}, or set "
            f"checkpoint.every and checkpoint.keep_latest_k so that more are kept"
        )
    return 1, None


def _check_readable(plan: Plan) -> None:
    """Errors: ConfigError if something that the replay will read is damaged, or was never written by a run."""
    check_own_models(plan.run_dir, plan.checked.config, plan.checked.family)
    check_kept(plan.checked.config, plan.checked.algorithm, plan.run_dir, "the replay")
    if plan.checked.dataset is not None:
        return
    limits = limits_of(plan.checked)
    for step in range(plan.first, plan.last + 1):
        try:
            read_rollouts(plan.run_dir.rollouts, step, limits)
        except RolloutsError as error:
            raise ConfigError(f"{error}; replay the steps before it, or those after it from a checkpoint") from None


def _own_checkpoint(plan: Plan) -> tuple[Path | None, str]:
    """The run's own checkpoint of the last step if it can be compared with, or else why not. Errors: ConfigError."""
    folder = _folder(plan.run_dir)
    if plan.last not in folder.steps():
        return None, "there is none"
    if flaw := folder.flaw(plan.last):
        return None, flaw
    check_readable(folder.path(plan.last))
    return folder.path(plan.last), ""


class _Report:
    """What is said while a replay goes on, and what came of it."""

    def __init__(self, plan: Plan, log: Callable[[str], None]) -> None:
        self.log, self.recorded, self.places = log, recorded(plan.run_dir), recorded_places(plan.run_dir.root)
        self.dtype = plan.checked.titan.training.mixed_precision_param
        self.steps: list[ComparedStep] = []
        self.state: ComparedState | None = None
        self.tolerance = 0.0

    def on_device(self, here: RankPlatform) -> None:
        self.tolerance = tolerance([*self.places, here], self.dtype)
        if self.tolerance:
            recorded_on = ", ".join(dict.fromkeys(place.device for place in self.places)) or "cpu"
            self.log(
                f"recorded on {recorded_on}, replayed on {here.device}: no order of additions that both kept, so steps "
                f"are {equal_in_words(self.tolerance)} at best ([debug] deterministic gives GPUs of one kind an order)"
            )

    def on_step(self, step: int, metrics: StepMetrics) -> None:
        loss, grad_norm = self.recorded[step]
        self.steps.append(ComparedStep(step, loss, metrics.loss, grad_norm, metrics.grad_norm, self.tolerance))
        self.log(self.steps[-1].line())

    def compare(self, checkpoint: Path, replayed: Path) -> None:
        self.state = compared(checkpoint, replayed)
        self.log(self.state.line(self.tolerance))

    @property
    def equal(self) -> bool:
        return all(step.equal for step in self.steps) and (self.state is None or self.state.is_equal(self.tolerance))

    def as_json(self) -> dict[str, Any]:
        """``bit_equal`` is claimed only where equal bits are more than luck."""
        return {
            "steps": [step.as_json() for step in self.steps],
            "state": asdict(self.state) if self.state else None,
            "recorded_on": [asdict(place) for place in self.places],
            "tolerance": self.tolerance,
            "equal": self.equal,
            "bit_equal": self.equal and not self.tolerance,
        }


def replay(root: Path, first: int, last: int, *, as_json: bool, folders: Sequence[str] = ()) -> int:
    """The command: prints what is equal and what is not; the exit code. Errors: ConfigError before any start."""
    console = Terminal()

    def print_line(text: str) -> None:
        if not as_json:
            console.print(text, soft_wrap=True)

    plan = plan_replay(root, first, last, folders, print_line)
    report = _Report(plan, print_line)
    own_checkpoint, why_not = _own_checkpoint(plan)
    began = str(plan.checkpoint) if plan.checkpoint else "the base model"
    print_line(f"from {began}, steps {plan.first} to {plan.last}: recorded -> replayed")
    with tempfile.TemporaryDirectory(prefix="titan_rl_replay_") as scratch:
        replayed = Path(scratch) / "checkpoint"
        if own_checkpoint is not None:
            plan = replace(plan, keep_in=replayed)
        drive(replay_steps(plan, report.on_step, report.on_device))
        if own_checkpoint is not None:
            report.compare(own_checkpoint, replayed)
        else:
            print_line(f"no whole checkpoint of step {last} to compare weights with: {why_not}")
    if as_json:
        print(json.dumps({"run": str(root), "from": began} | report.as_json()))
    return 0 if report.equal else 1

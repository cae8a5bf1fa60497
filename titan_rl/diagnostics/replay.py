"""Training again from what a run recorded, bit for bit: how to find out why a step went wrong.

Rollouts of each step are in the run directory, or its rows are drawn by its number (replayed_steps.py), so neither
generators nor verifiers are needed: trainer actors in the run's own layout begin at a checkpoint (or at the base model
and its warm-up, which the seed makes) and take the recorded steps. Nothing of the run directory is written to.
"""

import asyncio
import json
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from titan_rl.config.load import ConfigError
from titan_rl.controller.base_model import base_model
from titan_rl.controller.checkpointing import written
from titan_rl.controller.kept_policy import check_kept, kept_policy
from titan_rl.controller.preflight import Checked, resolve, with_dataset
from titan_rl.controller.recorded_config import load_recorded, one_configuration
from titan_rl.controller.resuming import check_own_models, check_readable, limits_of, read_settings
from titan_rl.controller.wiring import Actors
from titan_rl.data.types import StepMetrics
from titan_rl.diagnostics.replayed_steps import Recorded, as_metrics, recorded_steps, steps_of_replay
from titan_rl.records.checkpoints import CheckpointFolder
from titan_rl.records.places import check_no_modules
from titan_rl.records.rollouts import RolloutsError, read_rollouts
from titan_rl.records.rundir import RunDir, existing_run_dir
from titan_rl.records.sources import check_sources, find_sources
from titan_rl.train import drive
from titan_rl.trainer.plain_state import StateError, load_state, read_metadata
from titan_rl.trainer.role_names import LEARNED
from titan_rl.trainer.state import role_folder


@dataclass(frozen=True)
class Plan:
    """What a replay does: steps ``first`` to ``last`` from ``checkpoint``, or from the base model."""

    run_dir: RunDir
    checked: Checked
    first: int
    last: int
    checkpoint: Path | None = None
    sft: bool = False
    """Whether the base model takes the run's SFT steps first."""
    keep_in: Path | None = None
    """Where a checkpoint of the last step goes."""


@dataclass(frozen=True)
class ComparedStep:
    """What the run recorded of a step, and what came of it again."""

    step: int
    recorded_loss: float
    loss: float
    recorded_grad_norm: float
    grad_norm: float

    @property
    def equal(self) -> bool:
        """Also where no update was applied, then and now."""
        if math.isnan(self.loss) or math.isnan(self.recorded_loss):
            return math.isnan(self.loss) and math.isnan(self.recorded_loss)
        return (self.loss, self.grad_norm) == (self.recorded_loss, self.recorded_grad_norm)


@dataclass(frozen=True)
class ComparedState:
    """Weights and moments at the last step, against the run's own checkpoint of it."""

    checkpoint: str
    num_tensors: int
    num_different: int
    first_different: str = ""
    largest_difference: float = 0.0
    """Within the first that differs."""


async def replay_steps(
    plan: Plan, tell: Callable[[int, StepMetrics], None] = lambda step, metrics: None
) -> list[StepMetrics]:
    """Train on fresh trainer actors; ``tell`` hears of each step."""
    checked, config = plan.checked, plan.checked.config
    path = base_model(config, plan.run_dir)
    # a death ends it: it can be asked again
    lone = replace(checked, config=replace(config, recovery=replace(config.recovery, snapshot_every=0)))
    all_metrics, again = [], steps_of_replay(plan.run_dir, checked, path)
    kept = kept_policy(config, checked.algorithm, plan.run_dir)
    async with Actors(lone, path, frozenset({"trainer"}), kept) as actors:
        trainer = actors.meshes.trainer
        if plan.checkpoint is not None:
            await trainer.call("load_checkpoint", str(plan.checkpoint))
        elif plan.sft and config.sft.steps:
            await trainer.sft(await asyncio.to_thread(again.sft_rows))
        for step in range(plan.first, plan.last + 1):
            metrics = as_metrics(await again.train(trainer, step))
            all_metrics.append(metrics)
            tell(step, metrics)
        if plan.keep_in is not None:
            await trainer.call("begin_checkpoint", str(plan.keep_in))
            await written(trainer, plan.keep_in, config.mesh.step_timeout)
        return all_metrics


def compare_states(checkpoint: Path, other: Path) -> ComparedState:
    """Weights first, then the optimizer's state, a tensor at a time, whatever ranks wrote them."""
    ours, theirs = _tensors(checkpoint), _tensors(other)
    different = [(name, math.nan) for name in theirs if name not in ours]
    for name, entry in ours.items():
        if name not in theirs or _kind(entry) != _kind(theirs[name]):
            different.append((name, math.nan))
            continue
        a, b = (_read_tensor(path, name, entry) for path in (checkpoint, other))
        if not torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)):
            different.append((name, float((a.double() - b.double()).abs().max())))
    first, largest = different[0] if different else ("", 0.0)
    return ComparedState(str(checkpoint), len(ours), len(different), first, largest)


def _compared(kept: Path, replayed: Path) -> ComparedState:
    """Errors: ConfigError if the run's own cannot be read."""
    try:
        return compare_states(kept, replayed)
    except StateError as error:
        raise ConfigError(f"weights cannot be compared: {error}") from None


def _tensors(checkpoint: Path) -> dict[str, TensorStorageMetadata]:
    """Also those of a role that had processes of its own, which are in a folder of its own."""
    kinds = [(role, f"{role}.{kind}") for role in LEARNED for kind in ("model.", "optimizer.")]
    return {
        name: entry
        for role, kind in (("", "model."), ("", "optimizer."), *kinds)
        for name, entry in read_metadata(role_folder(checkpoint, role)).state_dict_metadata.items()
        if name.startswith(kind) and isinstance(entry, TensorStorageMetadata)
    }


def _kind(entry: TensorStorageMetadata) -> tuple:
    return entry.size, entry.properties.dtype


def _read_tensor(checkpoint: Path, name: str, entry: TensorStorageMetadata) -> torch.Tensor:
    state = {name: torch.empty(entry.size, dtype=entry.properties.dtype)}
    load_state(state, role_folder(checkpoint, name.partition(".")[0]), no_dist=True)
    return state[name].reshape(-1)


def recorded(run_dir: RunDir) -> Recorded:
    """Loss and gradient norm of each step that can be trained again. Errors: ConfigError."""
    return recorded_steps(run_dir, on_data=_learned_from_data(run_dir))


def _learned_from_data(run_dir: RunDir) -> bool:
    return bool(read_settings(run_dir.config).get("data.file"))


def plan_replay(
    root: Path, first: int, last: int, folders: Sequence[str] = (), say: Callable[[str], None] = lambda text: None
) -> Plan:
    """``folders``: where the command says that code is (controller/recorded_config.py). ``say`` hears of checkpoints
    that are passed over. Errors: ConfigError if there is no such run, no such steps, no checkpoint to begin from, or
    something of it is damaged."""
    run_dir = existing_run_dir(root)
    check_no_modules(root)
    if not run_dir.config.is_file():
        raise ConfigError(f"{root} holds no config.json: give a run directory, such as runs/quickstart-<date>-<time>")
    if not 1 <= first <= last:
        raise ConfigError(f"--from {first} --to {last}: give steps of the run, the first no later than the last")
    known = sorted(recorded(run_dir))
    begin, checkpoint = _beginning(run_dir, first, say)
    if missing := next((step for step in range(first, last + 1) if step not in known), None):
        there = f"steps {known[0]} to {known[-1]} are" if known else "no step is"
        raise ConfigError(f"step {missing} is not recorded in {root}, where {there}: change --from and --to")
    if missing := next((step for step in range(begin, first) if step not in known), None):
        raise ConfigError(f"step {missing}, on the way from {checkpoint} to {first}, is not recorded in {root}")
    config = load_recorded(run_dir, one_configuration(run_dir, begin, last), folders)
    checked = resolve(config)
    if _learned_from_data(run_dir):
        checked = with_dataset(checked)
        check_sources(run_dir, find_sources(config), "or leave the replay")
    plan = Plan(run_dir, checked, begin, last, checkpoint, sft=True)
    _check_readable(plan)
    return plan


def _beginning(run_dir: RunDir, first: int, say: Callable[[str], None]) -> tuple[int, Path | None]:
    """The first step to train, and the checkpoint before it. Errors: ConfigError."""
    folder = CheckpointFolder(run_dir.checkpoints, keep_latest_k=1)
    if found := folder.newest_complete(first - 1, say):
        check_readable(found[0])
        return found[1].step + 1, found[0]
    if first > 1:
        raise ConfigError(
            f"{run_dir.root} holds no whole checkpoint of a step before {first} ({folder.flaws()}): begin with "
            f"--from 1, which starts from the base model, or set checkpoint.every and checkpoint.keep_latest_k so that "
            f"more are kept"
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


def _kept(plan: Plan) -> tuple[Path | None, str]:
    """The run's own checkpoint of the last step if it can be compared with, or else why not. Errors: ConfigError."""
    folder = CheckpointFolder(plan.run_dir.checkpoints, keep_latest_k=1)
    if plan.last not in folder.steps():
        return None, "there is none"
    if flaw := folder.flaw(plan.last):
        return None, flaw
    check_readable(folder.path(plan.last))
    return folder.path(plan.last), ""


def _line(compared: ComparedStep) -> str:
    verdict = "equal" if compared.equal else "DIFFERENT"
    return (
        f"step {compared.step:>5}  loss {compared.recorded_loss: .9e} -> {compared.loss: .9e}  "
        f"grad norm {compared.recorded_grad_norm:.9e} -> {compared.grad_norm:.9e}  {verdict}"
    )


def _told(compared: ComparedStep) -> dict:
    """JSON has no NaN."""
    values = {name: value if math.isfinite(value) else None for name, value in asdict(compared).items()}
    return values | {"equal": compared.equal}


def _state_line(state: ComparedState) -> str:
    what = f"{state.num_tensors} tensors of weights and moments against {state.checkpoint}"
    if not state.num_different:
        return f"{what}: equal, bit for bit"
    return (
        f"{what}: {state.num_different} differ, the first {state.first_different} "
        f"(by at most {state.largest_difference:.3e})"
    )


def replay(root: Path, first: int, last: int, *, as_json: bool, folders: Sequence[str] = ()) -> int:
    """The command: prints what is equal and what is not; the exit code. Errors: ConfigError before any start."""
    console = Console()

    def say(text: str) -> None:
        if not as_json:
            console.print(text, highlight=False, markup=False, soft_wrap=True)

    plan = plan_replay(root, first, last, folders, say)
    steps, wanted = [], recorded(plan.run_dir)

    def tell(step: int, metrics: StepMetrics) -> None:
        loss, grad_norm = wanted[step]
        steps.append(ComparedStep(step, loss, metrics.loss, grad_norm, metrics.grad_norm))
        say(_line(steps[-1]))

    (kept, why_not), state = _kept(plan), None
    began = str(plan.checkpoint) if plan.checkpoint else "the base model"
    say(f"from {began}, steps {plan.first} to {plan.last}: recorded -> replayed")
    with tempfile.TemporaryDirectory(prefix="titan_rl_replay_") as scratch:
        if kept is not None:
            plan = replace(plan, keep_in=Path(scratch) / "checkpoint")
        drive(replay_steps(plan, tell))
        if kept is not None:
            state = _compared(kept, plan.keep_in)
            say(_state_line(state))
        else:
            say(f"no whole checkpoint of step {last} to compare weights with: {why_not}")
    equal = all(step.equal for step in steps) and (state is None or not state.num_different)
    if as_json:
        told = [_told(step) for step in steps]
        result = {"run": str(root), "from": began, "steps": told, "state": asdict(state) if state else None}
        print(json.dumps(result | {"equal": equal}))
    return 0 if equal else 1

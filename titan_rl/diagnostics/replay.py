"""Training again from what a run recorded, bit for bit: how to find out why a step went wrong.

Rollouts of each step are in the run directory, so neither generators nor verifiers are needed: trainer actors in the
run's own layout begin at a checkpoint (or at the base model and its warm-up, which the seed makes) and take the
recorded steps. Nothing of the run directory is written to.
"""

import asyncio
import json
import math
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from rich.console import Console
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from titan_rl.algorithms.batching import sft_batches, step_batches
from titan_rl.algorithms.registry import make_algorithm
from titan_rl.config.load import ConfigError, load_resolved
from titan_rl.config.schema import Config
from titan_rl.controller.checkpointing import written
from titan_rl.data.types import BadNumbers, Rollout, StepMetrics
from titan_rl.environments.base import make_task
from titan_rl.environments.episode import demonstrate
from titan_rl.environments.prompts import warm_up_stream
from titan_rl.records.checkpoints import CheckpointFolder
from titan_rl.records.metrics import mean_metrics, read_metrics
from titan_rl.records.rollouts import has_rollouts, read_rollouts
from titan_rl.records.rundir import RunDir
from titan_rl.trainer.titan_config import TitanConfig, build_titan


@dataclass(frozen=True)
class Plan:
    """What a replay does: steps ``first`` to ``last`` from ``checkpoint``, or from the base model."""

    run_dir: RunDir
    config: Config
    titan: TitanConfig
    first: int
    last: int
    checkpoint: Path | None = None
    warm_up: bool = False
    """Whether the base model is warmed up first, as the run did."""
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


def _demonstrations(config: Config, model_path: Path) -> list[Rollout]:
    from transformers import AutoTokenizer

    task = make_task(config.task.name, config.task.style, config.task.options)
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    prompts = islice(warm_up_stream(task, config.run.seed), config.sft.steps * config.sft.examples_per_step)
    return [demonstrate(prompt, task, tokenizer) for prompt in prompts]


async def replay_steps(
    plan: Plan, tell: Callable[[int, StepMetrics], None] = lambda step, metrics: None
) -> list[StepMetrics]:
    """Train on fresh trainer actors; ``tell`` hears of each step."""
    from titan_rl.controller.base_model import model_path
    from titan_rl.mesh.meshes import Meshes

    path = model_path(plan.config, plan.run_dir)
    # a death ends it: it can be asked again
    config = replace(plan.config, recovery=replace(plan.config.recovery, snapshot_every=0))
    meshes = Meshes(config, plan.titan, path, frozenset({"trainer"}))
    algorithm = make_algorithm(config.algorithm, config.run.plugin_path)
    all_metrics = []
    try:
        await meshes.start()
        if plan.checkpoint is not None:
            await meshes.call_trainer("load_checkpoint", str(plan.checkpoint))
        elif plan.warm_up and plan.config.sft.steps:
            batches = sft_batches(_demonstrations(plan.config, Path(path)), plan.config, plan.titan.layout)
            await meshes.warm_up([batch.rows for batch in batches])
        for step in range(plan.first, plan.last + 1):
            groups = read_rollouts(plan.run_dir.rollouts, step)
            batches = step_batches(groups, algorithm, plan.config, plan.titan.layout)
            metrics = _as_metrics(await meshes.train(batches, step))
            all_metrics.append(metrics)
            tell(step, metrics)
        if plan.keep_in is not None:
            await meshes.call_trainer("begin_checkpoint", str(plan.keep_in))
            await written(meshes, plan.keep_in, plan.config.mesh.step_timeout)
        return all_metrics
    finally:
        await meshes.stop()


def _as_metrics(answers: list[StepMetrics | BadNumbers]) -> StepMetrics:
    """Of what was applied, as the run recorded it; of a batch that was not, numbers that equal none."""
    if done := [answer for answer in answers if isinstance(answer, StepMetrics)]:
        return mean_metrics(done)
    return StepMetrics(loss=math.nan, grad_norm=math.nan)


def compare_states(checkpoint: Path, other: Path) -> ComparedState:
    """Weights first, then the optimizer's state, a tensor at a time, whatever ranks wrote them."""
    metadata = {name: dcp.FileSystemReader(path).read_metadata() for name, path in (("a", checkpoint), ("b", other))}
    names = {
        side: [
            name
            for kind in ("model.", "optimizer.")
            for name, entry in found.state_dict_metadata.items()
            if name.startswith(kind) and isinstance(entry, TensorStorageMetadata)
        ]
        for side, found in metadata.items()
    }
    different: list[tuple[str, float]] = [(name, float("nan")) for name in names["b"] if name not in names["a"]]
    for name in names["a"]:
        if name not in names["b"]:
            different.append((name, float("nan")))
            continue
        ours, theirs = (_read_tensor(path, name) for path in (checkpoint, other))
        if ours.shape != theirs.shape:
            different.append((name, float("nan")))
        elif not torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8)):
            different.append((name, float((ours.double() - theirs.double()).abs().max())))
    first, largest = different[0] if different else ("", 0.0)
    return ComparedState(str(checkpoint), len(names["a"]), len(different), first, largest)


def _read_tensor(checkpoint: Path, name: str) -> torch.Tensor:
    reader = dcp.FileSystemReader(checkpoint)
    entry = reader.read_metadata().state_dict_metadata[name]
    state = {name: torch.empty(entry.size, dtype=entry.properties.dtype)}
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state[name].reshape(-1)


def recorded(run_dir: RunDir) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm of each step whose rollouts are there too."""
    return {
        int(record["step"]): (record["loss"], record["grad_norm"])
        for record in read_metrics(run_dir.root)
        if "loss" in record and has_rollouts(run_dir.rollouts, int(record["step"]))
    }


def plan_replay(root: Path, first: int, last: int) -> Plan:
    """Errors: ConfigError if there is no such run, no such steps, or no checkpoint to begin from."""
    run_dir = RunDir(root)
    if not run_dir.config.is_file():
        raise ConfigError(f"{root} holds no config.json: give a run directory, such as runs/quickstart-<date>-<time>")
    if not 1 <= first <= last:
        raise ConfigError(f"--from {first} --to {last}: give steps of the run, the first no later than the last")
    config = load_resolved(run_dir.config)
    titan = build_titan(config)
    known = sorted(recorded(run_dir))
    begin, checkpoint = 1, None
    if found := CheckpointFolder(run_dir.checkpoints, config.checkpoint.keep_latest_k).newest_whole(first - 1):
        checkpoint, state = found
        begin = state.step + 1
    if missing := sorted(set(range(first, last + 1)) - set(known)):
        there = f"steps {known[0]} to {known[-1]} are" if known else "no step is"
        raise ConfigError(f"step {missing[0]} is not recorded in {root}, where {there}: change --from and --to")
    if checkpoint is None and first > 1:
        raise ConfigError(
            f"{root} holds no whole checkpoint of a step before {first}: begin with --from 1, which starts from the "
            f"base model, or set checkpoint.every and checkpoint.keep_latest_k so that more are kept"
        )
    if missing := sorted(set(range(begin, first)) - set(known)):
        raise ConfigError(f"step {missing[0]}, on the way from {checkpoint} to {first}, is not recorded in {root}")
    return Plan(run_dir, config, titan, begin, last, checkpoint, warm_up=True)


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


def replay(root: Path, first: int, last: int, *, as_json: bool) -> int:
    """The command: prints what is equal and what is not; the exit code. Errors: ConfigError before any start."""
    plan = plan_replay(root, first, last)
    console, wanted = Console(), recorded(plan.run_dir)
    steps: list[ComparedStep] = []

    def say(text: str) -> None:
        if not as_json:
            console.print(text, highlight=False, markup=False, soft_wrap=True)

    def tell(step: int, metrics: StepMetrics) -> None:
        loss, grad_norm = wanted[step]
        steps.append(ComparedStep(step, loss, metrics.loss, grad_norm, metrics.grad_norm))
        say(_line(steps[-1]))

    began = str(plan.checkpoint) if plan.checkpoint else "the base model"
    say(f"from {began}, steps {plan.first} to {plan.last}: recorded -> replayed")
    kept = plan.run_dir.checkpoints / f"step-{last:06d}"
    folder = CheckpointFolder(plan.run_dir.checkpoints, plan.config.checkpoint.keep_latest_k)
    state = None
    with tempfile.TemporaryDirectory(prefix="titan_rl_replay_") as scratch:
        if last in folder.steps() and folder.flaw(last) is None:
            plan = replace(plan, keep_in=Path(scratch) / "checkpoint")
        asyncio.run(replay_steps(plan, tell))
        if plan.keep_in is not None:
            state = compare_states(kept, plan.keep_in)
            say(_state_line(state))
        else:
            say(f"no whole checkpoint of step {last} to compare weights with")
    equal = all(step.equal for step in steps) and (state is None or not state.num_different)
    if as_json:
        told = [_told(step) for step in steps]
        result = {"run": str(root), "from": began, "steps": told, "state": asdict(state) if state else None}
        print(json.dumps(result | {"equal": equal}))
    return 0 if equal else 1

"""Messages about settings that differ on resume, and about jumps of the learning rate."""

import json
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from titan_rl.config.io.bounded_files import read_json
from titan_rl.config.load import ConfigError, Settings, flat, load_config, read_resolved
from titan_rl.config.sections.schema import Config
from titan_rl.controller.preflight.checks import Checked
from titan_rl.controller.preflight.resume import changes, newest_checkpoint
from titan_rl.records.checkpoints.checkpoints import CheckpointFolder
from titan_rl.records.ledger.audit import read
from titan_rl.records.ledger.ledger import last_trained_step
from titan_rl.records.run_directory.rundir import RunDir
from titan_rl.records.run_directory.summary import COMPLETED
from titan_rl.trainer.model.optimizer import build_optimizer
from titan_rl.trainer.roles.names import DRAFTER, learned_roles
from titan_rl.trainer.titan_config import TitanConfig, adamw, build_titan, learned_titan

_UNSAID = ("run.dir", "run.plugin_path")
_MOST = 12
"""Settings that are named."""
_TORCHS_RATE = 1e-3
"""Of AdamW, where a group of parameters names none."""


def resumed_settings(run_dir: RunDir, checked: Checked) -> list[str]:
    """Lines for people, before the run's record is written anew. The run must be resumable (resume.py)."""
    recorded = read_resolved(run_dir.config)
    old, settings, step = flat(recorded), flat(checked.as_dict()), _last_step(run_dir, checked)
    return [*_changed(old, settings, step), *_jumps(recorded, checked, step), *_all_done(checked, step)]


def is_complete(run_dir: RunDir, checked: Checked) -> bool:
    """Whether the run has ended as planned under these settings: trained, evaluated, saved and exported."""
    steps = checked.titan.training.steps
    try:
        summary = read_json(run_dir.summary)
        is_newest = run_dir.summary.stat().st_mtime_ns > run_dir.config.stat().st_mtime_ns  # of its last start
        is_exported = (run_dir.model / "config.json").is_file()
        has_ended = (summary["why_ended"], summary["steps_done"], summary["steps_asked"]) == (COMPLETED, steps, steps)
    except (OSError, ValueError, LookupError, TypeError):
        return False
    if not (has_ended and is_newest and is_exported):
        return False
    old, settings = flat(read_resolved(run_dir.config)), flat(checked.as_dict())
    return not _changed(old, settings, steps) and newest_checkpoint(run_dir, checked.config) == steps


def _all_done(checked: Checked, step: int) -> list[str]:
    steps = checked.titan.training.steps
    if step < steps:
        return []
    return [f"all {steps} steps are done: the evaluation and the export follow; raise training.steps to train on"]


def _last_step(run_dir: RunDir, checked: Checked) -> int:
    """The last one that the run goes on after."""
    config = checked.config
    if checked.dataset is None and run_dir.ledger.exists() and run_dir.ledger.stat().st_size:
        return read(run_dir.ledger, last_trained_step)
    folder = CheckpointFolder.of(run_dir, config.checkpoint.keep_latest_k, config.checkpoint.store)
    return max(folder.steps(), default=0)


def _changed(recorded: Settings, settings: Settings, step: int) -> list[str]:
    keys = [key for key in changes(recorded, settings) if key not in _UNSAID]
    if not keys:
        return []
    words = [f"{key} = {json.dumps(settings.get(key))} (was {json.dumps(recorded.get(key))})" for key in keys[:_MOST]]
    more = [f"and {len(keys) - _MOST} more"] if len(keys) > _MOST else []
    return [f"other settings from step {step + 1} on: {', '.join([*words, *more])}"]


def _jumps(recorded: dict[str, Any], checked: Checked, step: int) -> list[str]:
    """Of the policy and of what learns beside it."""
    try:
        earlier = load_config(None, recorded, with_models=False)
        was, now = build_titan(earlier), checked.titan
    except ConfigError:  # it is another release's record, of which nothing can be told
        return []
    if not 0 < step < now.training.steps:
        return []
    lines = _jump("", earlier, was, checked.config, now, step)
    for role in learned_roles(checked.config, checked.algorithm.needs):
        if role == DRAFTER and not earlier.drafter.learns:
            begins = checked.config.drafter.path or f"the layer of {checked.config.model.path}"
            lines.append(f"drafter: none learned up to step {step}; it begins as {begins}")
            continue
        then = learned_titan(earlier, was, role), learned_titan(checked.config, now, role)
        lines += _jump(f"{role}.", earlier, then[0], checked.config, then[1], step)
    return lines


def _jump(role: str, earlier: Config, was: TitanConfig, config: Config, now: TitanConfig, step: int) -> list[str]:
    """A line if the next step has another learning rate than under the settings before."""
    last, kept = learning_rates(was, earlier.algorithm.updates_per_batch, step)
    _, rate = learning_rates(now, config.algorithm.updates_per_batch, step)
    if rate == kept:
        return []
    why = "by the settings that are other ones now"
    if was.lr_scheduler == now.lr_scheduler and was.optimizer == now.optimizer:
        total = was.training.steps * earlier.algorithm.updates_per_batch
        why = (
            f"since its schedule is that of {now.training.steps} steps now, no more of {was.training.steps}; "
            f"{role}lr_scheduler.total_steps = {total} keeps that one, and its last rate behind it"
        )
    return [f"{role}learning rate: {last:.3g} at step {step}, {rate:.3g} at step {step + 1}, {why}"]


def learning_rates(titan: TitanConfig, updates_per_step: int, step: int) -> tuple[float, float]:
    """Those of the last update of a step, and of the first update of the next; of the first group of parameters."""
    rate = titan.optimizer.param_groups[0].optimizer_kwargs.get("lr", _TORCHS_RATE)
    lone, num_updates = replace(titan, optimizer=adamw(lr=rate)), titan.training.steps * updates_per_step
    _, schedule = build_optimizer(lone, [nn.Linear(1, 1)], num_updates)
    [one] = schedule.schedulers
    assert isinstance(one, LambdaLR), "TorchTitan has no other kind"
    factor, following = one.lr_lambdas[0], step * updates_per_step
    return rate * factor(following - 1), rate * factor(following)

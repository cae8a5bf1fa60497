"""Whether a run can go on from its directory under a configuration, checked before any process starts.

What a resumed run keeps is what its records mean something by: the task, the model and the seed. Settings of training
may change where nothing that was recorded must be trained again, that is at a checkpoint of the last step; all else
may change at any time.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from titan_rl.config.load import ConfigError, Settings, flat, read_resolved
from titan_rl.config.mixture import teachers_of
from titan_rl.config.sections.schema import MADE_MODELS, Config
from titan_rl.controller.initial_policy import check_resumed
from titan_rl.controller.preflight.checks import Checked, check_model, read_config, tokenizer_of
from titan_rl.data.text.thinking import thinking_tags
from titan_rl.data.text.tokenizer import text_settings
from titan_rl.environments.rollout.decoding import DECODING_KEYS, decoding_of
from titan_rl.models.families.registry import Family
from titan_rl.records.checkpoints.checkpoints import CheckpointFolder
from titan_rl.records.ledger.audit import flaws, read
from titan_rl.records.ledger.ledger import last_trained_step
from titan_rl.records.run_directory.rundir import RunDir
from titan_rl.records.steps.rollouts import Limits, RolloutsError, last_recorded, read_rollouts
from titan_rl.trainer.model.layout import experts_of
from titan_rl.trainer.roles.names import DRAFTER, LEARNED, MAY_BE_OWN, learned_roles
from titan_rl.trainer.state.checkpoint_state import holds_role, role_folder
from titan_rl.trainer.state.plain_state import state_flaw

_ALWAYS, _BY_CHECKSUM, _WHILE_REDOING, _NUMERIC, _FREE = range(5)
_RULES = {
    "run": _FREE,
    "run.seed": _ALWAYS,
    "model": _ALWAYS,
    "model.path": _BY_CHECKSUM,
    "model.kernel": _NUMERIC,
    "lora": _ALWAYS,
    "lora.adapter": _BY_CHECKSUM,
    "lora.sync": _FREE,
    "task": _ALWAYS,
    "task.options.file": _BY_CHECKSUM,
    "task.options.held_out_file": _BY_CHECKSUM,
    "task.options.corpus": _BY_CHECKSUM,
    "task.sandbox": _FREE,
    "data": _ALWAYS,
    "data.file": _BY_CHECKSUM,
    "data.held_out_file": _BY_CHECKSUM,
    "algorithm": _WHILE_REDOING,
    "critic": _WHILE_REDOING,
    "reference.path": _WHILE_REDOING,
    "teacher.path": _WHILE_REDOING,
    "teacher.by_task": _WHILE_REDOING,
    "reference.parallelism": _NUMERIC,
    "teacher.parallelism": _NUMERIC,
    "implicit_reward": _WHILE_REDOING,
    "drafter": _WHILE_REDOING,
    "critic.placement": _NUMERIC,
    "critic.parallelism": _NUMERIC,
    "implicit_reward.placement": _NUMERIC,
    "implicit_reward.parallelism": _NUMERIC,
    "rollout": _FREE,
    "rollout.max_new_tokens": _WHILE_REDOING,
    "rollout.temperature": _WHILE_REDOING,
    **dict.fromkeys(DECODING_KEYS, _WHILE_REDOING),
    "rollout.share_prefix": _WHILE_REDOING,
    "sft": _WHILE_REDOING,
    "training": _WHILE_REDOING,
    "training.steps": _FREE,
    "optimizer": _WHILE_REDOING,
    "lr_scheduler": _WHILE_REDOING,
    "parallelism": _NUMERIC,
    "compile": _NUMERIC,
    "debug.batch_invariant": _NUMERIC,
    "float8": _NUMERIC,
    "activation_checkpoint": _NUMERIC,
}
"""What may change on --resume, by the longest beginning of a key; whatever is not here is free. ``_BY_CHECKSUM``: a
file may move (records/run_directory/sources.py). ``_NUMERIC``: free, but a replay needs to know what it was."""
_TRAIN_MTP = f"{DRAFTER}.train_mtp"
_METHOD, _DRAFTED = (f"generator.speculative.{key}" for key in ("method", "num_speculative_tokens"))
_OPEN = ("task.options.", "task.rewards.", "task.rewards_by_source.", "task.judge.", "optimizer.param_groups.")
_OPEN += ("model.chat_template.options.", "data.columns.", "eval.suites.", "task.sandbox.", "teacher.by_task.")
_OPEN += tuple(f"{role}.{table}." for role in LEARNED for table in ("optimizer", "lr_scheduler"))
_OPEN += tuple(f"{role}.parallelism." for role in MAY_BE_OWN)
"""Tables without a fixed list of keys."""


def check_resumable(run_dir: RunDir, checked: Checked) -> int:
    """The last step that stays as it was trained, under settings that are other ones now; 0 if there is none.

    Errors: ConfigError that names what is damaged, what cannot be had again, or the setting that cannot change."""
    if run_dir.is_in_use():
        raise ConfigError(f"{run_dir.root} is in use by another process: wait for it, or give another --run.dir")
    config, settings = checked.config, flat(checked.as_dict())
    recorded_settings = read_settings(run_dir.config)
    checkpoint = newest_checkpoint(run_dir, config)
    start = checkpoint or 0
    on_data = checked.dataset is not None
    trained = start if on_data else _trained(run_dir, start)  # what it learns from is drawn again
    _check_kept(run_dir, recorded_settings, settings)
    if on_data:
        _check_drawn(run_dir, recorded_settings, settings)
    last = last_recorded(run_dir.rollouts, start, trained)
    for path in dict.fromkeys(run_dir.config_of(step) for step in range(start + 1, last + 1)):
        _check_redone(run_dir, read_settings(path), settings, start + 1, last, with_sft=checkpoint is None)
    recorded, flaw = _recorded(run_dir, checked, start, trained)
    if flaw and checkpoint is None:
        problem = _folder(run_dir, config).flaws()
        raise ConfigError(
            f"no checkpoint of {run_dir.root} is complete ({problem}), and {flaw}: leave --resume out, and give "
            f"another --run.dir"
        )
    check_own_models(run_dir, config, checked.family)
    if checkpoint is not None:
        check_resumed(config, checked.algorithm, run_dir, recorded_settings)
        _check_learned(run_dir, checked, recorded_settings, settings)
    return recorded if first_change(recorded_settings, settings) else 0


def _folder(run_dir: RunDir, config: Config) -> CheckpointFolder:
    return CheckpointFolder.of(run_dir, config.checkpoint.keep_latest_k, config.checkpoint.store)


def newest_checkpoint(run_dir: RunDir, config: Config) -> int | None:
    """The step of the newest complete one."""
    newest = _folder(run_dir, config).newest_complete()
    if newest is None:
        return None
    check_readable(newest[0])
    return newest[1].step


def check_readable(checkpoint: Path) -> None:
    """Errors: ConfigError for one that passes its checksums and is still none that a run wrote."""
    folders = {role_folder(checkpoint, role) for role in LEARNED} | {checkpoint}
    if flaw := next((flaw for folder in folders if (flaw := state_flaw(folder))), None):
        raise ConfigError(f"checkpoint {checkpoint} cannot be trusted: {flaw}; remove it, or leave the run alone")


def _check_learned(run_dir: RunDir, checked: Checked, recorded: Settings, settings: Settings) -> None:
    """Errors: ConfigError for another directory of a model whose weights the checkpoint has; one may have moved."""
    newest = _folder(run_dir, checked.config).newest_complete()
    assert newest is not None, "there is a checkpoint"
    if recorded.get(_TRAIN_MTP) and not settings.get(_TRAIN_MTP) and holds_role(newest[0], DRAFTER):
        raise ConfigError(
            f"{_TRAIN_MTP} = false: {run_dir.root} has trained the policy's layer for multi-token prediction, and "
            f"model/ would have that of {checked.config.model.path} again: give true, with {_METHOD} = 'mtp', or leave "
            f"--resume out and give another --run.dir"
        )
    for role in learned_roles(checked.config, checked.algorithm.needs):
        key = f"{role}.path"
        before, now = recorded.get(key, ""), settings[key]
        if before != now and (not before or Path(before).exists()) and holds_role(newest[0], role):
            raise ConfigError(
                f"{key} = {_shown(now)} is not what {run_dir.root} was begun with, {_shown(before)}, and its "
                f"checkpoint has the weights of the {role}: give that, or leave --resume out and give another --run.dir"
            )


def _trained(run_dir: RunDir, checkpoint: int) -> int:
    """The last step that the ledger knows as trained. Errors: ConfigError if it does not hold."""
    if not run_dir.has_begun() and not (run_dir.ledger.exists() and run_dir.ledger.stat().st_size):
        return 0  # killed before it had one
    if findings := flaws(run_dir.ledger):
        more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
        raise ConfigError(f"the ledger of {run_dir.root} does not hold: {findings[0]}{more}; leave --resume out")
    trained = read(run_dir.ledger, last_trained_step)
    if trained < checkpoint:
        raise ConfigError(
            f"the ledger of {run_dir.root} ends at step {trained}, before its checkpoint of step {checkpoint}: it is "
            f"another run's, or an old copy; leave --resume out"
        )
    return trained


def _recorded(run_dir: RunDir, checked: Checked, checkpoint: int, trained: int) -> tuple[int, str]:
    """The last step that can be trained again from its rollouts, and what is wrong with the next one, if anything."""
    last, limits = last_recorded(run_dir.rollouts, checkpoint, trained), limits_of(checked)
    for step in range(checkpoint + 1, last + 1):
        try:
            read_rollouts(run_dir.rollouts, step, limits)
        except RolloutsError as error:
            return step - 1, str(error)
    return last, f"the rollouts of step {last + 1} are not there" if last < trained else ""


def limits_of(checked: Checked) -> Limits:
    """Limits of recorded rollouts: vocabulary, row length, decoding settings, tasks with teachers."""
    hf, decoding = read_config(checked), decoding_of(checked.config.rollout)
    tags = thinking_tags(tokenizer_of(checked.config)) if decoding.thinking_budget else None
    experts = experts_of(hf, checked.family) if checked.config.algorithm.routing == "replay" else None
    teachers = teachers_of(checked.config)
    tasks = frozenset(teachers.of_task if checked.algorithm.needs.teacher and len(teachers.paths) > 1 else ())
    images = text_settings(tokenizer_of(checked.config)).images
    return Limits(hf.vocab_size, checked.titan.training.seq_len, decoding, tags, experts, tasks, images)


def check_own_models(run_dir: RunDir, config: Config, family: Family | None) -> None:
    """Errors: ConfigError if one of the models that the run is to go on with and that lie in its directory is none."""
    for path in (*([run_dir.base_model] if config.model.path in MADE_MODELS else []), run_dir.kept_policy):
        if not path.exists():
            continue
        try:
            check_model(replace(config, model=replace(config.model, path=str(path))), family)
        except OSError as error:
            raise ConfigError(f"{path} is not the model that the run made: {error}") from None


# settings


def read_settings(path: Path) -> Settings:
    """Settings of a run's record as plain values, without a look at files. Errors: ConfigError."""
    return flat(read_resolved(path))


def _rule(key: str) -> int:
    parts = key.split(".")
    beginnings = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((_RULES[beginning] for beginning in beginnings if beginning in _RULES), _FREE)


def changes(recorded: Settings, settings: Settings) -> list[str]:
    """Keys that have another value. One that either release does not know is no change."""
    keys = [key for key in recorded | settings if key.startswith(_OPEN) or (key in recorded and key in settings)]
    return [key for key in keys if recorded.get(key) != settings.get(key)]


def first_change(recorded: Settings, settings: Settings) -> str:
    """First changed key that affects a step's numbers; empty if there is none."""
    kinds = (_WHILE_REDOING, _NUMERIC)
    return next((key for key in changes(recorded, settings) if _rule_under(recorded, key) in kinds), "")


def _rule_under(recorded: Settings, key: str) -> int:
    """Rule of a key, which may depend on others: of the number of steps on a schedule that decays with it, of that of
    drafted tokens on a head that learns to draft them."""
    learns = recorded.get("drafter.path") or recorded.get(_TRAIN_MTP)
    if key == _DRAFTED and learns and recorded.get(_METHOD) in ("eagle3", "mtp"):
        return _WHILE_REDOING
    if key != "training.steps":
        return _rule(key)
    schedules = ("lr_scheduler", *(f"{role}.lr_scheduler" for role in LEARNED))
    return _WHILE_REDOING if any(_follows_steps(recorded, schedule) for schedule in schedules) else _FREE


def _follows_steps(recorded: Settings, schedule: str) -> bool:
    """Whether a schedule depends on the run's length: it decays (null: after the warmup), and has no own length."""
    decays = recorded.get(f"{schedule}.decay_ratio", 0.0) != 0.0
    return decays and recorded.get(f"{schedule}.total_steps") is None


def _check_kept(run_dir: RunDir, recorded: Settings, settings: Settings) -> None:
    for key in changes(recorded, settings):
        is_made = key == "model.path" and not {recorded[key], settings[key]}.isdisjoint(MADE_MODELS)
        if _rule(key) == _ALWAYS or is_made:
            raise ConfigError(
                f"{key} = {_shown(settings.get(key))} is not what {run_dir.root} was begun with, "
                f"{_shown(recorded.get(key))}: give that, or leave --resume out and give another --run.dir"
            )


def _check_drawn(run_dir: RunDir, recorded: Settings, settings: Settings) -> None:
    """Errors: ConfigError for what would draw other rows at a step of the same number."""
    drawing = (
        ("data.file", "data.held_out_file") if "task" in (recorded.get("data.file"), settings["data.file"]) else ()
    )
    skipping = ("training.seq_len",) if settings["data.too_long"] == "skip" else ()
    for key in (*drawing, *skipping):
        if recorded.get(key) != settings.get(key):
            raise ConfigError(
                f"{key} = {_shown(settings.get(key))} is not what {run_dir.root} was begun with, "
                f"{_shown(recorded.get(key))}, and would draw other rows: give that, or leave --resume out"
            )


def _check_redone(
    run_dir: RunDir, recorded: Settings, settings: Settings, first: int, last: int, *, with_sft: bool
) -> None:
    for key in changes(recorded, settings):
        if _rule_under(recorded, key) == _WHILE_REDOING and (with_sft or not key.startswith("sft.")):
            raise ConfigError(
                f"{key} = {_shown(settings.get(key))} is not what steps {first} to {last} of {run_dir.root} were "
                f"trained with, {_shown(recorded.get(key))}, and no checkpoint is after them: resume with that, stop "
                f"the run after a step (Ctrl-C), which saves one, then change it"
            )


def _shown(value: Any) -> str:
    text = "not set" if value is None else json.dumps(value)
    return text if len(text) <= 80 else f"{text[:80]}..."

"""Limits of TorchTitan's keys that its dataclasses do not check.

Beyond them a trainer process would fail, or would train at another learning rate than was asked for.
"""

import re
from collections.abc import Iterable, Sequence
from math import isfinite
from typing import Any

import torch

import titan_rl.models.device  # noqa: F401  # isort: skip  (before any other torchtitan module)

from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer
from torchtitan.config import CommConfig, CompileConfig
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing

from titan_rl.config.load import ConfigError, nearest

_OPTIMIZERS: dict[str, Any] = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}
"""Those of TorchTitan's whose moments are kept over a repair (optimizer.py)."""
_OF_IMPLEMENTATION = ("fused", "foreach")
"""Arguments that TorchTitan gives each group, by ``implementation``."""
_COMPONENTS = ("model", "loss")
_DETERMINISM_CHECKS = ("default", "none")
_MOST_SECONDS = 10**6


def check_schedule(schedule: LRSchedulersContainer.Config, section: str) -> None:
    """Check a schedule. Errors: ConfigError for a negative learning rate, or one that differs from the TOML."""
    if schedule.warmup_steps < 0:
        raise ConfigError(f"{section}.warmup_steps = {schedule.warmup_steps} must be at least 0")
    if schedule.total_steps is not None and schedule.total_steps < 1:
        raise ConfigError(f"{section}.total_steps = {schedule.total_steps} must be at least 1, or be left out")
    for name in ("decay_ratio", "min_lr_factor"):
        value = getattr(schedule, name)
        if value is not None and not 0 <= value <= 1:
            raise ConfigError(f"{section}.{name} = {value!r} must be from 0 to 1")


def check_length(schedule: LRSchedulersContainer.Config, num_updates: int, section: str) -> None:
    """Check that warmup and decay fit into the schedule; ``num_updates``: of the run.

    Errors: ConfigError; TorchTitan would shorten decay and warmup with a line in its own log alone."""
    total = schedule.total_steps or num_updates
    decay = round(total * schedule.decay_ratio) if schedule.decay_ratio else 0
    if schedule.warmup_steps + decay <= total:
        return
    of = f"{section}.total_steps" if schedule.total_steps else "the run's updates"
    beside = f", and {section}.decay_ratio = {schedule.decay_ratio:g} another {decay}" if decay else ""
    longer = f"raise {of if schedule.total_steps else 'training.steps'}"
    raise ConfigError(
        f"{section}.warmup_steps = {schedule.warmup_steps} takes so many of {of}, which are {total}{beside}: "
        f"{longer}, or lower {'one of them' if decay else 'it'}"
    )


def check_groups(optimizer: OptimizersContainer.Config, section: str) -> None:
    """Check parameter groups, each against its optimizer built on one number. Errors: ConfigError."""
    if optimizer.implementation == "fused_opt_states_bf16":
        raise ConfigError(
            f"{section}.implementation = 'fused_opt_states_bf16' has no effect: moments are made before the first "
            f"step, in the precision of the weights; leave it out"
        )
    for name, arguments in optimizer.optimizer_factory_kwargs_by_name.items():
        if name not in _OPTIMIZERS:
            raise ConfigError(f"{section}.optimizer_factory_kwargs_by_name: {name!r}: {nearest(name, _OPTIMIZERS)}")
        _try(name, arguments, f"{section}.optimizer_factory_kwargs_by_name.{name}")
        _check_factory(optimizer, name, section)
    for group in optimizer.param_groups:
        key, name = f"{section}.param_groups", group.optimizer_name
        try:
            re.compile(group.pattern)
        except re.error as error:
            raise ConfigError(f"{key}.pattern = {group.pattern!r} is no regular expression: {error}") from None
        if name not in _OPTIMIZERS:
            raise ConfigError(f"{key}.optimizer_name = {name!r}: {nearest(name, _OPTIMIZERS)}")
        _try(name, group.optimizer_kwargs, f"{key}.optimizer_kwargs")


def _check_factory(optimizer: OptimizersContainer.Config, name: str, section: str) -> None:
    """Errors: ConfigError for an optimizer that no group has, or an argument that all of its groups have themselves."""
    key = f"{section}.optimizer_factory_kwargs_by_name.{name}"
    groups = [group.optimizer_kwargs for group in optimizer.param_groups if group.optimizer_name == name]
    if not groups:
        raise ConfigError(f"{key} has no effect: no group of parameters has this optimizer; leave it out")
    for argument in optimizer.optimizer_factory_kwargs_by_name[name]:
        if argument in _OF_IMPLEMENTATION or all(argument in group for group in groups):
            raise ConfigError(
                f"{key}.{argument} has no effect: each group of parameters has its own; leave it out, or change theirs"
            )


def _try(name: str, arguments: dict[str, Any], key: str) -> None:
    numbers = (number for value in arguments.values() for number in (value if isinstance(value, list) else [value]))
    if endless := [number for number in numbers if isinstance(number, float) and not isfinite(number)]:
        raise ConfigError(f"{key}: {endless[0]!r} is no finite number: give one")
    if arguments.get("amsgrad"):
        raise ConfigError(f"{key}.amsgrad: its third moment is not kept over a repair; leave it out")
    try:
        _OPTIMIZERS[name]([torch.zeros(1)], **arguments)
    except Exception as error:  # torch has no narrower one for what it does not take
        raise ConfigError(f"{key}: {' '.join(str(error).split())}; correct it") from None


def check_patterns(
    groups: Sequence[ParamGroupConfig],
    names: Iterable[str],
    *,
    section: str = "optimizer",
    are_adapters: bool = False,
) -> None:
    """Check that each group matches a parameter, and each parameter a group.

    ``names``: of all trained parameters. Errors: ConfigError."""
    remaining = list(names)
    first = remaining[0]
    for group in groups:
        matched = [name for name in remaining if re.search(group.pattern, name)]
        if not matched:
            what = "with [lora] nothing but adapters is trained, and none" if are_adapters else "no parameter"
            raise ConfigError(
                f"{section}.param_groups: {what} is left for {group.pattern!r}: their names are like {first}"
            )
        remaining = [name for name in remaining if name not in matched]
    if remaining:
        raise ConfigError(f"{section}.param_groups has no pattern for {remaining[0]}: add a group with '.*'")


def check_compile_keys(settings: CompileConfig) -> None:
    """Check ``[compile]``. Errors: ConfigError for an unknown component or backend."""
    if unknown := [name for name in settings.components if name not in _COMPONENTS]:
        raise ConfigError(f"compile.components: {unknown[0]!r}: {nearest(unknown[0], _COMPONENTS)}")
    if not settings.enable:
        return
    known = torch.compiler.list_backends(())  # debug's and experimental ones, too
    if settings.backend not in known:
        raise ConfigError(f"compile.backend = {settings.backend!r}: {nearest(settings.backend, known)}")


def check_comm(settings: CommConfig) -> None:
    """Check ``[comm]``. Errors: ConfigError for a timeout out of bounds."""
    if not 1 <= settings.init_timeout_seconds <= _MOST_SECONDS:
        raise ConfigError(
            f"comm.init_timeout_seconds = {settings.init_timeout_seconds} must be from 1 to {_MOST_SECONDS}"
        )


def check_recomputing(policy: ActivationCheckpointing.Config | None) -> None:
    """Check ``[activation_checkpoint]``. Errors: ConfigError for an unknown determinism check."""
    if policy is not None and (mode := policy.determinism_check) not in _DETERMINISM_CHECKS:
        raise ConfigError(f"activation_checkpoint.determinism_check = {mode!r}: {nearest(mode, _DETERMINISM_CHECKS)}")

"""Optimizer and schedule of a rank's part of the model, as TorchTitan builds them."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import titan_rl.models.device as device  # noqa: F401  isort: skip  (before any other torchtitan module)

from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.components.optimizer.lr_scheduler import LRSchedulersContainer

from titan_rl.trainer.titan_config import TitanConfig, adamw

_SFT_WARMUP_STEPS = 10
"""At most, of the learning rate."""


def build_optimizer(
    titan: TitanConfig, model_parts: list[nn.Module], num_updates: int
) -> tuple[OptimizersContainer, LRSchedulersContainer]:
    """Optimizer and schedule of the TOML; the schedule counts updates.

    After its last update the rate stays, where TorchTitan's would fall below 0 or rise again."""
    optimizer = titan.optimizer.build(model_parts=model_parts)
    for part in optimizer.optimizers:
        begin_moments(part)
    return optimizer, _build_schedule(titan, optimizer, num_updates)


def _build_schedule(titan: TitanConfig, optimizer: OptimizersContainer, num_updates: int) -> LRSchedulersContainer:
    schedule = titan.lr_scheduler.build(optimizers=optimizer, training_steps=num_updates)
    last = (titan.lr_scheduler.total_steps or num_updates) - 1
    for scheduler in schedule.schedulers:
        assert isinstance(scheduler, LambdaLR), "TorchTitan has no other kind"
        scheduler.lr_lambdas = [partial(_until, last, factor) for factor in scheduler.lr_lambdas]
    return schedule


def _until(last: int, factor: Callable[[int], float], update: int) -> float:
    """The share of the learning rate that a number of updates has, the first being 0."""
    return factor(min(update, last))


def set_optimizer(
    optimizer: OptimizersContainer,
    scheduler: LRSchedulersContainer,
    titan: TitanConfig,
    model_parts: list[nn.Module],
    num_updates: int,
) -> None:
    """Apply changed settings to the same parameter groups; moments and update counts stay."""
    target = titan.optimizer.build(model_parts=model_parts)
    schedule = _build_schedule(titan, target, num_updates)
    for current, other in zip(optimizer.optimizers, target.optimizers, strict=True):
        for group, settings in zip(current.param_groups, other.param_groups, strict=True):
            group.update(_settings(settings))
    for current, other in zip(scheduler.schedulers, schedule.schedulers, strict=True):
        assert isinstance(current, LambdaLR) and isinstance(other, LambdaLR), "TorchTitan has no other kind"
        current.lr_lambdas, current.base_lrs = other.lr_lambdas, other.base_lrs
    load_schedule(scheduler, scheduler.state_dict())


def load_optimizer(optimizer: OptimizersContainer, scheduler: LRSchedulersContainer, states: dict) -> None:
    """Load the states "optimizer" and "scheduler"; settings stay those of the present TOML."""
    settings = [[_settings(group) for group in part.param_groups] for part in optimizer.optimizers]
    optimizer.load_state_dict(states["optimizer"])
    for part, groups in zip(optimizer.optimizers, settings, strict=True):
        for group, group_settings in zip(part.param_groups, groups, strict=True):
            group.update(group_settings)
    load_schedule(scheduler, states["scheduler"])


def load_schedule(scheduler: LRSchedulersContainer, state: dict) -> None:
    """Load a schedule's state, and set the learning rate of its place."""
    scheduler.load_state_dict(state)
    for part in scheduler.schedulers:
        for group, rate in zip(part.optimizer.param_groups, part.get_last_lr(), strict=True):
            group["lr"] = rate


def _settings(group: dict) -> dict:
    return {name: value for name, value in group.items() if name != "params"}


def build_sft_optimizer(
    model_parts: list[nn.Module], lr: float, num_steps: int
) -> tuple[OptimizersContainer, LRSchedulersContainer]:
    """AdamW with linear warmup and decay, for ``num_steps`` supervised steps."""
    optimizer = adamw(lr=lr).build(model_parts=model_parts)
    schedule = LRSchedulersContainer.Config(warmup_steps=min(_SFT_WARMUP_STEPS, num_steps))
    return optimizer, schedule.build(optimizers=optimizer, training_steps=num_steps)


@torch.no_grad()
def begin_moments(optimizer: torch.optim.Optimizer) -> None:
    """Initialize moments and step count to zero, as AdamW does at its first step.

    Left to that step, a checkpoint before it would make them, by an empty step of its own, which counts: the first
    real update then came out 0.735 times as large (torch.distributed.checkpoint's ``_init_optim_state``).
    """
    for group in optimizer.param_groups:
        on_device = group.get("fused") or group.get("capturable")
        for parameter in group["params"]:
            count = torch.zeros((), device=parameter.device if on_device else "cpu")
            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": count, **moments}

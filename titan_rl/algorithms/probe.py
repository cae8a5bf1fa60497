"""An algorithm tried on small made-up data before anything starts: what a run would stumble over is told in one line.

Dimensions: S trained tokens of a row.
"""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np
import torch

from titan_rl.algorithms.base import Algorithm, LossInputs
from titan_rl.algorithms.batching import checked_advantages
from titan_rl.config.load import ConfigError
from titan_rl.config.plugins import what_happened
from titan_rl.data.types import Provenance, Rollout, StepMetrics, Turn

_NUM_TOKENS = 8
_TAKEN = {f.name for f in fields(StepMetrics)} | {"step", "count", "reward", "accuracy", "response_length", "truncated"}
_TAKEN |= {"groups_with_signal", "bad_batches_in_a_row"}
_TAKEN_BEGINNINGS = ("seconds_", "tokens_per_second_", "held_out_", "checkpoint_", "slowest_", "staleness_")
"""Of the names in a step's record (records/metrics.py, controller): a loss's metric would overwrite them."""
_LOGPROB_ROLES = ("reference", "proximal", "teacher")


class _AnyPart(dict):
    """The parts of a reward: whatever part is asked for is there."""

    def __missing__(self, name: str) -> float:
        return 0.5


def _rollout(sample: int, reward: float) -> Rollout:
    """A prompt of 3 tokens and an answer of ``sample + 1``."""
    num_prompt, num_answer = 3, sample + 1
    return Rollout(
        prompt_id="made-up",
        sample=sample,
        tokens=np.arange(3, 3 + num_prompt + num_answer, dtype=np.int32),
        provenance=np.array([Provenance.TEMPLATE] * num_prompt + [Provenance.MODEL] * num_answer, np.int8),
        logprobs=np.array([0.0] * num_prompt + [-0.5] * num_answer, np.float32),
        versions=np.array([-1] * num_prompt + [0] * num_answer, np.int32),
        turns=[Turn(num_prompt, num_prompt + num_answer, "stop")],
        status="ok",
        reward=reward,
        reward_parts=_AnyPart(),
        text="made-up answer",
    )


def _call(what: str, function: Callable, *arguments: Any) -> Any:
    """Errors: ConfigError that begins with ``what``."""
    try:
        return function(*arguments)
    except Exception as error:  # a user's algorithm may raise anything
        raise ConfigError(f"{what}: {what_happened(error)}") from None


def check_advantages(algorithm: Algorithm, said: str) -> None:
    """Errors: ConfigError."""
    for kind, rewards in {"unequal": (1.0, 0.0, 0.5, 0.25), "equal": (1.0,) * 4}.items():
        what = f"{said}: advantages of four samples with {kind} rewards"
        rollouts = [_rollout(sample, reward) for sample, reward in enumerate(rewards)]
        found = _call(what, checked_advantages, algorithm, rollouts)
        if not all(np.isfinite(advantage).all() for advantage in found):
            raise ConfigError(f"{what} must be finite, and are {found!s:.200}")


def _row() -> tuple[torch.Tensor, ...]:
    """Columns of a row: log-probabilities, the sampler's, advantages, weights, entropies; two tokens count for
    nothing."""
    place_S = torch.arange(_NUM_TOKENS, dtype=torch.float32)
    logprob_S = -0.1 - 0.3 * place_S
    advantage_S = torch.tensor([1.0, -1.0, 0.5, -0.25] * 2)
    weight_S = (place_S % 4 != 2) / 6
    return logprob_S, logprob_S + 0.1 * torch.sin(3 * place_S), advantage_S, weight_S, 0.2 + 0.1 * place_S


def _dummy_row() -> tuple[torch.Tensor, ...]:
    """What fills up ranks and stages: one token of weight 0."""
    return (torch.zeros(1),) * 5


def _inputs(algorithm: Algorithm, leaf_S: torch.Tensor, columns: tuple[torch.Tensor, ...]) -> LossInputs:
    """With what the algorithm needs of roles; samples are of two tokens. The model's own head gives ``leaf_S``."""
    found = {f"{role}_logprob_S": columns[1] for role in _LOGPROB_ROLES if getattr(algorithm.needs, role)}
    logprob_S = leaf_S
    if algorithm.head == "value":
        logprob_S, found = torch.zeros_like(leaf_S), found | {"value_S": leaf_S}
    elif algorithm.needs.critic:
        found["value_S"] = columns[4]
    offsets_N = torch.tensor([*range(0, len(leaf_S), 2), len(leaf_S)])
    return LossInputs(logprob_S, *columns[1:], offsets_N=offsets_N, **found)


def _loss_and_gradient(algorithm: Algorithm, said: str, columns: tuple[torch.Tensor, ...]):
    """Loss, metrics, and the gradient of the loss for the log-probabilities."""
    leaf_S = columns[0].clone().requires_grad_()
    answer = _call(f"{said}: loss", algorithm.loss, _inputs(algorithm, leaf_S, columns))
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise ConfigError(f"{said}: loss must return (loss, metrics), not a {type(answer).__name__}")
    loss, metrics = answer
    _check_scalar(f"{said}: loss", loss)
    _check_metrics(said, metrics)
    if not loss.requires_grad:
        raise ConfigError(f"{said}: loss has no gradient for logprob_S: compute it from inputs.logprob_S")
    what = f"{said}: gradient of loss"
    [grad_S] = _call(what, lambda: torch.autograd.grad(loss, [leaf_S], allow_unused=True))
    if grad_S is None:
        raise ConfigError(f"{said}: loss has no gradient for logprob_S: compute it from inputs.logprob_S")
    if not torch.isfinite(loss):
        raise ConfigError(f"{said}: loss must be finite, and is {loss.item()}")
    if not torch.isfinite(grad_S).all():
        raise ConfigError(f"{what} must be finite, and is {grad_S.tolist()!s:.200}")
    return loss.detach(), metrics, grad_S


def _check_scalar(what: str, value: Any) -> None:
    if not isinstance(value, torch.Tensor) or value.shape != ():
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
        raise ConfigError(f"{what} must be a scalar tensor, not a {type(value).__name__}{shape}: sum over the tokens")


def _check_metrics(said: str, metrics: Any) -> None:
    if not isinstance(metrics, dict):
        raise ConfigError(f"{said}: the second value of loss must be a dict of sums, not a {type(metrics).__name__}")
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise ConfigError(f"{said}: loss returns a metric by the name {name!r}: names are strings")
        if name in _TAKEN or name.startswith(_TAKEN_BEGINNINGS):
            raise ConfigError(f"{said}: loss returns a metric {name!r}, a name that every step has: rename yours")
        _check_scalar(f"{said}: the metric {name!r} of loss", value)


def check_loss(algorithm: Algorithm, said: str) -> None:
    """Errors: ConfigError, also if tokens of weight 0 count for something by themselves."""
    _, metrics, _ = _loss_and_gradient(algorithm, said, _row())
    loss, dummy_metrics, grad_S = _loss_and_gradient(algorithm, said, _dummy_row())
    if sorted(dummy_metrics) != sorted(metrics):
        raise ConfigError(
            f"{said}: loss must return the same metrics for all tokens, not once {sorted(metrics)} and once "
            f"{sorted(dummy_metrics)}"
        )
    if loss != 0 or grad_S.any():
        raise ConfigError(
            f"{said}: loss of a token of weight 0 must be 0, and is {loss.item()}: multiply by inputs.weight_S"
        )
    for name, value in dummy_metrics.items():
        if value != 0:
            raise ConfigError(
                f"{said}: the metric {name!r} counts tokens of weight 0: sum it where inputs.weight_S > 0"
            )


def check_token_sum(algorithm: Algorithm, said: str) -> None:
    """Errors: ConfigError if the parts of a row do not have, each by itself, the gradient of the whole."""
    columns, half = _row(), _NUM_TOKENS // 2
    _, _, whole_S = _loss_and_gradient(algorithm, said, columns)
    blind = (*columns[:4], torch.zeros(_NUM_TOKENS))  # the head is asked before entropies are known
    parts = [tuple(column[part] for column in blind) for part in (slice(0, half), slice(half, None))]
    parts_S = torch.cat([_loss_and_gradient(algorithm, said, part)[2] for part in parts])
    if not torch.allclose(parts_S, whole_S, rtol=1e-5, atol=1e-8):
        raise ConfigError(
            f"{said}: is_token_sum is true, but the gradient of two halves of a row is not that of the whole, or it "
            f"depends on the entropy: leave is_token_sum out"
        )

"""Dry run of an algorithm on small synthetic data, before anything starts.

Dimensions: S trained tokens of a row, N samples.
"""

import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch

from titan_rl.algorithms.base import Algorithm, LossInputs, Refined, provided
from titan_rl.algorithms.batches.batching import checked_advantages
from titan_rl.config.load import ConfigError
from titan_rl.config.plugins import what_happened
from titan_rl.data.types import Provenance, Rollout, StepMetrics, Turn

_NUM_TOKENS = 8
_ROLE_COLUMNS = {
    "reference": "reference_logprob_S",
    "proximal": "proximal_logprob_S",
    "critic": "value_S",
    "teacher": "teacher_logprob_S",
    "self_teacher": "teacher_logprob_S",
    "implicit_reward": "process_reward_S",
}
"""Column of each need."""
_WORD_COLUMNS = ("word_logprob_SK", "teacher_word_logprob_SK")
_TAKEN = {f.name for f in fields(StepMetrics)} | {"step", "count", "reward", "accuracy", "response_length", "truncated"}
_TAKEN |= {"groups_with_signal", "nonfinite_batches_in_a_row", "sampled_per_trained"}
_TAKEN |= {"overlong_punishment", "task_reward"}
_TAKEN |= {"passed_over", "reward_min", "reward_max", "grade", "grade_min", "grade_max", "effective_answers"}
_TAKEN |= {"routing_changed", "routed_experts_mib"}
_TAKEN |= {"turns", "reply_tokens", "max_turns", "prompt_tokens_cached", "score_retries"}
_TAKEN |= {"draft_tokens", "draft_acceptance_rate", "helper_token_share"}
_TAKEN |= {"preemptions", "kv_cache_usage_max", "running_requests_mean"}
_TAKEN_BEGINNINGS = ("seconds_", "tokens_per_second_", "held_out_", "checkpoint_", "slowest_", "staleness_", "critic_")
_TAKEN_BEGINNINGS += ("filtered_", "alarm_", "implicit_reward_", "tool_calls", "weight_bytes_")
"""Of the names in a step's record (records/metrics.py, controller): a loss's metric would overwrite them."""


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


def check_advantages(algorithm: Algorithm, prefix: str) -> None:
    """Check advantages of synthetic groups. Errors: ConfigError."""
    for kind, rewards in {"unequal": (1.0, 0.0, 0.5, 0.25), "equal": (1.0,) * 4}.items():
        what = f"{prefix}: advantages of four samples with {kind} rewards"
        rollouts = [_rollout(sample, reward) for sample, reward in enumerate(rewards)]
        advantages = _call(what, checked_advantages, algorithm, rollouts)
        if not all(np.isfinite(advantage).all() for advantage in advantages):
            raise ConfigError(f"{what} must be finite, and are {advantages!s:.200}")


def _row(algorithm: Algorithm) -> LossInputs:
    """Four samples: two of one token, one of a token that counts for nothing, and one of five, of which four count."""
    place_S = torch.arange(_NUM_TOKENS, dtype=torch.float32)
    logprob_S = -0.1 - 0.3 * place_S
    names, words = _column_names(algorithm), algorithm.needs.teacher_words
    word_SK = -1.0 - 0.1 * torch.cos(place_S[:, None] * torch.arange(1.0, words + 1)) - math.log(max(words, 1))
    return LossInputs(
        logprob_S=torch.zeros(_NUM_TOKENS) if algorithm.head == "value" else logprob_S,
        sampling_logprob_S=logprob_S + 0.1 * torch.sin(3 * place_S),
        advantage_S=torch.tensor([1.0, -1.0, 0.5, -0.25] * 2),
        weight_S=(place_S % 4 != 2) / 6,
        entropy_S=0.2 + 0.1 * place_S,
        offsets_N=torch.tensor([0, 1, 2, 3, _NUM_TOKENS]),
        **{name: logprob_S + 0.1 * torch.cos(place_S + number) for number, name in enumerate(names)},
        **({"word_logprob_SK": word_SK, "teacher_word_logprob_SK": 1.1 * word_SK} if words else {}),
        **({"teacher_mask_S": (place_S % 3 < 2).float()} if algorithm.needs.self_teacher else {}),
    )


def _dummy_row(algorithm: Algorithm) -> LossInputs:
    """What fills up ranks and stages: one token of weight 0."""
    columns, words = dict.fromkeys(_column_names(algorithm), torch.zeros(1)), algorithm.needs.teacher_words
    columns |= dict.fromkeys(_WORD_COLUMNS, torch.zeros(1, words)) if words else {}
    columns |= {"teacher_mask_S": torch.zeros(1)} if algorithm.needs.self_teacher else {}
    return LossInputs(*(torch.zeros(1),) * 5, offsets_N=torch.tensor([0, 1]), **columns)


def _column_names(algorithm: Algorithm) -> list[str]:
    """Columns of roles, and values if the model has a value head."""
    names = [name for need, name in _ROLE_COLUMNS.items() if getattr(algorithm.needs, need)]
    return [*names, "value_S"] if algorithm.head == "value" and "value_S" not in names else names


def _trained_column(algorithm: Algorithm) -> str:
    """The column that the gradient flows through."""
    if algorithm.needs.teacher_words:
        return "word_logprob_SK"
    return "value_S" if algorithm.head == "value" else "logprob_S"


def check_refine(algorithm: Algorithm, prefix: str) -> None:
    """Check ``refine`` on synthetic rows. Errors: ConfigError."""
    for inputs in (_row(algorithm), _dummy_row(algorithm)):
        _refined(algorithm, prefix, inputs)


def _refined(algorithm: Algorithm, prefix: str, inputs: LossInputs) -> LossInputs:
    """What the loss gets. Errors: ConfigError."""
    nothing_S = torch.zeros_like(inputs.weight_S)
    trained = _trained_column(algorithm)
    unknown = {"entropy_S": nothing_S, "logprob_S": nothing_S, trained: torch.zeros_like(getattr(inputs, trained))}
    with torch.no_grad():
        refined = _call(f"{prefix}: refine", algorithm.refine, _summed(algorithm, prefix, replace(inputs, **unknown)))
    if not isinstance(refined, Refined):
        raise ConfigError(f"{prefix}: refine must return a Refined, not {type(refined).__name__}")
    for name, column in vars(refined).items():
        if column is None and name == "return_S":
            continue
        if not isinstance(column, torch.Tensor) or column.shape != nothing_S.shape:
            raise ConfigError(
                f"{prefix}: refine's {name} must be a tensor with a number for each of {len(nothing_S)} tokens"
            )
        if not torch.isfinite(column).all():
            raise ConfigError(f"{prefix}: refine's {name} must be finite, and is {column.tolist()!s:.200}")
    return replace(inputs, advantage_S=refined.advantage_S)


def _summed(algorithm: Algorithm, prefix: str, inputs: LossInputs) -> LossInputs:
    """With what ``refine`` wants summed up, as if all samples were of one group. Errors: ConfigError."""
    if type(algorithm).group_terms is Algorithm.group_terms:
        return inputs
    terms_NM = _call(f"{prefix}: group_terms", algorithm.group_terms, inputs)
    num_samples = len(provided(inputs.offsets_N)) - 1
    if not isinstance(terms_NM, torch.Tensor) or terms_NM.dim() != 2 or len(terms_NM) != num_samples:
        raise ConfigError(
            f"{prefix}: group_terms must return a tensor with a line of numbers for each of {num_samples} samples"
        )
    if not torch.isfinite(terms_NM).all():
        raise ConfigError(f"{prefix}: group_terms must be finite, and are {terms_NM.tolist()!s:.200}")
    return replace(inputs, group_sums_NM=terms_NM.double().sum(0).expand_as(terms_NM))


def _loss_and_gradient(
    algorithm: Algorithm, prefix: str, inputs: LossInputs
) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
    """Loss, metrics, and the gradient of the loss for what the model gives."""
    name = _trained_column(algorithm)
    leaf_S = getattr(inputs, name).clone().requires_grad_()
    entropy_S = inputs.entropy_S.clone().requires_grad_(algorithm.needs.entropy_gradient)
    answer = _call(f"{prefix}: loss", algorithm.loss, replace(inputs, entropy_S=entropy_S, **{name: leaf_S}))
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise ConfigError(f"{prefix}: loss must return (loss, metrics), not {type(answer).__name__}")
    loss, metrics = answer
    _check_scalar(f"{prefix}: loss", loss)
    _check_metrics(prefix, metrics)
    return loss.detach(), metrics, _gradient(prefix, name, loss, leaf_S)


def _gradient(prefix: str, name: str, loss: torch.Tensor, leaf_S: torch.Tensor) -> torch.Tensor:
    """Errors: ConfigError if there is none, or loss or gradient is not finite."""
    what, grad_S = f"{prefix}: gradient of loss", None
    if loss.requires_grad:
        [grad_S] = _call(what, lambda: torch.autograd.grad(loss, [leaf_S], allow_unused=True))
    if grad_S is None:
        raise ConfigError(f"{prefix}: loss has no gradient for {name}: compute it from inputs.{name}")
    if not torch.isfinite(loss):
        raise ConfigError(f"{prefix}: loss must be finite, and is {loss.item()}")
    if not torch.isfinite(grad_S).all():
        raise ConfigError(f"{what} must be finite, and is {grad_S.tolist()!s:.200}")
    return grad_S


def _check_scalar(what: str, value: Any) -> None:
    if not isinstance(value, torch.Tensor) or value.shape != ():
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
        raise ConfigError(f"{what} must be a scalar tensor, not {type(value).__name__}{shape}: sum over the tokens")


def _check_metrics(prefix: str, metrics: Any) -> None:
    if not isinstance(metrics, dict):
        raise ConfigError(f"{prefix}: the second value of loss must be a dict of sums, not {type(metrics).__name__}")
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise ConfigError(f"{prefix}: loss returns a metric by the name {name!r}: names are strings")
        if name in _TAKEN or name.startswith(_TAKEN_BEGINNINGS):
            raise ConfigError(f"{prefix}: loss returns a metric {name!r}, a name that every step has: rename yours")
        _check_scalar(f"{prefix}: the metric {name!r} of loss", value)


def check_loss(algorithm: Algorithm, prefix: str) -> None:
    """Check loss and metrics on synthetic rows. Errors: ConfigError, also if tokens of weight 0 count."""
    _, metrics, _ = _loss_and_gradient(algorithm, prefix, _refined(algorithm, prefix, _row(algorithm)))
    loss, dummy_metrics, grad_S = _loss_and_gradient(algorithm, prefix, _dummy_row(algorithm))
    if sorted(dummy_metrics) != sorted(metrics):
        raise ConfigError(
            f"{prefix}: loss must return the same metrics for all tokens, not once {sorted(metrics)} and once "
            f"{sorted(dummy_metrics)}"
        )
    if loss != 0 or grad_S.any():
        raise ConfigError(
            f"{prefix}: loss of a token of weight 0 must be 0, and is {loss.item()}: multiply by inputs.weight_S"
        )
    for name, value in dummy_metrics.items():
        if value != 0:
            raise ConfigError(
                f"{prefix}: the metric {name!r} counts tokens of weight 0: sum it where inputs.weight_S > 0"
            )


def check_token_sum(algorithm: Algorithm, prefix: str) -> None:
    """Check that gradients of a row's parts equal that of the whole row. Errors: ConfigError."""
    for is_needed, what in (
        (algorithm.needs.entropy_gradient, "entropies"),
        (algorithm.needs.teacher_words, "the teacher's words"),
    ):
        if is_needed:
            raise ConfigError(
                f"{prefix}: is_token_sum is true, but the loss needs the gradient of {what}, which is not known when "
                f"the head gets its gradient: leave is_token_sum out"
            )
    inputs, half = _refined(algorithm, prefix, _row(algorithm)), _NUM_TOKENS // 2
    _, _, whole_S = _loss_and_gradient(algorithm, prefix, inputs)
    parts = [_part(inputs, tokens) for tokens in (slice(0, half), slice(half, None))]
    parts_S = torch.cat([_loss_and_gradient(algorithm, prefix, part)[2] for part in parts])
    if not torch.allclose(parts_S, whole_S, rtol=1e-5, atol=1e-8):
        raise ConfigError(
            f"{prefix}: is_token_sum is true, but the gradient of two halves of a row is not that of the whole, or it "
            f"depends on the entropy: leave is_token_sum out"
        )


def _part(inputs: LossInputs, tokens: slice) -> LossInputs:
    """What the head asks for some tokens with, before samples and entropies are known."""
    columns = {name: column[tokens] for name, column in vars(inputs).items() if column is not None}
    return LossInputs(**columns | {"entropy_S": torch.zeros_like(columns["entropy_S"]), "offsets_N": None})

"""Policy-gradient losses as settings of one loss: one pass forward, one backward, with all metrics.

Weights carry all normalization, so the loss is a plain sum over tokens; a token of weight zero is not trained, and
whatever else it holds, even NaN, touches nothing. Left out: advantages, how far a token's sampling policy is from the
old one (``importance_S`` says it), and an entropy bonus.

Dimensions: S tokens of packed rows, N sequences, which are runs of tokens between two offsets.
"""

import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # the reference does without
    if TYPE_CHECKING:
        raise
    triton = None

SUMS = ("loss", "clipped", "ratio", "reference_kl")
"""Over trained tokens. ``clipped`` counts those whose ratio was bounded to effect."""

LARGEST_LOG_RATIO = 20.0
"""Differences of log-probabilities are cut here, so that no ratio is infinite."""

Estimator = Literal["k1", "k2", "k3", "k3_unbiased"]


def bounded_log_ratio(log_ratio_S: torch.Tensor) -> torch.Tensor:
    """Log-ratio clamped to +-LARGEST_LOG_RATIO, as in verl; NaN if infinite.

    Beyond the cut the gradient is zero: of a token that the two policies hold a hundred million times as likely, the
    one as the other, nothing can be learned, and its ratio would drown all other tokens'. An infinite log-probability
    is a fault, which a cut would hide; NaN tells it.
    """
    return log_ratio_S.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO) + 0 * log_ratio_S


def divergence(
    logprob_S: torch.Tensor, reference_logprob_S: torch.Tensor, estimator: Estimator, clip: float = math.inf
) -> torch.Tensor:
    """Estimate of KL(policy || reference) of each token, for tokens that the policy sampled.

    With x = log reference - log policy: k1 = -x, unbiased, of either sign; k2 = x**2 / 2, biased, and its gradient is
    the unbiased one of KL; k3 = exp(x) - 1 - x, unbiased, never negative, x cut as ``bounded_log_ratio`` cuts it. An
    infinite x is a fault: NaN.
    ``k3_unbiased`` has k3's value; what makes its gradient unbiased is the ratio that ``policy_loss`` multiplies it by.
    Each is cut at +-``clip``, with no gradient beyond.

    Source: joschu.net/blog/kl-approx.html; for the gradients arXiv 2506.09477; the cut: verl's kl_penalty (k3, at 10).
    """
    x_S = reference_logprob_S - logprob_S
    x_S = x_S + 0 * x_S  # NaN if it is infinite
    if estimator == "k1":
        return (-x_S).clamp(-clip, clip)
    if estimator == "k2":
        return (x_S.square() / 2).clamp(-clip, clip)
    cut_S = bounded_log_ratio(x_S)
    return (cut_S.exp() - 1 - cut_S).clamp(-clip, clip)


def sum_of_sequence(values_S: torch.Tensor, offsets_N: torch.Tensor) -> torch.Tensor:
    """Sums over sequences, repeated for each of their tokens [S]. ``offsets_N`` [N + 1], from 0 to S."""
    sequence_S = torch.repeat_interleave(offsets_N.diff(), output_size=len(values_S))
    return values_S.new_zeros(len(offsets_N) - 1).index_add(0, sequence_S, values_S)[sequence_S]


@dataclass(frozen=True)
class Objective:
    """Settings of the policy loss.

    With r the ratio, A the advantage, c(r) = clamp(r, 1 - clip_low, 1 + clip_high), p the probability:

    * ``clip``: -min(r A, c(r) A); PPO, arXiv 1707.06347, equation 7; bounds apart: DAPO, 2503.14476, equation 10;
    * with ``dual_clip`` d, where A < 0: -max(min(r A, c(r) A), d A); 1912.09729, section on dual-clip PPO;
    * ``cispo``: -stop_gradient(c(r)) A log p; 2506.13585, equation 4.
    """

    kind: Literal["clip", "cispo"] = "clip"
    """``cispo``: the clipped ratio is a constant factor of the log-probability, so that no token loses its gradient."""
    level: Literal["token", "sequence", "sequence_token"] = "token"
    """Of the ratio. ``sequence``: s, the geometric mean of the sequence's trained tokens' (GSPO, 2507.18071, equation
    7); ``sequence_token``: stop_gradient(s) p / stop_gradient(p), a ratio of the value s at each token, whose gradient
    is that token's alone (GSPO-token, equation 14)."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    """At negative advantages the gain is no less than this (> 1) times the advantage; with ``clip`` only."""
    kl_coefficient: float = 0.0
    """Of the divergence from the reference policy, which is added at each token."""
    kl_estimator: Estimator = "k3"
    """``k3_unbiased``: k3 times the token's own ratio p / p_old and its importance, gradient through both factors
    (DeepSeek-V3.2, arXiv 2512.02556, section 3.1)."""
    kl_clip: float = math.inf
    """Each token's divergence counts for no more than this, of either sign."""

    def __post_init__(self) -> None:
        if self.dual_clip is not None and (self.dual_clip <= 1 or self.kind != "clip"):
            raise ValueError(f"dual_clip = {self.dual_clip} must be more than 1, and needs kind = 'clip'")


def policy_loss(
    logprob_S: torch.Tensor,
    old_logprob_S: torch.Tensor,
    advantage_S: torch.Tensor,
    weight_S: torch.Tensor,
    objective: Objective,
    *,
    importance_S: torch.Tensor | None = None,
    reference_logprob_S: torch.Tensor | None = None,
    offsets_N: torch.Tensor | None = None,
    implementation: Literal["reference", "triton"] = "reference",
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss, to be minimized: sum of weight * (importance * surrogate + kl_coefficient * divergence); and SUMS.

    ``old_logprob_S`` is what ratios are taken to; ``importance_S`` a constant factor of each token's surrogate, 1 if it
    is left out. ``offsets_N`` [N + 1], from 0 to S, is needed for ratios of sequences alone. The gradient flows to
    ``logprob_S``.

    Numerics: fp32 (the reference: the inputs' dtype); sums are added up by blocks as a tree, error about 2**-22 of the
    sum of the magnitudes. Bounds are inclusive: at a bound the gradient flows.
    """
    if objective.kl_coefficient and reference_logprob_S is None:
        raise ValueError("kl_coefficient needs reference_logprob_S")
    if objective.level != "token" and offsets_N is None:
        raise ValueError("ratios of sequences need offsets_N")
    constants = (
        *(old_logprob_S.detach(), advantage_S.detach(), weight_S.detach()),
        *(_detached(importance_S), _detached(reference_logprob_S)),
    )
    if implementation == "reference":
        return _reference(logprob_S, *constants, offsets_N, objective)
    loss, sums_M = _TritonPolicyLoss.apply(logprob_S, *constants, offsets_N, objective)
    return loss, dict(zip(SUMS, sums_M, strict=True))


def _detached(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach()


# The reference


def _reference(
    logprob_S: torch.Tensor,
    old_S: torch.Tensor,
    advantage_S: torch.Tensor,
    weight_S: torch.Tensor,
    importance_S: torch.Tensor | None,
    reference_S: torch.Tensor | None,
    offsets_N: torch.Tensor | None,
    objective: Objective,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    counted_S = weight_S > 0
    logprob_S, old_S, advantage_S, weight_S = (
        _trained(x, counted_S) for x in (logprob_S, old_S, advantage_S, weight_S)
    )
    importance_S = torch.ones_like(old_S) if importance_S is None else _trained(importance_S, counted_S)
    ratio_S = bounded_log_ratio(_log_ratio(logprob_S, old_S, counted_S, offsets_N, objective.level)).exp()
    loss_S, clipped_S = _surrogate(ratio_S, logprob_S, advantage_S, objective)
    loss_S = loss_S * importance_S
    kl_S = torch.zeros_like(loss_S)
    if reference_S is not None:
        kl_S = divergence(logprob_S, _trained(reference_S, counted_S), objective.kl_estimator, objective.kl_clip)
        if objective.kl_estimator == "k3_unbiased":
            kl_S = kl_S * bounded_log_ratio(logprob_S - old_S).exp() * importance_S
        loss_S = loss_S + objective.kl_coefficient * kl_S
    loss = (loss_S * weight_S).sum()
    sums = (loss, (clipped_S & counted_S).sum(), (ratio_S * counted_S).sum(), kl_S.sum())
    return loss, {name: value.detach().to(loss.dtype) for name, value in zip(SUMS, sums, strict=True)}


def _trained(values_S: torch.Tensor, counted_S: torch.Tensor) -> torch.Tensor:
    return torch.where(counted_S, values_S, 0)


def _log_ratio(
    logprob_S: torch.Tensor, old_S: torch.Tensor, counted_S: torch.Tensor, offsets_N: torch.Tensor | None, level: str
) -> torch.Tensor:
    if level == "token":
        return logprob_S - old_S
    assert offsets_N is not None
    count_S = sum_of_sequence(counted_S.to(old_S.dtype), offsets_N).clamp(min=1)
    mean_S = sum_of_sequence(logprob_S - old_S, offsets_N) / count_S
    if level == "sequence":
        return mean_S
    return mean_S.detach() + logprob_S - logprob_S.detach()


def _surrogate(
    ratio_S: torch.Tensor, logprob_S: torch.Tensor, advantage_S: torch.Tensor, objective: Objective
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of each token, and whether its ratio was clipped to effect."""
    bounded_S = ratio_S.detach().clamp(1 - objective.clip_low, 1 + objective.clip_high)
    if objective.kind == "cispo":
        return -bounded_S * advantage_S * logprob_S, bounded_S != ratio_S
    gain_S = ratio_S * advantage_S
    clipped_S = bounded_S * advantage_S < gain_S
    if objective.dual_clip is not None:
        floored_S = (advantage_S < 0) & (ratio_S > objective.dual_clip)
        bounded_S, clipped_S = torch.where(floored_S, objective.dual_clip, bounded_S), clipped_S | floored_S
    return -torch.where(clipped_S, bounded_S * advantage_S, gain_S), clipped_S


# Triton


def _contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous()


class _TritonPolicyLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logprob_S: torch.Tensor,
        old_S: torch.Tensor,
        advantage_S: torch.Tensor,
        weight_S: torch.Tensor,
        importance_S: torch.Tensor | None,
        reference_S: torch.Tensor | None,
        offsets_N: torch.Tensor | None,
        objective: Objective,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradient is known in the forward's pass; the backward scales it."""
        num_tokens = len(logprob_S)
        inputs = (
            *(logprob_S.contiguous(), old_S.contiguous(), advantage_S.contiguous(), weight_S.contiguous()),
            *(_contiguous(importance_S), _contiguous(reference_S)),
        )
        grad_S = torch.empty_like(logprob_S)
        sequences_N = None if objective.level == "token" else offsets_N
        num_programs = triton.cdiv(num_tokens, _BLOCK) if sequences_N is None else len(sequences_N) - 1
        parts_PM = torch.zeros((num_programs, len(SUMS)), dtype=torch.float32, device=logprob_S.device)
        settings: dict[str, Any] = dict(
            CISPO=objective.kind == "cispo",
            HAS_DUAL=objective.dual_clip is not None,
            ESTIMATOR=objective.kl_estimator,
            BLOCK=_BLOCK,
            num_warps=4,
        )
        bounds = (
            *(1 - objective.clip_low, 1 + objective.clip_high, objective.dual_clip or 0.0),
            *(objective.kl_coefficient, objective.kl_clip),
        )
        if num_programs and sequences_N is not None:
            settings["SHARED"] = objective.level == "sequence"
            _sequence_kernel[(num_programs,)](*inputs, sequences_N, grad_S, parts_PM, *bounds, **settings)
        elif num_programs:
            _token_kernel[(num_programs,)](*inputs, grad_S, parts_PM, num_tokens, *bounds, **settings)
        ctx.save_for_backward(grad_S)
        sums_M = parts_PM.sum(0)
        ctx.mark_non_differentiable(sums_M)
        return sums_M[0].clone(), sums_M

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor, _: torch.Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]  (torch's annotation wants *args)
        (grad_S,) = ctx.saved_tensors
        return grad_S * grad_loss, *[None] * 7


_BLOCK = 64 if os.environ.get("TRITON_INTERPRET") == "1" else 1024

if TYPE_CHECKING or triton is not None:
    _CUT = tl.constexpr(LARGEST_LOG_RATIO)
    _NUM_SUMS = tl.constexpr(len(SUMS))

    @triton.jit
    def _load(at, is_token_S):
        return tl.load(at, mask=is_token_S, other=0.0).to(tl.float32)

    @triton.jit
    def _load_trained(at, is_token_S, counted_S):
        """Zero for tokens that are not trained; they are read all the same, so that reads are wide."""
        return tl.where(counted_S, _load(at, is_token_S), 0.0)

    @triton.jit
    def _cut(value_S):
        """bounded_log_ratio."""
        return tl.minimum(tl.maximum(value_S, -_CUT), _CUT) + value_S * 0.0

    @triton.jit
    def _clamp(value_S, lower, upper):
        return tl.clamp(value_S, lower, upper, propagate_nan=tl.PropagateNan.ALL)

    @triton.jit
    def _log_ratio_of(logprob, old, weight, tokens_S, is_token_S):
        """And whether the token is trained."""
        counted_S = _load(weight + tokens_S, is_token_S) > 0
        logprob_S = _load_trained(logprob + tokens_S, is_token_S, counted_S)
        return logprob_S - _load_trained(old + tokens_S, is_token_S, counted_S), counted_S

    @triton.jit
    def _terms(  # noqa: PLR0913  (a kernel's arguments are pointers and numbers)
        logprob,
        old,
        advantage,
        weight,
        importance,
        reference,
        tokens_S,
        is_token_S,
        counted_S,
        log_ratio_S,
        lower,
        upper,
        dual,
        kl_coefficient,
        kl_clip,
        CISPO: tl.constexpr,
        HAS_DUAL: tl.constexpr,
        ESTIMATOR: tl.constexpr,
    ):
        """d loss / d log ratio, what else of d loss / d logprob, and each token's part of SUMS."""
        logprob_S = _load_trained(logprob + tokens_S, is_token_S, counted_S)
        old_S = _load_trained(old + tokens_S, is_token_S, counted_S)
        advantage_S = _load_trained(advantage + tokens_S, is_token_S, counted_S)
        weight_S = _load_trained(weight + tokens_S, is_token_S, counted_S)
        ratio_S = tl.exp(_cut(log_ratio_S))
        bounded_S = _clamp(ratio_S, lower, upper)
        zero_S = ratio_S * 0.0
        if CISPO:
            clipped_S = bounded_S != ratio_S
            loss_S = -bounded_S * advantage_S * logprob_S
            by_ratio_S, by_logprob_S = zero_S, -bounded_S * advantage_S
        else:
            clipped_S = bounded_S * advantage_S < ratio_S * advantage_S
            if HAS_DUAL:
                floored_S = (advantage_S < 0) & (ratio_S > dual)
                bounded_S, clipped_S = tl.where(floored_S, dual, bounded_S), clipped_S | floored_S
            loss_S = -tl.where(clipped_S, bounded_S, ratio_S) * advantage_S
            by_ratio_S = tl.where(clipped_S | (tl.abs(log_ratio_S) > _CUT), 0.0, loss_S)
            by_logprob_S = zero_S
        importance_S = zero_S + 1.0
        if importance is not None:
            importance_S = _load_trained(importance + tokens_S, is_token_S, counted_S)
            loss_S *= importance_S
            by_ratio_S *= importance_S
            by_logprob_S *= importance_S
        kl_S = zero_S
        if reference is not None:
            toward_S = _load_trained(reference + tokens_S, is_token_S, counted_S) - logprob_S
            toward_S += toward_S * 0.0
            if ESTIMATOR == "k1":
                kl_S, slope_S = -toward_S, zero_S + 1.0
            elif ESTIMATOR == "k2":
                kl_S, slope_S = toward_S * toward_S / 2, -toward_S
            else:
                cut_S = _cut(toward_S)
                kl_S = tl.exp(cut_S) - 1 - cut_S
                slope_S = tl.where(cut_S == toward_S, 1 - tl.exp(cut_S), 0.0)
            slope_S = tl.where(tl.abs(kl_S) > kl_clip, 0.0, slope_S)
            kl_S = _clamp(kl_S, -kl_clip, kl_clip)
            if ESTIMATOR == "k3_unbiased":
                own_log_ratio_S = logprob_S - old_S
                own_S = tl.exp(_cut(own_log_ratio_S)) * importance_S
                slope_S = own_S * (slope_S + tl.where(tl.abs(own_log_ratio_S) > _CUT, 0.0, kl_S))
                kl_S *= own_S
            loss_S += kl_coefficient * kl_S
            by_logprob_S += kl_coefficient * slope_S
        one_S = counted_S.to(tl.float32)
        lanes_M = tl.arange(0, _NUM_SUMS)
        sums_M = tl.where(lanes_M == 0, tl.sum(loss_S * weight_S, 0), 0.0)
        sums_M += tl.where(lanes_M == 1, tl.sum(tl.where(clipped_S, one_S, 0.0), 0), 0.0)
        sums_M += tl.where(lanes_M == 2, tl.sum(ratio_S * one_S, 0), 0.0)
        sums_M += tl.where(lanes_M == 3, tl.sum(kl_S * one_S, 0), 0.0)
        return by_ratio_S * weight_S, by_logprob_S * weight_S, sums_M

    @triton.jit
    def _token_kernel(  # noqa: PLR0913  (a kernel's arguments are pointers and numbers)
        logprob,
        old,
        advantage,
        weight,
        importance,
        reference,
        grad,
        parts,
        S,
        lower,
        upper,
        dual,
        kl_coefficient,
        kl_clip,
        CISPO: tl.constexpr,
        HAS_DUAL: tl.constexpr,
        ESTIMATOR: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """A block of tokens, each with its own ratio."""
        program = tl.program_id(0)
        tokens_S = program.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        is_token_S = tokens_S < S
        log_ratio_S, counted_S = _log_ratio_of(logprob, old, weight, tokens_S, is_token_S)
        by_ratio_S, by_logprob_S, sums_M = _terms(
            logprob,
            old,
            advantage,
            weight,
            importance,
            reference,
            tokens_S,
            is_token_S,
            counted_S,
            log_ratio_S,
            lower,
            upper,
            dual,
            kl_coefficient,
            kl_clip,
            CISPO,
            HAS_DUAL,
            ESTIMATOR,
        )
        tl.store(grad + tokens_S, by_ratio_S + by_logprob_S, mask=is_token_S)
        lanes_M = tl.arange(0, _NUM_SUMS)
        tl.store(parts + program * _NUM_SUMS + lanes_M, sums_M)

    @triton.jit
    def _sequence_kernel(  # noqa: PLR0913  (a kernel's arguments are pointers and numbers)
        logprob,
        old,
        advantage,
        weight,
        importance,
        reference,
        offsets,
        grad,
        parts,
        lower,
        upper,
        dual,
        kl_coefficient,
        kl_clip,
        CISPO: tl.constexpr,
        HAS_DUAL: tl.constexpr,
        ESTIMATOR: tl.constexpr,
        SHARED: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """A sequence: its ratio; then losses; then, if ``SHARED``, each token's equal share of the ratio's gradient.

        What is read again comes from the cache: a sequence is small.
        """
        sequence = tl.program_id(0)
        first, last = tl.load(offsets + sequence), tl.load(offsets + sequence + 1)
        lanes_S, lanes_M = tl.arange(0, BLOCK), tl.arange(0, _NUM_SUMS)
        log_ratios_S = tl.zeros((BLOCK,), tl.float32)
        counts_S = tl.zeros((BLOCK,), tl.float32)
        for start in range(first, last, BLOCK):
            tokens_S = start + lanes_S
            log_ratio_S, counted_S = _log_ratio_of(logprob, old, weight, tokens_S, tokens_S < last)
            log_ratios_S += log_ratio_S
            counts_S += counted_S.to(tl.float32)
        count = tl.maximum(tl.sum(counts_S, 0), 1.0)
        mean = tl.sum(log_ratios_S, 0) / count
        by_ratios_S = tl.zeros((BLOCK,), tl.float32)
        sums_M = tl.zeros((_NUM_SUMS,), tl.float32)
        for start in range(first, last, BLOCK):
            tokens_S = start + lanes_S
            _, counted_S = _log_ratio_of(logprob, old, weight, tokens_S, tokens_S < last)
            by_ratio_S, by_logprob_S, more_M = _terms(
                logprob,
                old,
                advantage,
                weight,
                importance,
                reference,
                tokens_S,
                tokens_S < last,
                counted_S,
                mean + tl.zeros((BLOCK,), tl.float32),
                lower,
                upper,
                dual,
                kl_coefficient,
                kl_clip,
                CISPO,
                HAS_DUAL,
                ESTIMATOR,
            )
            by_ratios_S += by_ratio_S
            sums_M += more_M
            at_once_S = by_logprob_S if SHARED else by_logprob_S + by_ratio_S
            tl.store(grad + tokens_S, at_once_S, mask=tokens_S < last)
        if SHARED:
            share = tl.sum(by_ratios_S, 0) / count
            tl.debug_barrier()  # the stores above are read again
            for start in range(first, last, BLOCK):
                tokens_S = start + lanes_S
                _, counted_S = _log_ratio_of(logprob, old, weight, tokens_S, tokens_S < last)
                by_logprob_S = tl.load(grad + tokens_S, mask=tokens_S < last, other=0.0)
                tl.store(grad + tokens_S, by_logprob_S + tl.where(counted_S, share, 0.0), mask=tokens_S < last)
        tl.store(parts + sequence * _NUM_SUMS + lanes_M, sums_M)

"""Base class of algorithms without a critic: settings, loss, reference and sampler terms.

A new one is advantages and defaults (rloo.py shows all of it).

The loss of a row, w being weights that hold all normalization and i importance (1, unless it is asked for):

    sum_S w (i surrogate(r, A) + kl_coefficient KL) - entropy_coefficient sum_S w entropy

with surrogates (but sapo.py's) and KL as kernels/policy_loss.py has them, i as off_policy.py.

Dimensions: S trained tokens of a row.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field

from titan_rl.algorithms.arithmetic.off_policy import masked, ratio_of, rejected, truncated
from titan_rl.algorithms.arithmetic.returns import rewards_to_go
from titan_rl.algorithms.base import Algorithm, LossInputs, Needs, Refined, provided
from titan_rl.kernels.policy_loss import Estimator, Objective, divergence, policy_loss

CLIP_KEYS = ("clip_low", "clip_high", "dual_clip")


@dataclass(kw_only=True)
class PolicyGradientSettings:
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The ratio is clipped below 1 - clip_low."""
    clip_high: Annotated[float, Field(gt=0, le=1e6)] = 0.2
    """The ratio is clipped above 1 + clip_high."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Where the advantage is negative, the ratio counts for no more than this; None: no such bound."""
    kl_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Of the divergence from the reference; 0: no reference is there."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Whether it is added to each token's loss, or taken off each token's reward: the advantage of a token then has
    the (discounted) penalties from there on taken off it, with no baseline of their own."""
    kl_estimator: Estimator = "k3"
    """As kernels/policy_loss.py has them; k1 is of rewards alone, where its gradient is the right one."""
    kl_clip: Annotated[float, Field(gt=0)] | None = None
    """The divergence of a token counts for no more than this, with no gradient beyond; None: no such bound."""
    entropy_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Of the mean entropy, which the loss has taken off it."""
    decoupled: bool = False
    """Take ratios to the trainer's own policy before the step's first update (the proximal one), not to what the
    generator reported."""
    importance: Literal["none", "token", "sequence", "geometric"] = "none"
    """Weigh tokens by the proximal policy's ratio to the generator's: of the token, of the whole sample, or the
    geometric mean of the sample's. Needs ``decoupled``."""
    importance_bound: Literal["truncate", "mask"] = "truncate"
    """Weights above importance_high count as that; or those outside of the bounds as 0."""
    importance_low: Annotated[float, Field(ge=0)] = 0.0
    """Lowest weight that is not masked."""
    importance_high: Annotated[float, Field(gt=0)] = 2.0
    """Highest weight."""
    reject: Literal["none", "sequence", "geometric", "worst_token"] = "none"
    """Leave samples out of which this ratio of the trainer's policy (the proximal one, if ``decoupled``) to the
    generator's is out of bounds. What is left counts for no more than before."""
    reject_low: Annotated[float, Field(ge=0)] = 0.0
    """Lowest ratio that is not rejected."""
    reject_high: Annotated[float, Field(gt=0)] | None = None
    """Highest ratio that is not rejected; None: no bound."""
    reject_only_negative: bool = False
    """Of rejected samples, leave only tokens with a negative advantage out (with ``geometric`` and reject_low = exp(-d)
    the off-policy sequence masking of DeepSeek-V3.2, arXiv 2512.02556, section 3.1)."""

    bounds: ClassVar[tuple[str, ...]] = CLIP_KEYS  # keys without an effect where every ratio is 1

    def __post_init__(self) -> None:
        """Errors: ValueError for settings that do not go together."""
        for is_wrong, message in _WRONG:
            if is_wrong(self):
                raise ValueError(message)
        for keys, has_effect, mend in _IDLE:
            if not has_effect(self):
                self.refuse(keys, mend)

    def check_updates(self, updates_per_batch: int) -> None:
        """Check for bounds on ratios that are always 1. Errors: ValueError."""
        if self.decoupled and updates_per_batch == 1:
            why = "with decoupled = true and updates_per_batch = 1 every ratio is 1"
            self.refuse(self.bounds, f"{why} (FP8 has that for its default): raise updates_per_batch")

    def refuse(self, keys: tuple[str, ...], mend: str) -> None:
        """Check that keys without an effect have their defaults. Errors: ValueError."""
        defaults = {f.name: f.default for f in fields(self)}
        if idle := [key for key in keys if getattr(self, key) != defaults[key]]:
            raise ValueError(f"{idle[0]} has no effect: {mend}, or leave it out")


_WRONG: list[tuple[Callable[[PolicyGradientSettings], bool], str]] = [
    (
        lambda s: s.kl_in == "reward" and not s.kl_coefficient,
        "kl_in = 'reward' takes nothing off with kl_coefficient = 0: set kl_coefficient",
    ),
    (
        lambda s: s.kl_in == "reward" and s.kl_estimator == "k3_unbiased",
        "kl_estimator = 'k3_unbiased' differs from 'k3' by its gradient, which rewards have none of: take k1",
    ),
    (
        lambda s: s.kl_in == "loss" and s.kl_coefficient > 0 and s.kl_estimator == "k1",
        "kl_estimator = 'k1' in the loss has a gradient that is 0 on average: take 'k2', 'k3' or 'k3_unbiased', or set "
        "kl_in = 'reward'",
    ),
    (
        lambda s: s.importance != "none" and not s.decoupled,
        "importance is the proximal policy's ratio to the generator's: set decoupled = true",
    ),
    (
        lambda s: s.importance_bound == "truncate" and s.importance_low > 0,
        "importance_low is a bound of importance_bound = 'mask': set that, or leave importance_low out",
    ),
    (
        lambda s: s.importance_low > s.importance_high,
        "importance_low is above importance_high: every token would be masked",
    ),
    (
        lambda s: s.reject != "none" and not s.reject_low and s.reject_high is None,
        "reject needs a bound: set reject_low, reject_high or both",
    ),
    (
        lambda s: s.reject_high is not None and s.reject_low > s.reject_high,
        "reject_low is above reject_high: every sample would be left out",
    ),
]
"""Settings that do not go together, and how to mend them."""

_IDLE: list[tuple[tuple[str, ...], Callable[[PolicyGradientSettings], bool], str]] = [
    (
        ("kl_estimator", "kl_clip"),
        lambda s: s.kl_coefficient > 0,
        "kl_coefficient = 0 weighs no divergence: set that",
    ),
    (
        ("importance_bound", "importance_low", "importance_high"),
        lambda s: s.importance != "none",
        "it is of what importance names: set importance",
    ),
    (
        ("reject_low", "reject_high", "reject_only_negative"),
        lambda s: s.reject != "none",
        "it is of what reject names: set reject",
    ),
]
"""Keys that only count beside another, when they do, and what else to set."""


class PolicyGradient(Algorithm):
    """Base class of policy-gradient algorithms; subclasses define ``advantages`` and defaults."""

    Settings = PolicyGradientSettings
    kind: ClassVar[Literal["clip", "cispo"]] = "clip"

    def __init__(self, settings: PolicyGradientSettings | None = None):
        super().__init__(settings)
        s = self.settings
        self.needs = Needs(
            reference=s.kl_coefficient > 0, proximal=s.decoupled, entropy_gradient=s.entropy_coefficient > 0
        )
        self.asks_of_whole_rollouts = (
            self.level != "token" or s.importance in ("sequence", "geometric") or s.reject != "none"
        )
        self.is_token_sum = not self.asks_of_whole_rollouts and not s.entropy_coefficient
        self.is_still_without_advantage = not s.kl_coefficient and not s.entropy_coefficient
        self.objective = Objective(
            kind=self.kind,
            level=self.level,
            clip_low=s.clip_low,
            clip_high=s.clip_high,
            dual_clip=s.dual_clip,
            kl_coefficient=s.kl_coefficient if s.kl_in == "loss" else 0.0,
            kl_estimator=s.kl_estimator,
            kl_clip=self._kl_clip,
        )

    @property
    def level(self) -> Literal["token", "sequence", "sequence_token"]:
        """Level of importance ratios."""
        return "token"

    @property
    def _kl_clip(self) -> float:
        return math.inf if self.settings.kl_clip is None else self.settings.kl_clip

    @property
    def refines(self) -> bool:
        return self.settings.kl_in == "reward" or type(self).refine is not PolicyGradient.refine

    def refine(self, inputs: LossInputs) -> Refined:
        """Advantages minus the KL penalties from each token on, if these are part of the reward."""
        if self.settings.kl_in == "loss":
            return Refined(inputs.advantage_S)
        return Refined(inputs.advantage_S - self._to_go(inputs, self._penalty(inputs)))

    def _penalty(self, inputs: LossInputs) -> torch.Tensor:
        """The reward of each token has this taken off it: kl_coefficient times the divergence of who sampled it."""
        reference_S = provided(inputs.reference_logprob_S)
        kl_S = divergence(self._old_logprob(inputs), reference_S, self.settings.kl_estimator, self._kl_clip)
        return self.settings.kl_coefficient * kl_S

    def _old_logprob(self, inputs: LossInputs) -> torch.Tensor:
        """Log-probabilities under the policy that ratios are taken to."""
        return provided(inputs.proximal_logprob_S) if self.settings.decoupled else inputs.sampling_logprob_S

    def _to_go(self, inputs: LossInputs, rewards_S: torch.Tensor, discount: float = 1.0) -> torch.Tensor:
        offsets = inputs.returns_offsets
        return rewards_to_go(rewards_S, inputs.weight_S, offsets, discount, implementation=self.implementation)

    def loss(self, inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        weight_S, rejections = self._kept(inputs)
        importance_S, importances = self._importance(inputs)
        loss, metrics = self._surrogate(replace(inputs, weight_S=weight_S), importance_S)
        if self.settings.entropy_coefficient:
            entropy_S = torch.where(weight_S > 0, inputs.entropy_S, 0)
            loss = loss - self.settings.entropy_coefficient * (entropy_S * weight_S).sum()
        return loss, metrics | importances | rejections

    def _surrogate(
        self, inputs: LossInputs, importance_S: torch.Tensor | None
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Loss of surrogates and divergence, and its metrics. ``inputs``: with the weights of what is kept."""
        loss, sums = policy_loss(
            inputs.logprob_S,
            self._old_logprob(inputs),
            inputs.advantage_S,
            inputs.weight_S,
            self.objective,
            importance_S=importance_S,
            reference_logprob_S=inputs.reference_logprob_S if self.needs.reference else None,
            offsets_N=inputs.offsets_N,
            implementation=self.implementation,
        )
        metrics = {"clip_fraction": sums["clipped"], "ratio": sums["ratio"]}
        return loss, metrics | ({"reference_kl": sums["reference_kl"]} if self.needs.reference else {})

    def _kept(self, inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Weights, 0 for rejected samples; what of it is counted."""
        s = self.settings
        if s.reject == "none":
            return inputs.weight_S, {}
        logprob_S = provided(inputs.proximal_logprob_S) if s.decoupled else inputs.logprob_S
        level = "token" if s.reject == "worst_token" else s.reject
        ratio_S = ratio_of(logprob_S, inputs.sampling_logprob_S, inputs.weight_S, inputs.offsets_N, level)
        high = float("inf") if s.reject_high is None else s.reject_high
        rejected_S = rejected(ratio_S, inputs.weight_S, provided(inputs.offsets_N), s.reject_low, high)
        if s.reject_only_negative:
            rejected_S = rejected_S & (inputs.advantage_S < 0)
        weight_S = torch.where(rejected_S, 0, inputs.weight_S)
        return weight_S, {"rejected_fraction": (rejected_S & (inputs.weight_S > 0)).sum()}

    def _importance(self, inputs: LossInputs) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
        """Factors of the surrogates, if there are any; what of it is counted."""
        s = self.settings
        if not s.decoupled:
            return None, {}
        level = "token" if s.importance == "none" else s.importance
        proximal_S = provided(inputs.proximal_logprob_S)
        ratio_S = ratio_of(proximal_S, inputs.sampling_logprob_S, inputs.weight_S, inputs.offsets_N, level)
        if s.importance == "none":  # a log-probability that is not finite is told all the same
            return 1 + 0 * ratio_S, {}
        is_mask = s.importance_bound == "mask"
        low, high = s.importance_low if is_mask else 0.0, s.importance_high
        importance_S = masked(ratio_S, low, high) if is_mask else truncated(ratio_S, high)
        counted_S = inputs.weight_S > 0
        return importance_S, {
            "importance": (ratio_S * counted_S).sum(),
            "importance_bounded": (((ratio_S < low) | (ratio_S > high)) & counted_S).sum(),
        }

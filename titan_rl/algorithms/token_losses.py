"""Losses by the names of the Tinker API, for clients that compute advantages themselves.

Each is a sum over tokens, without any normalization: advantages (of ``cross_entropy`` weights) carry it. With p the
token's probability under the model, q the one that it was sampled with, r = p / q and A the advantage:

    cross_entropy         -A log p
    importance_sampling   -r A
    ppo                   -min(r A, clamp(r, low, high) A)
    cispo                 -stop_gradient(clamp(r, low, high)) A log p
    dro                   -(A log p - beta / 2 (log p - log q)^2)
    gspo                  -min(s A, clamp(s, low, high) A), s a ratio of the whole sequence's value

For ``gspo`` the value of s is the geometric mean of r over the sequence's tokens of weight 1; the gradient is that of
each token's own log p.

Source: tinker-docs.thinkingmachines.ai, "Loss functions"; PPO arXiv 1707.06347, equation 7; CISPO 2506.13585, equation
4; DRO 2405.19107, equation 4; GSPO-token 2507.18071, equations 13 and 14.

Dimensions: S tokens of a row.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch

from titan_rl.algorithms.arithmetic.off_policy import ratio_of
from titan_rl.algorithms.base import Algorithm, LossInputs
from titan_rl.data.types import Rollout
from titan_rl.kernels.policy_loss import bounded_log_ratio


class TokenLoss(Algorithm):
    """Base class: a sum of losses of tokens."""

    is_token_sum = True
    asks_of_whole_rollouts = False
    skips_zeros = True
    """Whether the loss is that of tokens whose advantage is not 0 alone."""

    def advantages(self, rollouts: list[Rollout]) -> list[float]:
        """Errors: NotImplementedError, since clients compute them."""
        raise NotImplementedError("advantages are the client's")

    @abstractmethod
    def of_tokens(self, inputs: LossInputs) -> torch.Tensor:
        """Loss of each token [S], unweighted."""

    def loss(self, inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss_S = torch.where(inputs.weight_S > 0, self.of_tokens(inputs), 0)
        return (loss_S * inputs.weight_S).sum(), {}


def _ratio(inputs: LossInputs) -> torch.Tensor:
    return bounded_log_ratio(inputs.logprob_S - inputs.sampling_logprob_S).exp()


class CrossEntropy(TokenLoss):
    def of_tokens(self, inputs: LossInputs) -> torch.Tensor:
        return -inputs.advantage_S * inputs.logprob_S


class ImportanceSampling(TokenLoss):
    def of_tokens(self, inputs: LossInputs) -> torch.Tensor:
        return -_ratio(inputs) * inputs.advantage_S


@dataclass(kw_only=True)
class ClipThresholds:
    """Bounds of the ratio."""

    clip_low_threshold: float = 0.8
    clip_high_threshold: float = 1.2

    def __post_init__(self) -> None:
        if not 0 <= self.clip_low_threshold <= self.clip_high_threshold:
            raise ValueError(
                f"clip_low_threshold = {self.clip_low_threshold:g} and clip_high_threshold = "
                f"{self.clip_high_threshold:g}: give 0 <= low <= high"
            )


class ClippedLoss(TokenLoss):
    """Base class of losses with a clipped ratio."""

    Settings = ClipThresholds

    def _clipped(self, ratio_S: torch.Tensor) -> torch.Tensor:
        return ratio_S.clamp(self.settings.clip_low_threshold, self.settings.clip_high_threshold)


class PPOClip(ClippedLoss):
    def of_tokens(self, inputs: LossInputs) -> torch.Tensor:
        ratio_S = _ratio(inputs)
        return -torch.minimum(ratio_S * inputs.advantage_S, self._clipped(ratio_S) * inputs.advantage_S)


class CISPOClip(ClippedLoss):
    def of_tokens(self, inputs: LossInputs) -> torch.Tensor:
        return -self._clipped(_ratio(inputs)).detach() * inputs.advantage_S * inputs.logprob_S


@dataclass(kw_only=True)
class QuadraticPenalty:
    """Weight of the squared log-ratio."""

    beta: float = 0.05


class DRO(TokenLoss):
    Settings = QuadraticPenalty
    is_still_without_advantage = False
    skips_zeros = False

    def of_tokens(self, inputs: LossInputs) -> torch.Tensor:
        squared_S = (inputs.logprob_S - inputs.sampling_logprob_S).square()
        return -(inputs.advantage_S * inputs.logprob_S - self.settings.beta / 2 * squared_S)


class GSPOToken(ClippedLoss):
    is_token_sum = False
    asks_of_whole_rollouts = True
    skips_zeros = False

    def of_tokens(self, inputs: LossInputs) -> torch.Tensor:
        log_ratios = inputs.logprob_S, inputs.sampling_logprob_S, inputs.weight_S, inputs.offsets_N
        sequence_S = ratio_of(*log_ratios, "geometric")
        ratio_S = sequence_S * (inputs.logprob_S - inputs.logprob_S.detach()).exp()
        return -torch.minimum(ratio_S * inputs.advantage_S, self._clipped(ratio_S) * inputs.advantage_S)


TOKEN_LOSSES: dict[str, type[TokenLoss]] = {
    "cross_entropy": CrossEntropy,
    "importance_sampling": ImportanceSampling,
    "ppo": PPOClip,
    "cispo": CISPOClip,
    "dro": DRO,
    "gspo": GSPOToken,
}


def make_token_loss(name: str, settings: Mapping[str, float]) -> TokenLoss:
    """Loss of a name with settings. Errors: ValueError for an unknown name or setting."""
    if name not in TOKEN_LOSSES:
        raise ValueError(f"loss_fn {name!r} is unknown here: take one of {', '.join(TOKEN_LOSSES)}")
    cls = TOKEN_LOSSES[name]
    known = [field.name for field in fields(cls.Settings)]
    if unknown := sorted(set(settings) - set(known)):
        raise ValueError(f"loss_fn {name!r} has no setting {unknown[0]!r}: it has {', '.join(known) or 'none'}")
    return cls(cls.Settings(**settings))

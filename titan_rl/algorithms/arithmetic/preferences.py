"""Losses of offline algorithms as pure functions: likelihood, pairs (DPO and its kin), labels (KTO), rewards
(Bradley-Terry). Those of policy gradients are kernels/policy_loss.py.

A row holds whole samples, and of a pair both, the chosen one first; so a loss is a weighted sum over the pairs or
samples of a row, and how rows are packed, split and spread changes nothing. What a sample weighs is the sum of its
tokens' weights (packing.token_weights, ``sequence``), and what a pair weighs twice that of its lighter half: one whose
tokens are all masked takes its pair with it. Tokens of weight 0 count for nothing, whatever they hold. A
log-probability that counts and is not finite makes the loss NaN, so that the sample is named and not learned from.

Dimensions: S trained tokens of a row, N samples, P pairs.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from titan_rl.algorithms.base import LossInputs, provided

_CERTAIN = -1e-6
"""The largest mean log-probability whose odds are formed: those of a certain answer are infinite."""


# samples


def members(weight_S: torch.Tensor, offsets_N: torch.Tensor) -> torch.Tensor:
    """Mask of trained tokens by sample, bool [N, S]."""
    place_S = torch.arange(len(weight_S), device=weight_S.device)
    begins, ends = offsets_N[:-1, None], offsets_N[1:, None]
    return (place_S >= begins) & (place_S < ends) & (weight_S > 0)


def sums(values_S: torch.Tensor, member_NS: torch.Tensor) -> torch.Tensor:
    """Sums over each sample's tokens, [N]; NaN if not finite."""
    sums_N = torch.where(member_NS, values_S, 0.0).sum(-1)
    return torch.where(sums_N.isfinite(), sums_N, torch.nan)


def last_values(values_S: torch.Tensor, member_NS: torch.Tensor) -> torch.Tensor:
    """Values at each sample's last trained token, [N]; 0 without one, NaN if not finite."""
    last_N = torch.where(member_NS, torch.arange(len(values_S), device=values_S.device), 0).amax(-1)
    last_values_N = torch.where(member_NS.any(-1), values_S[last_N], 0.0)
    return torch.where(last_values_N.isfinite(), last_values_N, torch.nan)


# pairs


@dataclass(frozen=True)
class Pairs:
    """Sample values by pair, [P] each; a sample without a partner is a dummy."""

    chosen_P: torch.Tensor
    rejected_P: torch.Tensor

    @staticmethod
    def of(values_N: torch.Tensor) -> "Pairs":
        whole = values_N[: len(values_N) // 2 * 2]
        return Pairs(whole[0::2], whole[1::2])

    @property
    def difference_P(self) -> torch.Tensor:
        return self.chosen_P - self.rejected_P


def pair_weights(weight_S: torch.Tensor, member_NS: torch.Tensor) -> torch.Tensor:
    """Weights of pairs, [P]."""
    weights = Pairs.of(sums(weight_S, member_NS))
    return 2 * torch.minimum(weights.chosen_P, weights.rejected_P)


def weighted(losses: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted sum; entries of weight 0 are ignored, even NaN."""
    return torch.where(weights > 0, losses * weights, 0.0).sum()


def sigmoid_loss(logits_P: torch.Tensor, label_smoothing: float = 0.0) -> torch.Tensor:
    """DPO loss -(1 - e) log s(x) - e log s(-x), for labels that are wrong with probability e.

    Source: DPO, arXiv 2305.18290, equation 7; with e: cDPO, ericmitchell.ai/cdpo.pdf, equation 3.
    """
    return -(1 - label_smoothing) * F.logsigmoid(logits_P) - label_smoothing * F.logsigmoid(-logits_P)


def robust_loss(logits_P: torch.Tensor, label_smoothing: float) -> torch.Tensor:
    """Robust DPO loss (-(1 - e) log s(x) + e log s(-x)) / (1 - 2 e).

    Its mean over labels that are wrong with probability e is the loss of right ones.

    Source: arXiv 2403.00409, equation 12.
    """
    right, wrong = F.logsigmoid(logits_P), F.logsigmoid(-logits_P)
    return (label_smoothing * wrong - (1 - label_smoothing) * right) / (1 - 2 * label_smoothing)


def ipo_loss(log_ratio_P: torch.Tensor, beta: float) -> torch.Tensor:
    """IPO loss (h - 1 / (2 beta))^2, h the log-ratio of chosen minus rejected.

    Source: arXiv 2310.12036, equation 17 (its tau is beta).
    """
    return (log_ratio_P - 1 / (2 * beta)).square()


def hinge_loss(logits_P: torch.Tensor) -> torch.Tensor:
    """Hinge loss max(0, 1 - x). Source: SLiC-HF, arXiv 2305.10425, of log-ratios as in RSO, arXiv 2309.06657."""
    return F.relu(1 - logits_P)


def log_odds(mean_logprob: torch.Tensor) -> torch.Tensor:
    """Log odds log(p / (1 - p)) of p = exp(mean log-probability of an answer's tokens).

    Source: ORPO, arXiv 2403.07691, equation 4.
    """
    bounded = mean_logprob.clamp(max=_CERTAIN)
    return bounded - torch.log(-torch.expm1(bounded))


def bradley_terry_loss(rewards: Pairs, margin_P: torch.Tensor, centering: float) -> torch.Tensor:
    """Bradley-Terry loss -log s(r_chosen - r_rejected - m) + c (r_chosen + r_rejected)^2.

    Source: Llama 2, arXiv 2307.09288, equation 2; the centering: arXiv 2312.09244, section 2.2.
    """
    centre_P = rewards.chosen_P + rewards.rejected_P
    return -F.logsigmoid(rewards.difference_P - margin_P) + centering * centre_P.square()


def pair_metrics(rewards: Pairs, weights_P: torch.Tensor) -> dict[str, torch.Tensor]:
    """Reward metrics of pairs, as sums over pairs."""
    metrics = {
        "rewards/chosen": rewards.chosen_P,
        "rewards/rejected": rewards.rejected_P,
        "rewards/margins": rewards.difference_P,
        "rewards/accuracies": (rewards.difference_P > 0).to(weights_P.dtype),
        "rewards/ties": (rewards.difference_P == 0).to(weights_P.dtype),
    }
    return {name: torch.where(weights_P > 0, values_P.detach(), 0.0).sum() for name, values_P in metrics.items()}


# log-probabilities of a row's samples


@dataclass(frozen=True)
class Answers:
    """Log-probabilities of a row's answers under policy and reference."""

    logprob_N: torch.Tensor
    """Of the whole answer; or its tokens' mean."""
    reference_N: torch.Tensor
    """Zeros without a reference."""
    weights_P: torch.Tensor

    @property
    def log_ratios(self) -> Pairs:
        return Pairs.of(self.logprob_N - self.reference_N)


def answers(inputs: LossInputs, *, mean: bool = False) -> Answers:
    """Answers of a row. ``mean``: over each answer's tokens, not their sum."""
    member_NS = members(inputs.weight_S, provided(inputs.offsets_N))
    count_N = member_NS.sum(-1).clamp(min=1) if mean else 1
    logprob_N = sums(inputs.logprob_S, member_NS) / count_N
    reference_S = inputs.reference_logprob_S
    reference_N = torch.zeros_like(logprob_N) if reference_S is None else sums(reference_S, member_NS) / count_N
    return Answers(logprob_N, reference_N, pair_weights(inputs.weight_S, member_NS))


def negative_log_likelihood(logprob_S: torch.Tensor, advantage_S: torch.Tensor, weight_S: torch.Tensor) -> torch.Tensor:
    """Cross-entropy weighted by the advantage; tokens of weight 0 are ignored, even NaN."""
    counted_S = weight_S > 0
    logprob_S, advantage_S = (torch.where(counted_S, values_S, 0) for values_S in (logprob_S, advantage_S))
    return -(logprob_S * advantage_S * weight_S).sum()

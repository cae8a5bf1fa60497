"""Losses as pure functions of tensors, each a plain weighted sum over trained tokens; algorithms choose among them.

Weights carry all normalization (packing.py), so neither the row, the rank nor the microbatch that a token fell into
changes a loss. Each gives back ``(loss, metrics)`` as ``Algorithm.loss`` does (base.py).

Dimensions: S trained tokens of a row.
"""

import torch

from titan_rl.kernels.policy_loss import bounded_log_ratio


def clipped_policy_loss(
    logprob_S: torch.Tensor,
    behavior_logprob_S: torch.Tensor,
    advantage_S: torch.Tensor,
    weight_S: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """PPO's clipped surrogate with separate bounds (DAPO's "clip higher"); the ratio is to the behavior policy's.

    Where the policies differ by more than e**20 the ratio is e**20 or e**-20, and has no gradient; where one of the
    log-probabilities is not finite, the loss is NaN (kernels/policy_loss.py says why).

    Source: arXiv 1707.06347, equation 7; arXiv 2503.14476, equation 10.
    """
    ratio_S = bounded_log_ratio(logprob_S - behavior_logprob_S).exp()
    clipped_S = ratio_S.clamp(1 - clip_low, 1 + clip_high)
    gain_S = torch.minimum(ratio_S * advantage_S, clipped_S * advantage_S)
    is_clipped_S = clipped_S.detach() * advantage_S < ratio_S.detach() * advantage_S
    return -(gain_S * weight_S).sum(), {"clip_fraction": (is_clipped_S & (weight_S > 0)).sum()}


def negative_log_likelihood(logprob_S: torch.Tensor, advantage_S: torch.Tensor, weight_S: torch.Tensor) -> torch.Tensor:
    """Of what was written, weighted by the advantage."""
    return -(logprob_S * advantage_S * weight_S).sum()

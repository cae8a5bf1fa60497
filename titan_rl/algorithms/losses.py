"""Losses share one signature: ``loss(inputs, settings) -> (loss, sums)``, and sum over trained tokens.

Weights carry all normalization (packing.py), so a loss is a plain weighted sum, and neither the row, the rank nor
the microbatch that a token fell into changes it. Sums add up over rows and ranks; the learner divides.

Dimensions: S trained tokens of a row.
"""

from dataclasses import dataclass

import torch

from titan_rl.config.schema import AlgorithmConfig


@dataclass(frozen=True)
class LossInputs:
    logprob_S: torch.Tensor
    """Under the model as it is; the gradient flows through it."""
    sampling_logprob_S: torch.Tensor
    """As the generator reported it."""
    advantage_S: torch.Tensor
    weight_S: torch.Tensor


def clipped_policy_loss(inputs: LossInputs, settings: AlgorithmConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """PPO's clipped surrogate on the sampling log-probabilities, with separate bounds (DAPO's "clip higher").

    Source: arXiv 1707.06347, equation 7; arXiv 2503.14476, equation 10.
    """
    ratio_S = torch.exp(inputs.logprob_S - inputs.sampling_logprob_S)
    clipped_S = ratio_S.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    gain_S = torch.minimum(ratio_S * inputs.advantage_S, clipped_S * inputs.advantage_S)
    is_clipped_S = clipped_S.detach() * inputs.advantage_S < ratio_S.detach() * inputs.advantage_S
    return -(gain_S * inputs.weight_S).sum(), {"clipped": (is_clipped_S & (inputs.weight_S > 0)).sum()}


def negative_log_likelihood(
    inputs: LossInputs, settings: AlgorithmConfig
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Supervised loss on demonstrations, weighted by the advantage."""
    return -(inputs.logprob_S * inputs.advantage_S * inputs.weight_S).sum(), {}

"""Losses as pure functions of tensors, each a plain weighted sum over trained tokens; algorithms choose among them.

Those of policy gradients are kernels/policy_loss.py. Weights carry all normalization (packing.py), so neither the row,
the rank nor the microbatch that a token fell into changes a loss.

Dimensions: S trained tokens of a row.
"""

import torch


def negative_log_likelihood(logprob_S: torch.Tensor, advantage_S: torch.Tensor, weight_S: torch.Tensor) -> torch.Tensor:
    """Of what was written, weighted by the advantage; what weighs nothing counts for nothing, whatever it holds."""
    counted_S = weight_S > 0
    logprob_S, advantage_S = (torch.where(counted_S, values_S, 0) for values_S in (logprob_S, advantage_S))
    return -(logprob_S * advantage_S * weight_S).sum()

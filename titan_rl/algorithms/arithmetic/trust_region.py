"""Trust regions other than a clipped ratio: a soft gate, and masks by a token's divergence.

Dimensions: S trained tokens of a row.
"""

from typing import Literal

import torch


def soft_gate(ratio_S: torch.Tensor, tau_S: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gated ratios 4 / tau sigmoid(tau (r - 1)) [S], and their slopes in r, which are 1 at r = 1.

    The gradient flows to ``ratio_S``; the slopes 4 sigmoid (1 - sigmoid) have none.

    Source: SAPO, arXiv 2511.20347, equation 6.
    """
    sigmoid_S = torch.sigmoid(tau_S * (ratio_S - 1))
    held_S = sigmoid_S.detach()
    return 4 / tau_S * sigmoid_S, 4 * held_S * (1 - held_S)


def binary_divergence(
    logprob_S: torch.Tensor, sampling_logprob_S: torch.Tensor, kind: Literal["tv", "kl"]
) -> torch.Tensor:
    """Divergence [S] of sampler and policy over two outcomes: the sampled token, and any other.

    With q the sampler's probability of the token and p the policy's: total variation |q - p|, or
    KL(q || p) = q log(q / p) + (1 - q) log((1 - q) / (1 - p)). Both are bounds from below of the divergence over the
    vocabulary. A log-probability above 0 is rounding, and counts as 0; what is left for other tokens is taken to be no
    less than a rounding error. No gradient flows; NaN where a log-probability is NaN.

    Source: DPPO, arXiv 2602.04879, equations 13 and 14.
    """
    logprob_S, sampling_logprob_S = logprob_S.detach().clamp(max=0), sampling_logprob_S.clamp(max=0)
    if kind == "tv":
        return (logprob_S.exp() - sampling_logprob_S.exp()).abs()
    rest_S, sampling_rest_S = _rest(logprob_S), _rest(sampling_logprob_S)
    token_S = sampling_logprob_S.exp() * (sampling_logprob_S - logprob_S)
    return token_S + sampling_rest_S * (sampling_rest_S.log() - rest_S.log())


def _rest(logprob_S: torch.Tensor) -> torch.Tensor:
    return (-torch.expm1(logprob_S)).clamp(min=torch.finfo(logprob_S.dtype).eps)


def moves_away(logprob_S: torch.Tensor, sampling_logprob_S: torch.Tensor, advantage_S: torch.Tensor) -> torch.Tensor:
    """Tokens whose update takes the ratio to the sampler further from 1; bool [S].

    Source: DPPO, arXiv 2602.04879, equation 12.
    """
    difference_S = logprob_S.detach() - sampling_logprob_S
    return ((advantage_S > 0) & (difference_S > 0)) | ((advantage_S < 0) & (difference_S < 0))

"""Off-policy corrections: ratios, importance weights, rejection of samples.

A token's ratio is that of its probability under the trainer's policy (the proximal one, where it is recomputed) to that
under the generator as it was when it sampled the token: other weights, in an asynchronous run, and other arithmetic.
All are constants: no gradient flows. A log-ratio is cut at +-20 after it was summed up or averaged, as verl cuts it.
What is infinite becomes NaN, which no bound hides.

Dimensions: S trained tokens of a row, N samples, each with all its branches.
"""

from typing import Literal

import torch

from titan_rl.kernels.policy_loss import bounded_log_ratio, sum_of_sequence

Level = Literal["token", "sequence", "geometric"]


def ratio_of(
    logprob_S: torch.Tensor,
    sampling_logprob_S: torch.Tensor,
    weight_S: torch.Tensor,
    offsets_N: torch.Tensor | None,
    level: Level,
) -> torch.Tensor:
    """Importance ratio exp(x) [S] at a level.

    x is for ``token``: log p - log q of the token itself; ``sequence``: the sum of its sample's
    (the ratio of the whole samples' probabilities); ``geometric``: their mean. Tokens of weight 0 have no part in it,
    and the ratio 1 at the level of tokens.

    Errors: ValueError if ``offsets_N`` is wanted and not there.
    """
    counted_S = weight_S > 0
    log_ratio_S = torch.where(counted_S, logprob_S.detach() - sampling_logprob_S, 0)
    if level != "token":
        if offsets_N is None:
            raise ValueError("ratios of samples need offsets_N")
        log_ratio_S = sum_of_sequence(log_ratio_S, offsets_N)
        if level == "geometric":
            log_ratio_S = log_ratio_S / sum_of_sequence(counted_S.to(log_ratio_S.dtype), offsets_N).clamp(min=1)
    return bounded_log_ratio(log_ratio_S).exp()


def truncated(ratio_S: torch.Tensor, high: float) -> torch.Tensor:
    """Truncated importance sampling (TIS): min(w, high).

    Source: fengyao.notion.site/off-policy-rl; of tokens, and of whole sequences: verl, rollout correction; IMPALA's
    rho, arXiv 1802.01561, section 4.1.
    """
    return ratio_S.clamp(max=high)


def masked(ratio_S: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Masked importance sampling (MIS): w where low <= w <= high, else 0.

    Source: at the level of tokens with both bounds IcePop, arXiv 2510.18855; of sequences, with the upper
    bound alone, yingru.notion.site (sequence-level MIS) and TRL's ``sequence_mask``.
    """
    return ratio_S * ((ratio_S >= low) & (ratio_S <= high))


def rejected(
    ratio_S: torch.Tensor, weight_S: torch.Tensor, offsets_N: torch.Tensor, low: float, high: float
) -> torch.Tensor:
    """Rejected tokens: their sample has a trained token with a ratio outside [low, high]; bool [S].

    With ratios of tokens the worst one decides (verl's veto, prime-rl's ``sequence_mask``); with those of samples
    (product or geometric mean) all of its tokens agree: verl's rejection sampling.
    """
    outside_S = ((ratio_S < low) | (ratio_S > high)) & (weight_S > 0)
    return sum_of_sequence(outside_S.to(ratio_S.dtype), offsets_N) > 0

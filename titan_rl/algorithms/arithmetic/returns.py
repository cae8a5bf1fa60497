"""Returns of tokens from their rewards.

Dimensions: S trained tokens of a row, N samples.
"""

from typing import Literal

import torch

from titan_rl.kernels.discounted_scan import discounted_returns, last_tokens
from titan_rl.kernels.policy_loss import sum_of_sequence


def rewards_to_go(
    rewards_S: torch.Tensor,
    weight_S: torch.Tensor,
    offsets_N: torch.Tensor,
    discount: float = 1.0,
    *,
    implementation: Literal["reference", "triton"] = "reference",
) -> torch.Tensor:
    """Discounted returns [S] of each token within its sample.

    G_t = r_t + discount G_{t+1}: a reversed cumulative sum. Tokens of weight 0 have no reward. Of a sample that has a
    reward that is not finite all sums are NaN, and of no other.

    Source: REINFORCE++, arXiv 2501.03262; verl and OpenRLHF have the same, discount 1 by default.
    """
    rewards_S = torch.where(weight_S > 0, rewards_S, 0)
    is_bad_S = ~torch.isfinite(rewards_S)
    last_S = last_tokens(offsets_N, len(rewards_S))
    sums_S = discounted_returns(rewards_S.masked_fill(is_bad_S, 0), last_S, discount, implementation=implementation)
    return torch.where(sum_of_sequence(is_bad_S.to(sums_S.dtype), offsets_N) > 0, torch.nan, sums_S)

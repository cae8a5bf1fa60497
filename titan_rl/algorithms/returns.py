"""Rewards of tokens become what each token is credited with.

Dimensions: S trained tokens of a row, N samples.
"""

from typing import Literal

import torch

from titan_rl.kernels.discounted_scan import discounted_returns, last_tokens


def rewards_to_go(
    rewards_S: torch.Tensor,
    weight_S: torch.Tensor,
    offsets_N: torch.Tensor,
    discount: float = 1.0,
    *,
    implementation: Literal["reference", "triton"] = "reference",
) -> torch.Tensor:
    """The sum [S] of a sample's rewards from each token on, each times ``discount`` for every token that it is away.

    G_t = r_t + discount G_{t+1}: a reversed cumulative sum. Tokens of weight 0 have no reward.

    Source: REINFORCE++, arXiv 2501.03262; verl and OpenRLHF have the same, discount 1 by default.
    """
    rewards_S = torch.where(weight_S > 0, rewards_S, 0)
    return discounted_returns(
        rewards_S, last_tokens(offsets_N, len(rewards_S)), discount, implementation=implementation
    )

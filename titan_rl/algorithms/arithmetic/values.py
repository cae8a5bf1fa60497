"""Advantages from a critic's values, the value loss, and explained variance, as pure functions.

Dimensions: S trained tokens of a row, N samples.
"""

from typing import Literal

import torch

from titan_rl.kernels.discounted_scan import advantages_and_returns, last_tokens

VALUE_SUMS = ("clipped", "value", "return", "return_squared", "error", "error_squared")
"""What ``value_loss`` counts."""


def generalized_advantages(
    rewards_S: torch.Tensor,
    value_S: torch.Tensor,
    offsets_N: torch.Tensor,
    discount: float,
    trace: float,
    *,
    implementation: Literal["reference", "triton"] = "reference",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalized advantage estimates and returns [S]; ``value_S``: of the state before each token.

    A_t = d_t + discount trace A_{t+1} with d_t = r_t + discount V_{t+1} - V_t, and return R_t = A_t + V_t. Past a
    sample's last token all are 0, also where it ran out of tokens. With trace 1 and discount 1, R is what came after.
    V_{t+1} is of the next token that the model wrote, whatever tools wrote between, as in verl; OpenRLHF decays through
    that.

    Source: arXiv 1506.02438, equation 16; ``trace`` is its lambda. ``offsets_N``: base.LossInputs.
    """
    last_S = last_tokens(offsets_N, len(rewards_S))
    return advantages_and_returns(rewards_S, value_S, last_S, discount, trace, implementation=implementation)


def value_loss(
    value_S: torch.Tensor,
    old_value_S: torch.Tensor,
    return_S: torch.Tensor,
    weight_S: torch.Tensor,
    clip: float | None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Clipped value loss sum_S w 1/2 max((V - R)^2, (V_old + clamp(V - V_old, -clip, clip) - R)^2), and metric sums.

    ``old_value_S``: before the step's first update; ``clip``: None for the plain square. Where the clipped square is
    the larger one and V is beyond the bound, there is no gradient; where both are equal, torch gives half of each.

    Source: OpenAI baselines, ppo2/model.py (of arXiv 1707.06347); verl and TRL have the same.
    """
    counted_S = weight_S > 0
    # what counts for nothing may hold any number
    value_S, old_value_S, return_S = (torch.where(counted_S, x_S, 0) for x_S in (value_S, old_value_S, return_S))
    squared_S = (value_S - return_S).square()
    is_clipped_S = torch.zeros_like(weight_S, dtype=torch.bool)
    if clip is not None:
        bounded_S = old_value_S + (value_S - old_value_S).clamp(-clip, clip)
        bounded_squared_S = (bounded_S - return_S).square()
        is_beyond_S = (value_S.detach() - old_value_S).abs() > clip
        is_clipped_S = is_beyond_S & (bounded_squared_S.detach() > squared_S.detach())
        squared_S = torch.maximum(squared_S, bounded_squared_S)
    loss = (squared_S * weight_S).sum() / 2
    return loss, _value_sums(value_S.detach()[counted_S], return_S[counted_S]) | {
        "clipped": is_clipped_S[counted_S].sum()
    }


def _value_sums(value_S: torch.Tensor, return_S: torch.Tensor) -> dict[str, torch.Tensor]:
    value_S, return_S = value_S.double(), return_S.double()
    error_S = return_S - value_S
    return {
        "value": value_S.sum(),
        "return": return_S.sum(),
        "return_squared": return_S.square().sum(),
        "error": error_S.sum(),
        "error_squared": error_S.square().sum(),
    }


def explained_variance(sums: dict[str, float], count: float) -> float:
    """Explained variance 1 - Var(R - V) / Var(R) of the summed tokens: 1 for a critic that predicts every return, 0 for
    one that knows no more than their mean, below for one that knows less. 0 where all returns are equal
    but for rounding."""

    def variance(name: str) -> float:
        return sums[f"{name}_squared"] / max(count, 1) - (sums[name] / max(count, 1)) ** 2

    spread = variance("return")
    mean_square = sums["return_squared"] / max(count, 1)  # of which the spread may be what rounding left
    return 1 - variance("error") / spread if spread > 1e-12 * mean_square else 0.0

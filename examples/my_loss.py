"""An algorithm of one's own: ``[algorithm] name = "my_loss:PenalizedPolicyGradient"`` beside a TOML in the same folder.

Dimensions: S trained tokens of a packed row.
"""

from dataclasses import dataclass
from statistics import fmean

import torch

from titan_rl.algorithms.base import Algorithm, LossInputs
from titan_rl.data.types import Rollout


@dataclass(kw_only=True)
class Settings:
    """Keys of [algorithm] that are this algorithm's own."""

    beta: float = 0.05
    """Weight of the penalty for leaving the policy that sampled."""


class PenalizedPolicyGradient(Algorithm):
    """Policy ratio times advantage, less a penalty that grows with the distance of the policies. Nothing is clipped."""

    Settings = Settings
    is_token_sum = True  # each token's term depends on that token alone

    def advantages(self, rollouts: list[Rollout]) -> list[float]:
        """Each reward less the group's mean."""
        mean = fmean(rollout.reward for rollout in rollouts)
        return [rollout.reward - mean for rollout in rollouts]

    def loss(self, inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Sums over S; the weights hold all normalization. What is beside the loss becomes a metric of its name."""
        log_ratio_S = inputs.logprob_S - inputs.sampling_logprob_S
        ratio_S = log_ratio_S.exp()
        penalty_S = ratio_S - 1 - log_ratio_S  # Schulman's k3, never below 0
        terms_S = self.settings.beta * penalty_S - ratio_S * inputs.advantage_S
        is_trained_S = inputs.weight_S > 0
        return (terms_S * inputs.weight_S).sum(), {"penalty": (penalty_S.detach() * is_trained_S).sum()}

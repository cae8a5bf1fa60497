"""Supervised fine-tuning: the objective of the steps that ``[sft]`` asks for. No reinforcement-learning algorithm: it
has no entry in registry.py."""

import torch

from titan_rl.algorithms.base import Algorithm, LossInputs
from titan_rl.algorithms.losses import negative_log_likelihood
from titan_rl.data.types import Rollout


class SFT(Algorithm):
    is_token_sum = True

    def advantages(self, rollouts: list[Rollout]) -> list[float]:
        """Every example counts alike."""
        return [1.0] * len(rollouts)

    def loss(self, inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return negative_log_likelihood(inputs.logprob_S, inputs.advantage_S, inputs.weight_S), {}

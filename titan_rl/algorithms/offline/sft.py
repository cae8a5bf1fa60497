"""Supervised fine-tuning on demonstrations, as a run of its own (``[data]``) or as ``[sft]`` steps.

On rollouts it would make every answer more likely, whatever it earned: registry.py refuses that.
"""

import torch

from titan_rl.algorithms.arithmetic.preferences import negative_log_likelihood
from titan_rl.algorithms.base import Algorithm, LossInputs
from titan_rl.data.types import Rollout


class SFT(Algorithm):
    trains_on = "demonstrations"
    is_token_sum = True
    is_still_without_advantage = False

    def advantages(self, rollouts: list[Rollout]) -> list[float]:
        """Ones: every example counts alike."""
        return [1.0] * len(rollouts)

    def loss(self, inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return negative_log_likelihood(inputs.logprob_S, inputs.advantage_S, inputs.weight_S), {}

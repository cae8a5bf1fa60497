"""A reward model learns from pairs to give the better answer the larger value: Bradley and Terry's model of choices.

The reward of an answer is the value at its last trained token: what the head says before the end is written, with the
whole answer read. ``advantage_S`` of a chosen answer is its row's margin. Source: arXiv 2307.09288, section 3.2.2.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field

from titan_rl.algorithms.arithmetic.preferences import (
    Pairs,
    bradley_terry_loss,
    last_values,
    members,
    pair_metrics,
    pair_weights,
    weighted,
)
from titan_rl.algorithms.base import LossInputs, provided
from titan_rl.algorithms.offline.base import OfflineAlgorithm


class RewardModel(OfflineAlgorithm):
    @dataclass(kw_only=True)
    class Settings:
        centering: Annotated[float, Field(ge=0, le=1e6)] = 0.0
        """Weight of the squared sum of a pair's rewards, which keeps them around 0; 0.01 is usual."""

    trains_on = "pairs"
    head = "value"

    def loss(self, inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        member_NS = members(inputs.weight_S, provided(inputs.offsets_N))
        weights_P = pair_weights(inputs.weight_S, member_NS)
        rewards = Pairs.of(last_values(provided(inputs.value_S), member_NS))
        margin_P = Pairs.of(last_values(inputs.advantage_S, member_NS)).chosen_P
        losses_P = bradley_terry_loss(rewards, margin_P, self.settings.centering)
        return weighted(losses_P, weights_P), pair_metrics(rewards, weights_P)

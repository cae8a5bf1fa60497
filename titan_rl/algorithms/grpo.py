"""GRPO, and Dr.GRPO and "clip higher" as settings of it: a group's mean reward is the baseline, the ratio is clipped.

Source: arXiv 2402.03300.
"""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from pydantic import Field

from titan_rl.algorithms.advantages import group_relative, rewards_of
from titan_rl.algorithms.base import Algorithm, LossInputs
from titan_rl.algorithms.losses import clipped_policy_loss
from titan_rl.data.types import Rollout


class GRPO(Algorithm):
    @dataclass(kw_only=True)
    class Settings:
        normalize_std: bool = True
        """Divide advantages by the group's standard deviation (over G - 1); false is Dr.GRPO's."""
        clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
        """The ratio is clipped below 1 - clip_low."""
        clip_high: Annotated[float, Field(gt=0, le=1e6)] = 0.2
        """The ratio is clipped above 1 + clip_high."""

    is_token_sum = True

    def advantages(self, rollouts: list[Rollout]) -> np.ndarray:
        return group_relative(rewards_of(rollouts), self.settings.normalize_std)

    def loss(self, inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return clipped_policy_loss(
            inputs.logprob_S,
            inputs.sampling_logprob_S,
            inputs.advantage_S,
            inputs.weight_S,
            clip_low=self.settings.clip_low,
            clip_high=self.settings.clip_high,
        )

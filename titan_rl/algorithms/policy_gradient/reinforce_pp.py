"""REINFORCE++: PPO's loss without a critic; what follows a token, normalized over the whole batch, is its advantage.

    A_t = sum_{t' >= t} discount^(t' - t) (r_t' - kl_coefficient KL_t');    then (A - mean) / deviation of all tokens

r is the sample's reward at each branch's last token, 0 before; with ``baseline`` less the group's mean first. The sum
is over the branch's tokens.

Source: arXiv 2501.03262, both forms.
"""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from titan_rl.algorithms.arithmetic.advantages import at_last_token, centred, rewards_of
from titan_rl.algorithms.base import LossInputs, Refined
from titan_rl.algorithms.policy_gradient.base import PolicyGradient, PolicyGradientSettings
from titan_rl.data.types import Rollout


class ReinforcePP(PolicyGradient):
    @dataclass(kw_only=True)
    class Settings(PolicyGradientSettings):
        baseline: bool = False
        """Take the group's mean off each reward first (REINFORCE++-baseline)."""
        discount: Annotated[float, Field(gt=0, le=1)] = 1.0
        """Of a reward, for every token that it comes later."""

    normalizes_batch = True

    def advantages(self, rollouts: list[Rollout]) -> list[np.ndarray]:
        """Token rewards, which ``refine`` sums to returns."""
        rewards_G = rewards_of(rollouts)
        return at_last_token(centred(rewards_G) if self.settings.baseline else rewards_G, rollouts)

    def refine(self, inputs: LossInputs) -> Refined:
        rewards_S = inputs.advantage_S
        if self.settings.kl_in == "reward":
            rewards_S = rewards_S - self._penalty(inputs)
        return Refined(self._to_go(inputs, rewards_S, self.settings.discount))

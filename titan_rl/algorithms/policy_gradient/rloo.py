"""RLOO: the baseline of a sample is the mean reward of its group's others.

The paper's gradient is that of whole samples, A sum_t grad log p_t: that of ``aggregation = "constant"`` but for a
factor. Off policy, the ratio is the token's, clipped, as in verl and OpenRLHF.

Source: arXiv 2402.14740.
"""

import numpy as np

from titan_rl.algorithms.arithmetic.advantages import leave_one_out, rewards_of
from titan_rl.algorithms.policy_gradient.base import PolicyGradient
from titan_rl.data.types import Rollout


class RLOO(PolicyGradient):
    def advantages(self, rollouts: list[Rollout]) -> np.ndarray:
        return leave_one_out(rewards_of(rollouts))

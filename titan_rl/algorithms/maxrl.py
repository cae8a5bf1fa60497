"""MaxRL: rewards less the group's mean, over that mean: a prompt that is seldom solved counts for more.

For rewards that are not negative, such as 1 for a right answer; a group whose mean is not positive teaches nothing.

Source: arXiv 2602.02710.
"""

import numpy as np

from titan_rl.algorithms.advantages import over_mean, rewards_of
from titan_rl.algorithms.policy_gradient import PolicyGradient
from titan_rl.data.types import Rollout


class MaxRL(PolicyGradient):
    def advantages(self, rollouts: list[Rollout]) -> np.ndarray:
        return over_mean(rewards_of(rollouts))

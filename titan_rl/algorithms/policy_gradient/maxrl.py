"""MaxRL: rewards less the group's mean, over that mean: a prompt that is seldom solved counts for more.

For rewards that are not negative, such as 1 for a right answer and 0 for a wrong one: their mean is then the share of
right answers. A negative one ends the run, and what makes rewards negative (``overlong_buffer``, a reward model) is
refused before it begins. A group that solves nothing teaches nothing.

Source: arXiv 2602.02710.
"""

import numpy as np

from titan_rl.algorithms.arithmetic.advantages import over_mean, rewards_of
from titan_rl.algorithms.policy_gradient.base import PolicyGradient
from titan_rl.data.types import Rollout


class MaxRL(PolicyGradient):
    rewards = "not_negative"

    def advantages(self, rollouts: list[Rollout]) -> np.ndarray:
        return over_mean(rewards_of(rollouts))

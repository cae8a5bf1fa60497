"""Rewards in, advantages out: pure arithmetic on one group.

Dimensions: G samples of a group.
"""

import numpy as np

from titan_rl.data.types import Rollout

_EPSILON = 1e-6


def rewards_of(rollouts: list[Rollout]) -> np.ndarray:
    """Float64 [G]."""
    return np.array([rollout.reward for rollout in rollouts], np.float64)


def group_relative(rewards_G: np.ndarray, normalize_std: bool) -> np.ndarray:
    """Each reward less the group's mean, over its standard deviation if ``normalize_std``; zeros if all are equal.

    Source: GRPO, arXiv 2402.03300, section 4.1.2; without the division Dr.GRPO, arXiv 2503.20783, section 3.2.
    """
    if (rewards_G == rewards_G[0]).all():  # the mean of equal numbers may be off by a rounding error
        return np.zeros_like(rewards_G)
    centred_G = rewards_G - rewards_G.mean()
    return centred_G / (rewards_G.std() + _EPSILON) if normalize_std else centred_G

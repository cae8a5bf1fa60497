"""Algorithms that learn from data that others wrote: what they share. They are never given rollouts."""

import numpy as np

from titan_rl.algorithms.arithmetic.advantages import rewards_of
from titan_rl.algorithms.base import Algorithm
from titan_rl.data.types import Rollout


class OfflineAlgorithm(Algorithm):
    """A sample's ``advantage_S`` is what its row says of it: of a pair the margin, on the chosen one's tokens; of a
    label what kto.py writes there."""

    is_still_without_advantage = False

    def advantages(self, rollouts: list[Rollout]) -> np.ndarray:
        return rewards_of(rollouts)

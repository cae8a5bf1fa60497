"""Base class of the offline algorithms, which have no rollouts."""

import numpy as np

from titan_rl.algorithms.arithmetic.advantages import rewards_of
from titan_rl.algorithms.base import Algorithm
from titan_rl.data.types import Rollout


class OfflineAlgorithm(Algorithm):
    """Base class of the offline algorithms.

    ``advantage_S`` holds the label: for pairs the margin, on the chosen answer's tokens; for KTO see kto.py."""

    is_still_without_advantage = False

    def advantages(self, rollouts: list[Rollout]) -> np.ndarray:
        return rewards_of(rollouts)

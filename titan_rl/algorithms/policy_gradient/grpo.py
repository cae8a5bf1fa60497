"""GRPO: the group's mean reward is the baseline; Dr.GRPO and "clip higher" are settings.

The paper's loss is the mean over samples of each one's, ``aggregation = "sequence"``, with a ``kl_coefficient`` and k3;
the default, ``"token"`` and no divergence, is DAPO's.

Source: arXiv 2402.03300, equations 3 and 4.
Dr.GRPO, 2503.20783: ``normalize_std = false``, ``aggregation = "constant"``.
"""

from dataclasses import dataclass

from titan_rl.algorithms.arithmetic.advantages import group_relative, rewards_of
from titan_rl.algorithms.base import Advantages
from titan_rl.algorithms.policy_gradient.base import PolicyGradient, PolicyGradientSettings
from titan_rl.data.types import Rollout


class GRPO(PolicyGradient):
    @dataclass(kw_only=True)
    class Settings(PolicyGradientSettings):
        normalize_std: bool = True
        """Divide advantages by the group's standard deviation (over G - 1); false is Dr.GRPO's."""

    def advantages(self, rollouts: list[Rollout]) -> Advantages:
        return group_relative(rewards_of(rollouts), self.settings.normalize_std)


class DrGRPO(GRPO):
    """Its loss is a sum over tokens divided by a constant: ``aggregation = "constant"``."""

    @dataclass(kw_only=True)
    class Settings(GRPO.Settings):
        normalize_std: bool = False

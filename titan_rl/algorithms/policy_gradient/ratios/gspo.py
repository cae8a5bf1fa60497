"""GSPO: ratio and clipping of a whole sample, the geometric mean over all its branches.

The paper's loss is the mean over samples of each one's: ``aggregation = "sequence"``. It does not cut the mean
log-ratio, which is cut at +-20 here, and at 10 from above in verl.

Source: arXiv 2507.18071, equations 5 and 7; GSPO-token: 13 and 14.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from titan_rl.algorithms.arithmetic.advantages import group_relative, rewards_of
from titan_rl.algorithms.policy_gradient.base import PolicyGradient, PolicyGradientSettings
from titan_rl.data.types import Rollout


class GSPO(PolicyGradient):
    @dataclass(kw_only=True)
    class Settings(PolicyGradientSettings):
        clip_low: Annotated[float, Field(gt=0, lt=1)] = 3e-4
        """The ratio is clipped below 1 - clip_low."""
        clip_high: Annotated[float, Field(gt=0, le=1e6)] = 4e-4
        """The ratio is clipped above 1 + clip_high."""
        normalize_std: bool = True
        """Divide advantages by the group's standard deviation (over G - 1)."""
        token_gradient: bool = False
        """GSPO-token: a token's own advantage falls to its own gradient alone; the same where a sample has but one."""

    @property
    def level(self) -> Literal["sequence", "sequence_token"]:
        return "sequence_token" if self.settings.token_gradient else "sequence"

    def advantages(self, rollouts: list[Rollout]) -> np.ndarray:
        return group_relative(rewards_of(rollouts), self.settings.normalize_std)

"""GDPO: each part of the reward is normalized within the group by itself, then their sum over the batch.

    A_k = (r_k - mean) / deviation over the group;    A = sum_k w_k A_k, then (A - mean) / deviation of all tokens

r_k is a part of the reward by its name in ``reward_part/*`` of the metrics. Two groups with rewards (0, 1) and (0, 2),
which are one to GRPO, stay apart where the second's 2 is of two parts. A part in small numbers counts for as much as
one in large numbers, so the weights of ``[task] rewards``, which scale the parts, change nothing here but by their sign
or a 0: ``reward_weights`` are the w_k. What the parts leave of a reward (``overlong_buffer``) is one more part, of
weight 1.

A part that is equal in the whole group contributes 0. With a single part, A is GRPO's, then normalized over the batch.
``[filter] no_signal`` goes by whole rewards: groups whose parts differ and whose sums do not are left out.

Over the batch, tokens are counted, as in verl's, not samples, as in TRL's.

Source: arXiv 2601.05242, equations 4 to 7.
"""

from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
from pydantic import Field

from titan_rl.algorithms.arithmetic.advantages import group_relative, reward_parts
from titan_rl.algorithms.policy_gradient.base import PolicyGradient, PolicyGradientSettings
from titan_rl.data.types import Rollout


class GDPO(PolicyGradient):
    @dataclass(kw_only=True)
    class Settings(PolicyGradientSettings):
        reward_weights: dict[str, Annotated[float, Field(ge=-1e6, le=1e6)]] = field(default_factory=dict)
        """Weight of each part of the reward, by its name, after normalization; empty: 1 for each."""

        def __post_init__(self) -> None:
            """Errors: ValueError for settings that do not go together."""
            super().__post_init__()
            if self.reward_weights and not any(self.reward_weights.values()):
                raise ValueError("each of reward_weights is 0, and so would be every advantage: raise one of them")

    normalizes_batch = True

    def advantages(self, rollouts: list[Rollout]) -> np.ndarray:
        """Weighted sums of group-relative parts, float64 [G].

        Errors: ValueError for a part without a weight, where others have one."""
        parts, weights = reward_parts(rollouts), self.settings.reward_weights
        names = [name for name in parts if name]
        if weights and (missing := [name for name in names if name not in weights]):
            unused = [name for name in weights if name not in names]
            other = f"; {unused[0]!r} is none of them" if unused else ""
            raise ValueError(
                f"reward_weights has no {missing[0]!r}, a part of the reward ({', '.join(names)}{other}): add it, with "
                f"0 to leave the part out"
            )
        return np.sum([weights.get(name, 1.0) * group_relative(part_G, True) for name, part_G in parts.items()], axis=0)

"""Turn-level credit: the tokens of each turn of a conversation have an advantage of their own.

    G_t = sum_{u >= t} discount^(u - t) r_u;    A_t = (G_t - mean) / deviation

with mean and deviation (if ``normalize_std``) of the group's samples that came to turn t.
r_u is the reward of turn u. A task gives it as a part of its score that is a list, one number for each answer; whatever
else a rollout earns is the last turn's. With one turn this is GRPO.

Source: turn-level credit assignment for GRPO, arXiv 2505.11821, with returns from each turn on.

Dimensions: G samples of a group.
"""

from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
from pydantic import Field

from titan_rl.algorithms.arithmetic.advantages import group_relative
from titan_rl.algorithms.policy_gradient.grpo import GRPO
from titan_rl.data.types import Rollout, num_model_tokens


class TurnGRPO(GRPO):
    @dataclass(kw_only=True)
    class Settings(GRPO.Settings):
        discount: Annotated[float, Field(ge=0, le=1)] = 1.0
        """Of a turn's reward, for every turn that it comes later."""

    def __init__(self, settings: Settings | None = None):
        super().__init__(settings)
        self.needs = replace(self.needs, rewards="turn")

    def advantages(self, rollouts: list[Rollout]) -> list[np.ndarray]:
        returns = [returns_of_turns(rollout, self.settings.discount) for rollout in rollouts]
        for turn in range(max(map(len, returns), default=0)):
            there = [number for number, of_turns in enumerate(returns) if turn < len(of_turns)]
            returns_G = np.array([returns[number][turn] for number in there])
            for number, advantage in zip(there, group_relative(returns_G, self.settings.normalize_std), strict=True):
                returns[number][turn] = advantage
        return [of_tokens(rollout, of_turns) for rollout, of_turns in zip(rollouts, returns, strict=True)]


def returns_of_turns(rollout: Rollout, discount: float) -> np.ndarray:
    """Discounted return of each turn, float64 [number of turns]."""
    returns = np.zeros(len(rollout.turns))
    returns[: len(rollout.turn_rewards)] = rollout.turn_rewards
    returns[-1:] += rollout.reward - sum(rollout.turn_rewards)
    for turn in range(len(returns) - 2, -1, -1):
        returns[turn] += discount * returns[turn + 1]
    if not np.isfinite(returns).all():
        raise ValueError(f"a reward of sample {rollout.sample} is not finite: give finite numbers")
    return returns


def of_tokens(rollout: Rollout, of_turns: np.ndarray) -> np.ndarray:
    """Turn values repeated for each of their tokens, [num_model_tokens]."""
    counts = [num_model_tokens(rollout.provenance[turn.start : turn.stop]) for turn in rollout.turns]
    return np.repeat(of_turns, counts)

"""Rewards in, advantages out: pure arithmetic on one group.

Dimensions: G samples of a group.
"""

import numpy as np

from titan_rl.data.numbers import all_equal
from titan_rl.data.types import Rollout, num_model_tokens

_EPSILON = 1e-6
_ROUNDING = 1e-9
"""A reward that is negative by no more is 0, and so is what parts leave of it."""


def check_rewards(rollouts: list[Rollout]) -> None:
    """Check that rewards are finite. Errors: ValueError with the sample's number."""
    for rollout in rollouts:
        if not np.isfinite(rollout.reward):
            raise ValueError(f"the reward of sample {rollout.sample} is {rollout.reward}: give a finite number")


def rewards_of(rollouts: list[Rollout]) -> np.ndarray:
    """Rewards of a group, float64 [G]. Errors: ValueError with the sample of a non-finite reward."""
    check_rewards(rollouts)
    return np.array([rollout.reward for rollout in rollouts], np.float64)


def centred(rewards_G: np.ndarray) -> np.ndarray:
    """Rewards minus the group's mean; exactly zero if all are equal but for rounding.

    Source: Dr.GRPO, arXiv 2503.20783, section 3.2.
    """
    if all_equal(rewards_G):  # their differences are rounding, and so is what their mean is off by
        return np.zeros_like(rewards_G)
    return rewards_G - rewards_G.mean()


def group_relative(rewards_G: np.ndarray, normalize_std: bool) -> np.ndarray:
    """Rewards minus the group's mean, divided by the standard deviation if ``normalize_std``; zeros if all are equal.

    The deviation is the unbiased one, over G - 1, as TRL, verl and OpenRLHF have it from ``torch.std``: the same
    rewards give the same advantages there and here, but for an epsilon of 1e-6 (verl's; TRL's is 1e-4).

    Source: GRPO, arXiv 2402.03300, section 4.1.2; without the division Dr.GRPO, arXiv 2503.20783, section 3.2.
    """
    centred_G = centred(rewards_G)
    if not normalize_std or not centred_G.any():
        return centred_G
    return centred_G / (rewards_G.std(ddof=1) + _EPSILON)


def reward_parts(rollouts: list[Rollout]) -> dict[str, np.ndarray]:
    """Parts of a group's rewards by name, float64 [G] each; they add up to the rewards.

    A rollout without a part has 0 of it. What the parts leave of a reward (a punishment for length; all of it, where
    it has no parts) has the name ``""``, and is exactly 0 where only rounding is left.

    Errors: ValueError with the sample of a reward or a part that is not finite.
    """
    rest_G = rewards_of(rollouts)
    names = dict.fromkeys(name for rollout in rollouts for name in rollout.reward_parts)
    parts = {name: np.array([rollout.reward_parts.get(name, 0.0) for rollout in rollouts]) for name in names}
    size_G = np.maximum(np.abs(rest_G), 1.0)
    for name, part_G in parts.items():
        if not np.isfinite(part_G).all():
            worst = rollouts[int(np.argmin(np.isfinite(part_G)))]
            raise ValueError(f"part {name!r} of the reward of sample {worst.sample} is not finite: give finite numbers")
        rest_G, size_G = rest_G - part_G, np.maximum(size_G, np.abs(part_G))
    return {**parts, "": np.where(np.abs(rest_G) <= _ROUNDING * size_G, 0.0, rest_G)}


def leave_one_out(rewards_G: np.ndarray) -> np.ndarray:
    """Leave-one-out advantages: G / (G - 1) (r_i - mean); zero for a sample alone.

    Source: RLOO, arXiv 2402.14740.
    """
    num_samples = len(rewards_G)
    return centred(rewards_G) * (num_samples / max(num_samples - 1, 1))


def over_mean(rewards_G: np.ndarray) -> np.ndarray:
    """MaxRL advantages (r_i - mean) / (mean + 1e-6) of non-negative rewards, at most G - 1; zeros if all are equal.

    Of rewards 0 and 1 the gradient is then that of the mean over the right answers alone, an estimate of that of
    log(share of right answers), less a baseline. Of rewards of both signs the mean may be as near to 0 as it likes.

    Errors: ValueError for a negative reward.

    Source: MaxRL, arXiv 2602.02710.
    """
    if (lowest := rewards_G.min()) < -_ROUNDING:
        raise ValueError(f"a reward is {lowest:g}, and the group's mean divides: give rewards from 0 up, or take grpo")
    centred_G = centred(rewards_G)
    if not centred_G.any():
        return centred_G
    return centred_G / (rewards_G.mean() + _EPSILON)


def at_last_token(rewards_G: np.ndarray, rollouts: list[Rollout]) -> list[np.ndarray]:
    """Token rewards: the rollout's at the last token of each branch, zeros elsewhere.

    Float64 [num_model_tokens] of each. Returns are summed up within a branch, so every branch ends in the reward.
    """
    return [_at_ends(reward, rollout) for reward, rollout in zip(rewards_G, rollouts, strict=True)]


def _at_ends(reward: float, rollout: Rollout) -> np.ndarray:
    counts = np.array([num_model_tokens(rollout.provenance[start:stop]) for start, stop in rollout.spans])
    rewards = np.zeros(counts.sum())
    rewards[counts.cumsum()[counts > 0] - 1] = reward
    return rewards

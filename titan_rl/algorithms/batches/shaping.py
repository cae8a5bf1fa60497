"""Reward shaping by an answer's length, before advantages. Pure.

What is recorded and shown stays the task's own reward: a shaped one is made anew from the recorded rollout wherever
advantages are, so a replay has the same.
"""

from dataclasses import replace

from titan_rl.config.sections.schema import Config
from titan_rl.data.types import Group, Rollout


def overlong_punishment(length: int, max_length: int, buffer: int) -> float:
    """Overlong penalty: 0 up to ``max_length - buffer`` tokens, and linearly down to -1 at ``max_length``.

    Source: soft overlong punishment, DAPO, arXiv 2503.14476, equation 13. There an answer that reaches the maximum
    was cut short or ends just there; both are -1.
    """
    expected = max_length - buffer
    if length <= expected:
        return 0.0
    return (expected - length) / buffer if length < max_length else -1.0


def punishment(rollout: Rollout, config: Config) -> float:
    """Penalty subtracted from a reward by ``[algorithm]``; the longest turn counts, one out of tokens as too long."""
    buffer, max_length = config.algorithm.overlong_buffer, config.rollout.max_new_tokens
    if not buffer:
        return 0.0
    longest = max((turn.stop - turn.start for turn in rollout.turns), default=0)
    length = max_length if rollout.status == "truncated" else longest
    return config.algorithm.overlong_penalty * overlong_punishment(length, max_length, buffer)


def shaped(rollouts: list[Rollout], config: Config) -> list[Rollout]:
    """Rollouts with shaped rewards."""
    if not config.algorithm.overlong_buffer:
        return rollouts
    return [replace(rollout, reward=rollout.reward + punishment(rollout, config)) for rollout in rollouts]


def shaping_metrics(groups: list[Group], config: Config) -> dict[str, float]:
    """Mean penalty of a step's rewards, for its record."""
    if not config.algorithm.overlong_buffer:
        return {}
    penalties = [punishment(rollout, config) for group in groups for rollout in group.rollouts]
    return {"overlong_punishment": sum(penalties) / len(penalties)}

"""Rewards changed by how an answer came about, before advantages are made of them. Pure.

What is recorded and shown stays the task's own reward: a shaped one is made anew from the recorded rollout wherever
advantages are, so a replay has the same.
"""

from dataclasses import replace

from titan_rl.config.sections.schema import Config
from titan_rl.data.types import Group, Rollout


def overlong_punishment(length: int, max_length: int, buffer: int) -> float:
    """Between 0 and -1: 0 up to ``max_length - buffer`` tokens, and linearly down to -1 at ``max_length``.

    Source: soft overlong punishment, DAPO, arXiv 2503.14476, equation 13. There an answer that reaches the maximum
    was cut short or ends just there; both are -1.
    """
    expected = max_length - buffer
    if length <= expected:
        return 0.0
    return (expected - length) / buffer if length < max_length else -1.0


def punishment(rollout: Rollout, config: Config) -> float:
    """What ``[algorithm]`` takes from a reward. Of several turns the longest counts; one that ran out of room, in
    whatever way, was too long."""
    buffer, max_length = config.algorithm.overlong_buffer, config.rollout.max_new_tokens
    if not buffer:
        return 0.0
    longest = max((turn.stop - turn.start for turn in rollout.turns), default=0)
    length = max_length if rollout.status == "truncated" else longest
    return config.algorithm.overlong_penalty * overlong_punishment(length, max_length, buffer)


def shaped(rollouts: list[Rollout], config: Config) -> list[Rollout]:
    """The same rollouts with the rewards that advantages are made of."""
    if not config.algorithm.overlong_buffer:
        return rollouts
    return [replace(rollout, reward=rollout.reward + punishment(rollout, config)) for rollout in rollouts]


def shaping_metrics(groups: list[Group], config: Config) -> dict[str, float]:
    """For a step's record: what was taken from a reward on average."""
    if not config.algorithm.overlong_buffer:
        return {}
    penalties = [punishment(rollout, config) for group in groups for rollout in group.rollouts]
    return {"overlong_punishment": sum(penalties) / len(penalties)}

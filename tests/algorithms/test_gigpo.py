"""GiGPO: turns that begin in the same state are compared, and their rollouts."""

import numpy as np
import pytest

from titan_rl.algorithms.batches.batching import checked_advantages
from titan_rl.algorithms.policy_gradient.gigpo import GiGPO, anchor
from titan_rl.algorithms.policy_gradient.grpo import GRPO
from titan_rl.data.types import Provenance, Rollout, Turn

M, T = Provenance.MODEL, Provenance.TEMPLATE


def rollout_of(sample: int, turns: list[tuple[list[int], int]], rewards: list[float], answer: int = 50) -> Rollout:
    """``turns``: what is read before each answer, and the answer's number of tokens; ``rewards``: each one's."""
    tokens, provenance, places = [], [], []
    for read, length in turns:
        tokens += [*read, *range(answer, answer + length)]
        provenance += [T] * len(read) + [M] * length
        places.append(Turn(len(tokens) - length, len(tokens), "stop"))
    return Rollout(
        prompt_id="p",
        sample=sample,
        tokens=np.array(tokens, np.int32),
        provenance=np.array(provenance, np.int8),
        logprobs=np.zeros(len(tokens), np.float32),
        versions=np.zeros(len(tokens), np.int32),
        turns=places,
        status="ok",
        reward=sum(rewards),
        turn_rewards=rewards,
    )


GROUP = [
    rollout_of(0, [([7, 7], 1), ([8], 2)], [0.0, 1.0], answer=50),
    rollout_of(1, [([7, 7], 2), ([9], 1)], [0.0, 0.0], answer=60),
    rollout_of(2, [([7, 7], 1), ([8], 1), ([8], 1)], [0.0, 0.0, 0.5], answer=70),
]
"""With discount 0.5 returns [0.5, 1], [0, 0] and [0.125, 0.25, 0.5]; [8] is seen three times, twice by one rollout."""


def test_by_hand():
    """Episodes less their mean: 0.5, -0.5, 0. First turns less 0.625 / 3; after [8] less 1.75 / 3; [9] is alone."""
    settings = GiGPO.Settings(discount=0.5, omega=2.0, normalize_std=False)
    found = checked_advantages(GiGPO(settings), GROUP)
    first, eight = 0.625 / 3, 1.75 / 3
    expected = [
        [0.5 + 2 * (0.5 - first), *[0.5 + 2 * (1 - eight)] * 2],
        [*[-0.5 + 2 * (0 - first)] * 2, -0.5],
        [2 * (0.125 - first), 2 * (0.25 - eight), 2 * (0.5 - eight)],
    ]
    for of_tokens, wanted in zip(found, expected, strict=True):
        assert of_tokens.tolist() == pytest.approx(wanted)


def test_over_deviations_of_the_episodes_and_of_each_state():
    """Of returns (0.5, 0, 0.125) and (1, 0.25, 0.5), over one less than there are."""
    found = checked_advantages(GiGPO(GiGPO.Settings(discount=0.5)), GROUP)
    assert found[1].tolist() == pytest.approx([-1 - 0.625 / 3 / 0.260208] * 2 + [-1.0], abs=1e-4)
    assert found[0][1] == pytest.approx(1 + (1 - 1.75 / 3) / 0.381881, abs=1e-4)


def test_without_omega_it_is_grpo():
    for of_tokens, number in zip(
        GiGPO(GiGPO.Settings(omega=0.0)).advantages(GROUP), GRPO().advantages(GROUP), strict=True
    ):
        assert of_tokens.tolist() == pytest.approx([number] * len(of_tokens))


def test_of_one_turn_both_levels_are_grpo():
    group = [rollout_of(n, [([7], n + 1)], [reward]) for n, reward in enumerate((1.0, 0.0, 0.5))]
    found = GiGPO(GiGPO.Settings(omega=0.5)).advantages(group)
    for of_tokens, number in zip(found, GRPO().advantages(group), strict=True):
        assert of_tokens.tolist() == pytest.approx([1.5 * number] * len(of_tokens))


def anchors(rollout: Rollout) -> list[list[int]]:
    return [np.frombuffer(anchor(rollout, turn), np.int32).tolist() for turn in rollout.turns]


def test_an_anchor_is_what_was_read_since_the_answer_before():
    assert anchors(GROUP[0]) == [[7, 7], [8]] and anchors(GROUP[2]) == [[7, 7], [8], [8]]


def test_an_anchor_ends_at_its_conversation_and_at_answers_that_it_repeats():
    """Two conversations; the second one begins with the first's prompt and answer."""
    rollout = rollout_of(0, [([7, 7], 2), ([7, 7, 50, 51, 8], 1), ([9], 1)], [0.0, 0.0, 1.0])
    rollout.branches = [0, 4]
    assert anchors(rollout) == [[7, 7], [7, 7, 50, 51, 8], [9]]
    rollout.provenance[6:8] = Provenance.REPEATED
    assert anchors(rollout) == [[7, 7], [8], [9]]

"""Rewards of turns: from the task's score, through the record, to what each token is credited with."""

import asyncio

import numpy as np
import pytest

from titan_rl.algorithms.batches.batching import checked_advantages
from titan_rl.algorithms.policy_gradient.grpo import GRPO
from titan_rl.algorithms.policy_gradient.turn_grpo import TurnGRPO, returns_of_turns
from titan_rl.config.sections.schema import TaskConfig
from titan_rl.data.types import Group, Prompt, Provenance, Rollout, Turn
from titan_rl.environments.interfaces.task import UserCodeError
from titan_rl.environments.rewards.functions import as_parts, in_turns
from titan_rl.environments.scoring.scorer import Scorer
from titan_rl.records.steps.rollouts import read_rollouts, write_rollouts

M, T = Provenance.MODEL, Provenance.TEMPLATE


def rollout_of(sample: int, lengths: list[int], reward: float, turn_rewards: list[float] = ()) -> Rollout:
    """Turns of these lengths, each behind two tokens of somebody else's."""
    provenance, turns = [], []
    for length in lengths:
        turns.append(Turn(len(provenance) + 2, len(provenance) + 2 + length, "stop"))
        provenance += [T, T, *[M] * length]
    return Rollout(
        prompt_id="train/0000001",
        sample=sample,
        tokens=np.arange(3, 3 + len(provenance), dtype=np.int32),
        provenance=np.array(provenance, np.int8),
        logprobs=np.full(len(provenance), -0.5, np.float32),
        versions=np.zeros(len(provenance), np.int32),
        turns=turns,
        status="ok",
        reward=reward,
        turn_rewards=list(turn_rewards),
    )


GROUP = [
    rollout_of(0, [2, 1, 3], 1.7, [0.2, 0.0, 0.5]),  # and 1 for the whole, which is the last turn's
    rollout_of(1, [1, 2], 0.1, [0.1, 0.0]),
    rollout_of(2, [4], 1.0),
    rollout_of(3, [1, 1, 1], 0.3, [0.3, 0.0, 0.0]),
]


@pytest.mark.parametrize(
    ("discount", "wanted"),
    [(1.0, [1.7, 1.5, 1.5]), (0.5, [0.2 + 0.25 * 1.5, 0.75, 1.5]), (0.0, [0.2, 0.0, 1.5])],
)
def test_what_is_earned_from_a_turn_on(discount, wanted):
    assert returns_of_turns(GROUP[0], discount).tolist() == pytest.approx(wanted, abs=1e-9)


def test_a_forced_token_of_a_turn_is_credited_with_nothing():
    forced = rollout_of(0, [3, 2], 1.0)
    forced.provenance[3] = Provenance.FORCED
    [advantage, _] = checked_advantages(TurnGRPO(TurnGRPO.Settings(normalize_std=False)), [forced, GROUP[1]])
    assert advantage.shape == (4,)


def test_a_turn_is_compared_with_the_same_turn_of_the_others():
    """Returns of the turns: [1.7, 1.5, 1.5], [0.1, 0], [1], [0.3, 0, 0]."""
    found = checked_advantages(TurnGRPO(TurnGRPO.Settings(normalize_std=False)), GROUP)
    first, second, third = 3.1 / 4, 0.5, 0.75
    wanted = [
        [1.7 - first] * 2 + [1.5 - second] + [1.5 - third] * 3,
        [0.1 - first] + [-second] * 2,
        [1.0 - first] * 4,
        [0.3 - first, -second, -third],
    ]
    for advantages, numbers in zip(found, wanted, strict=True):
        assert advantages.tolist() == pytest.approx(numbers, abs=1e-6)


def test_over_the_deviation_of_the_turn():
    found = checked_advantages(TurnGRPO(), GROUP)
    returns = np.array([1.7, 0.1, 1.0, 0.3])
    wanted = (returns - returns.mean()) / (returns.std(ddof=1) + 1e-6)
    assert [advantages[0] for advantages in found] == pytest.approx(wanted.tolist(), abs=1e-6)


def test_with_one_turn_it_is_grpo():
    group = [rollout_of(sample, [sample + 1], reward) for sample, reward in enumerate((1.0, 0.0, 0.5))]
    for advantages, number in zip(checked_advantages(TurnGRPO(), group), GRPO().advantages(group), strict=True):
        assert advantages.tolist() == pytest.approx([number] * len(advantages))


def test_equal_turns_have_no_advantage_though_their_sums_are_rounded():
    group = [rollout_of(0, [1, 1], 0.1 + 0.2 + 0.3, [0.1, 0.2]), rollout_of(1, [1, 1], 0.6, [0.1, 0.2])]
    assert not any(advantages.any() for advantages in checked_advantages(TurnGRPO(), group))


def test_they_are_recorded(tmp_path):
    write_rollouts(tmp_path, 1, [Group("train/0000001", GROUP)])
    [group] = read_rollouts(tmp_path, 1)
    assert [rollout.turn_rewards for rollout in group.rollouts] == [rollout.turn_rewards for rollout in GROUP]


def test_lists_are_parts_by_their_sum():
    parts = as_parts("score", {"steps": [0.25, 0.5], "style": [0.25, 0], "right": 1.0})
    assert in_turns(parts) == ({"steps": 0.75, "style": 0.25, "right": 1.0}, [0.5, 0.5])
    assert in_turns({"right": 1.0}) == ({"right": 1.0}, [])
    with pytest.raises(ValueError, match="the part 'a' is \\[\\]"):
        in_turns({"a": [], "b": 1.0})
    with pytest.raises(UserCodeError, match="^f gave \\[\\] as 'a': give a number"):
        as_parts("f", {"a": []})


TASK = """
from titan_rl.data.types import Prompt

class Asks:
    def __init__(self, task): pass
    def prompt(self, stream, seed, index): return Prompt(f"{stream}/{index:07d}", "q", "a", {})
    def messages(self, prompt): return prompt.text
    def demonstration(self, prompt): return "a"
    def reply(self, prompt, answers): return None
    def score(self, prompt, answers): return {"steps": [float(a == "a") for a in answers if a != "skip"], "end": 0.5}
"""


def test_the_scorer_brings_them_and_one_for_each_answer(tmp_path):
    (tmp_path / "turning_task.py").write_text(TASK)

    async def ask():
        scorer = Scorer(TaskConfig(name="turning_task:Asks"), [str(tmp_path)], 60.0, concurrency=2)
        try:
            return (await scorer.score(Prompt("train/0000001", "q", "a", {}), [["b", "a"], ["skip", "a"]]))[0]
        finally:
            await scorer.stop()

    two, missing = asyncio.run(ask())
    assert (two.reward, two.turn_rewards, two.parts) == (1.5, [0.0, 1.0], {"steps": 1.0, "end": 0.5})
    assert missing.status == "infra_error" and "1 rewards for 2 answers: give one for each" in missing.message

"""GDPO: parts of a reward are normalized one by one, then their sum over the batch."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from titan_rl.algorithms.arithmetic.advantages import reward_parts
from titan_rl.algorithms.batches.batching import step_batches
from titan_rl.algorithms.policy_gradient.gdpo import GDPO
from titan_rl.algorithms.policy_gradient.grpo import GRPO
from titan_rl.config.load import ConfigError, load_config
from titan_rl.config.sections.schema import AlgorithmConfig, Config, RolloutConfig, TaskConfig
from titan_rl.controller.preflight.checks import _check_reward_weights, resolve
from titan_rl.data.types import Group, Layout, Provenance, Rollout, Turn
from titan_rl.environments.registry import BUILT_IN, make_task
from titan_rl.environments.rollout.demonstrations import worked_answers
from titan_rl.environments.scoring.part_names import part_names
from titan_rl.trainer.objective.preparation import with_advantages


def rollout_of(sample: int, parts: dict[str, float], rest: float = 0.0, length: int = 1) -> Rollout:
    provenance = np.array([Provenance.TEMPLATE] + [Provenance.MODEL] * length, np.int8)
    tokens, nothing = np.arange(3, 4 + length, dtype=np.int32), np.zeros(1 + length, np.float32)
    turns = [Turn(1, 1 + length, "stop")]
    reward = sum(parts.values()) + rest
    return Rollout("p", sample, tokens, provenance, nothing, nothing, turns, "ok", reward, reward_parts=parts)


def group_of(**parts: list[float]) -> list[Rollout]:
    columns = [dict(zip(parts, values, strict=True)) for values in zip(*parts.values(), strict=True)]
    return [rollout_of(sample, each) for sample, each in enumerate(columns)]


def advantages(rollouts: list[Rollout], **weights: float) -> list[float]:
    return GDPO(GDPO.Settings(reward_weights=weights)).advantages(rollouts).tolist()


RIGHT, SHORT = [1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]
"""Means 0.25 and 0.5, deviations 0.5 and sqrt(1 / 3): normalized [1.5, -0.5, -0.5, -0.5] and +-0.866025."""


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ({}, [2.366025, 0.366025, -1.366025, -1.366025]),
        ({"right": 2.0, "short": 1.0}, [3.866025, -0.133975, -1.866025, -1.866025]),
        ({"right": 1.0, "short": -1.0}, [0.633975, -1.366025, 0.366025, 0.366025]),
        ({"right": 0.0, "short": 1.0}, [0.866025, 0.866025, -0.866025, -0.866025]),
    ],
)
def test_parts_are_normalized_one_by_one(weights, expected):
    assert advantages(group_of(right=RIGHT, short=SHORT), **weights) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("scale", [0.01, 0.3, 100.0])
def test_the_scale_of_a_part_says_nothing(scale):
    """So the weights of [task] rewards, by which parts are multiplied, do not."""
    expected = advantages(group_of(right=RIGHT, short=SHORT))
    scaled = group_of(right=RIGHT, short=[scale * value for value in SHORT])
    assert advantages(scaled) == pytest.approx(expected, rel=1e-3)


def test_what_grpo_makes_one_stays_apart():
    """The paper's figure 2: rewards 0 and 1 by one part, and 0 and 2 by two."""
    one, two = group_of(a=[0.0, 1.0], b=[0.0, 0.0]), group_of(a=[0.0, 1.0], b=[0.0, 1.0])
    half = 1 / np.sqrt(2)
    for rollouts, size in ((one, half), (two, 2 * half)):
        assert GRPO().advantages(rollouts) == pytest.approx([-half, half], abs=1e-5)
        assert advantages(rollouts) == pytest.approx([-size, size], abs=1e-5)


def test_an_equal_part_contributes_nothing():
    rewards = [1.0, 0.0, 0.5]
    for equal in (0.0, 0.1 + 0.2, -5.0):
        found = advantages(group_of(right=rewards, form=[equal] * 3))
        assert found == pytest.approx(GRPO().advantages(group_of(right=rewards)).tolist())
    assert advantages(group_of(right=[1.0] * 3, form=[0.3] * 3)) == [0.0] * 3


@pytest.mark.parametrize("parts", [{"right": 1.0}, {}])
def test_of_one_part_or_none_it_is_grpo(parts):
    rollouts = [rollout_of(n, dict.fromkeys(parts, r), rest=0.0 if parts else r) for n, r in enumerate((1.0, 0.0, 0.5))]
    assert advantages(rollouts) == pytest.approx(GRPO().advantages(rollouts).tolist())


def test_what_parts_leave_is_a_part_of_weight_1():
    """A punishment for length, which is of the reward alone; and a part that a sample does not have is 0."""
    rollouts = [rollout_of(0, {"right": 1.0}, rest=-1.0), rollout_of(1, {}), rollout_of(2, {"right": 1.0})]
    parts = {name: part.tolist() for name, part in reward_parts(rollouts).items()}
    assert parts == {"right": [1.0, 0.0, 1.0], "": [-1.0, 0.0, 0.0]}
    third = 1 / np.sqrt(3)  # [1, 0, 1] and [-1, 0, 0], each over its deviation
    assert advantages(rollouts, right=2.0) == pytest.approx([0.0, -3 * third, 3 * third], abs=1e-5)


def test_rounding_is_no_part():
    rollouts = [rollout_of(n, {"a": 1e6 + n, "b": 0.1 * n, "c": 0.2 * n}, rest=1e-10 * n) for n in range(3)]
    assert not reward_parts(rollouts)[""].any()


def test_a_part_without_a_weight_is_named_where_others_have_one():
    said = r"reward_weights has no 'short', a part of the reward \(right, short; 'shrot' is none of them\): add it"
    with pytest.raises(ValueError, match=said):
        advantages(group_of(right=RIGHT, short=SHORT), right=1.0, shrot=0.5)


CREDITED = {"name": "calculator", "options": {"credit_for_calls": 0.3}}
MIXED = {"name": "mixture", "options": {"gcd": {}, "calculator": {"options": {"credit_for_calls": 0.3}}}}
JUDGED = {"url": "http://127.0.0.1:1/v1", "model": "a"}
FUNCTION = "titan_rl.environments.rewards.unscored:zero"
OWN = {"rewards": {"task": 1.0, FUNCTION: 0.5}}


def check(task: dict[str, Any], weights: dict[str, float], **tables: Any) -> None:
    algorithm = {"name": "gdpo", "reward_weights": weights}
    _check_reward_weights(resolve(load_config(None, tables | {"task": task, "algorithm": algorithm}), on_cpu=True))


@pytest.mark.parametrize(
    ("task", "weights"),
    [
        (CREDITED, {}),
        (CREDITED, {"exact": 1.0, "calls": 0.0}),
        (MIXED, {"exact": 1.0, "calls": 0.5}),
        (OWN, {"task.exact": 1.0, FUNCTION: 1.0}),
        (OWN, {"task.exact": 1.0, f"{FUNCTION}.whatever": 1.0}),
        ({"reward": FUNCTION}, {"whatever": 1.0}),
        ({"rewards": {"judge": 1.0, "math": 1.0}, "judge": JUDGED}, {"judge": 1.0, "math.right": 1.0}),
    ],
)
def test_weights_of_what_may_be_a_part_are_taken(task, weights):
    check(task, weights)


@pytest.mark.parametrize(
    ("task", "weights", "said"),
    [
        ({}, {"right": 1.0}, r"reward_weights.right is of no part of the reward \(exact\): rename it, or leave it out"),
        (CREDITED, {"exact": 1.0, "call": 0.5}, r"call is of no part of the reward \(exact, calls\)"),
        (CREDITED, {"exact": 1.0}, r"has no 'calls', a part of the reward \(exact, calls\): add it, with 0 to leave"),
        (MIXED, {"exact": 1.0}, "has no 'calls', a part"),
        (OWN, {"exact": 1.0}, rf"exact is of no part of the reward \(task.exact, {FUNCTION}, {FUNCTION}"),
        (OWN, {FUNCTION: 1.0}, "has no 'task.exact', a part"),
    ],
)
def test_weights_of_what_is_no_part_are_refused_before_anything_starts(task, weights, said):
    with pytest.raises(ConfigError, match=said):
        check(task, weights)


def test_a_reward_model_is_the_only_part_of_its_reward(monkeypatch):
    monkeypatch.setattr("titan_rl.config.load.check_reward_model", lambda path: None)
    check({}, {"reward_model": 1.0}, reward_model={"path": "there"})
    with pytest.raises(ConfigError, match=r"exact is of no part of the reward \(reward_model\)"):
        check({}, {"exact": 1.0}, reward_model={"path": "there"})


@pytest.mark.parametrize("name", [*BUILT_IN, "gcd", "lcm"])
def test_the_parts_that_are_known_beforehand_are_those_of_a_score(name):
    task = make_task(TaskConfig(name=name))
    prompt = task.prompt("train", 1, 0)
    assert part_names(task) == dict.fromkeys(task.score(prompt, worked_answers(task, prompt)), True)


def test_an_environment_may_reward_besides(tmp_path):
    code = """
class Own:
    def prompt(self, stream, seed, index):
        from titan_rl.data.types import Prompt
        return Prompt(f"{stream}/{index:07d}", str(index), "", {})
    def messages(self, prompt): return prompt.text
    def demonstration(self, prompt): return ""
    def score(self, prompt, answers): return {}
    def environment(self, prompt): raise NotImplementedError
def own(task): return Own()
"""
    (tmp_path / "gdpo_task_of_tests.py").write_text(code)
    task = make_task(TaskConfig(name="gdpo_task_of_tests:own", rewards={"task": 1.0, "math": 1.0}), [str(tmp_path)])
    assert part_names(task) == {"task": False, "task.*": False, "math.right": True, "environment": False}


def test_a_part_that_is_no_number_is_named_by_its_sample():
    rollouts = [rollout_of(0, {"a": 1.0}), rollout_of(7, {"a": 0.5})]
    rollouts[1].reward_parts["a"] = float("nan")
    with pytest.raises(ValueError, match="part 'a' of the reward of sample 7 is not finite"):
        GDPO().advantages(rollouts)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("updates", [1, 2])
def test_then_the_sum_is_normalized_over_the_batch(updates):
    """Over all trained tokens, whatever the number of updates: a sample of three tokens counts three times."""
    groups = [
        Group("p", [rollout_of(n, {"a": a, "b": b}, length=n + 1) for n, (a, b) in enumerate(pairs)])
        for pairs in ([(1.0, 1.0), (0.0, 1.0), (0.0, 0.0)], [(1.0, 0.0), (0.0, 0.0), (0.0, 0.0)])
    ]
    config = Config(algorithm=AlgorithmConfig(updates_per_batch=updates), rollout=RolloutConfig(share_prefix=False))
    batches = [batch.rows[0] for batch in step_batches(groups, GDPO(), config, Layout(1, 64))]
    model = SimpleNamespace(columns=None, device=torch.device("cpu"))
    rows = [row for rows in with_advantages(GDPO(), batches, model, sees=True, is_counted=True) for row in rows]
    found = {}
    for row in rows:
        for (_, _, count), begin in zip(row.owners, row.offsets_N, strict=False):
            found.setdefault(count, []).append(float(row.advantage_S[begin]))
    sums = np.array([advantages(group.rollouts) for group in groups])
    tokens = np.concatenate([np.repeat(each, (1, 2, 3)) for each in sums])
    expected = (sums - tokens.mean()) / tokens.std(ddof=1)
    for count in (1, 2, 3):
        assert sorted(found[count]) == pytest.approx(sorted(expected[:, count - 1]), abs=1e-4)

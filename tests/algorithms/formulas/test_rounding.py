"""Rewards that were added up in another order are equal, wherever somebody asks whether they differ."""

import json

import numpy as np
import pytest
import torch

from titan_rl.algorithms.arithmetic.advantages import centred, group_relative, leave_one_out
from titan_rl.algorithms.batches.batching import filter_reason, step_batches
from titan_rl.algorithms.policy_gradient.grpo import GRPO
from titan_rl.algorithms.policy_gradient.turn_grpo import TurnGRPO
from titan_rl.config.sections.schema import Config, FilterConfig
from titan_rl.data.batches.packing import pack, token_weights
from titan_rl.data.numbers import all_equal, all_zero
from titan_rl.data.types import Group, Layout, Provenance, Rollout, Sample, Turn, correct
from titan_rl.diagnostics.bench.steps.matrix_share import _operations
from titan_rl.records.metrics import sampling_metrics
from titan_rl.trainer.objective.objective import rows_without_gradient

SUMS = (0.1 + 0.2 + 0.7, 0.7 + 0.2 + 0.1)
"""0.9999999999999999 and 1."""
WRITTEN = np.array([Provenance.TEMPLATE, Provenance.MODEL], np.int8)


def rollout_of(sample: int, reward: float) -> Rollout:
    versions, turns = np.array([-1, 0], np.int32), [Turn(1, 2, "stop")]
    logprobs = np.zeros(2, np.float32)
    return Rollout("p", sample, np.array([3, 4], np.int32), WRITTEN, logprobs, versions, turns, "ok", reward)


def group_of(*rewards: float) -> Group:
    return Group("p", [rollout_of(sample, reward) for sample, reward in enumerate(rewards)])


@pytest.mark.parametrize(
    ("numbers", "are_equal"),
    [
        (SUMS, True),
        ((0.1 + 0.2 - 0.3, 0.0), True),
        ((1e6 + 0.1 + 0.2, 1e6 + 0.3), True),
        ((), True),
        ((1.0,), True),
        ((1.0, 1.0 + 1e-9), False),
        ((1e-9, 0.0), False),
        ((0.0, np.nan), False),
        ((np.nan, np.nan), False),
        ((np.inf, np.inf), False),
    ],
)
def test_equal_is_equal_but_for_rounding(numbers, are_equal):
    assert SUMS[0] != SUMS[1] and all(map(correct, SUMS))
    assert all_equal(numbers) == all_equal(np.array(numbers)) == are_equal


def test_zero_is_zero_but_for_rounding():
    assert all_zero(0.0) and all_zero(np.array([1e-17, -1e-16])) and all_zero(np.zeros(0))
    assert not any(all_zero(number) for number in (1e-9, np.array([0.0, -1e-9]), np.nan, np.array([0.0, np.inf])))


def test_a_group_of_such_rewards_says_nothing():
    group, other = group_of(*SUMS), group_of(0.0, 1.0)
    assert filter_reason(group, FilterConfig(no_signal=True)) == "no_signal"
    assert sampling_metrics([group, other], 0)["groups_with_signal"] == 0.5


@pytest.mark.parametrize("advantages_of", [centred, leave_one_out, lambda r: group_relative(r, True)])
def test_such_rewards_have_no_advantage(advantages_of):
    assert not advantages_of(np.array(SUMS)).any()
    assert advantages_of(np.array([1.0, 1.0 + 1e-9])).any()


def test_the_rest_of_a_reward_is_equal_too():
    """0.3 is given for the first turn of one, and by three parts for that of the other."""
    group = group_of(0.1 + 0.2, 0.3)
    for rollout in group.rollouts:
        rollout.turn_rewards = [0.3]
    assert not any(advantage.any() for advantage in TurnGRPO().advantages(group.rollouts))


def test_rounding_in_advantages_of_ones_own_is_no_signal():
    rewards = np.array([0.1] * 7)
    own = (rewards - rewards.mean()).tolist()
    assert any(own)
    samples = [Sample(np.array([3, 4]), WRITTEN, np.zeros(2, np.float32), value, "p", n) for n, value in enumerate(own)]
    settings = dict(num_ranks=1, row_tokens=64, share_prefix=True, weigh=lambda s: token_weights(s, "token", 1))
    batch = pack([samples], **settings)
    assert not batch.has_signal
    assert rows_without_gradient(GRPO(), batch.rows[0], torch.device("cpu")) == {0}
    assert not step_batches([group_of(*SUMS)], GRPO(), Config(), Layout(1, 64))[0].has_signal


def test_a_bench_counts_no_backward_for_it(tmp_path):
    sizes = dict(hidden_size=4, num_key_value_heads=1, num_attention_heads=1, intermediate_size=8, num_hidden_layers=1)
    (tmp_path / "config.json").write_text(json.dumps(sizes | {"vocab_size": 16}))
    unequal, rounded = (_operations([group_of(*rewards)], str(tmp_path)) for rewards in ((0.0, 1.0), SUMS))
    assert unequal == 3 * rounded

"""The soft overlong punishment against DAPO's equation 13, and that it changes advantages and nothing that is shown."""

import numpy as np
import pytest

from titan_rl.algorithms.batches.batching import discard_reason, sample_outcomes, step_batches
from titan_rl.algorithms.batches.shaping import overlong_punishment, punishment, shaped, shaping_metrics
from titan_rl.algorithms.policy_gradient.grpo import GRPO
from titan_rl.algorithms.registry import ALGORITHMS
from titan_rl.config.sections.schema import AlgorithmConfig, Config, FilterConfig, RolloutConfig
from titan_rl.data.types import Group, Layout, Provenance, Rollout, Turn
from titan_rl.records.metrics import sampling_metrics


def test_equation_13():
    """L_max 20, L_cache 4: up to 16 nothing, then a quarter for each token."""
    values = {length: overlong_punishment(length, 20, 4) for length in (0, 15, 16, 17, 18, 19, 20, 21)}
    assert values == {0: 0.0, 15: 0.0, 16: 0.0, 17: -0.25, 18: -0.5, 19: -0.75, 20: -1.0, 21: -1.0}


def test_the_whole_length_may_be_the_buffer():
    assert [overlong_punishment(length, 4, 4) for length in range(5)] == [0.0, -0.25, -0.5, -0.75, -1.0]


def rollout(sample: int, *lengths: int, reward=1.0, status="ok") -> Rollout:
    """Turns of these lengths behind a prompt of two tokens, with one token of the environment between them."""
    provenance, turns = [Provenance.TEMPLATE] * 2, []
    for length in lengths:
        turns.append(Turn(len(provenance), len(provenance) + length, "stop"))
        provenance += [Provenance.MODEL] * length + [Provenance.TOOL]
    provenance = np.array(provenance[:-1], np.int8)
    count = len(provenance)
    return Rollout(
        *("a", sample, np.arange(3, 3 + count, dtype=np.int32), provenance),
        logprobs=np.zeros(count, np.float32),
        versions=np.zeros(count, np.int32),
        turns=turns,
        status=status,
        reward=reward,
    )


def config_of(buffer=4, penalty=2.0, **algorithm) -> Config:
    settings = dict(overlong_buffer=buffer, overlong_penalty=penalty) | algorithm
    return Config(algorithm=AlgorithmConfig(**settings), rollout=RolloutConfig(max_new_tokens=10))


@pytest.mark.parametrize(
    ("lengths", "status", "taken"),
    [
        ((6,), "ok", 0.0),
        ((8,), "ok", -1.0),
        ((10,), "truncated", -2.0),
        ((3, 3), "max_turns", 0.0),
        ((3,), "truncated", -2.0),  # the row ended before max_new_tokens
        ((5, 5), "ok", 0.0),  # max_new_tokens is of one turn
        ((5, 7), "ok", -0.5),
    ],
)
def test_what_an_answer_is_charged(lengths, status, taken):
    assert punishment(rollout(0, *lengths, status=status), config_of()) == taken


def test_it_is_off_unless_asked_for():
    rollouts = [rollout(0, 10, status="truncated")]
    assert shaped(rollouts, config_of(buffer=0)) is rollouts and shaping_metrics([Group("a", rollouts)], Config()) == {}


LAYOUT = Layout(num_ranks=1, row_tokens=64)


def advantages_of(rollouts, config, algorithm=None) -> list[float]:
    """Of each sample's last trained token, in order."""
    [batch] = step_batches([Group("a", rollouts)], algorithm or GRPO(), config, LAYOUT)
    found = {}
    for row in batch.rows[0]:
        place = 0
        for _, sample, count in row.owners:
            place += count
            found[sample] = float(row.advantage_S[place - 1])
    return [found[sample] for sample in sorted(found)]


def test_advantages_are_made_of_the_shaped_rewards_and_the_shown_reward_is_the_tasks():
    config = config_of()
    rollouts = [rollout(0, 2), rollout(1, 8), rollout(2, 10, status="truncated"), rollout(3, 2, reward=0.0)]
    rewards = np.array([1.0, 0.0, -1.0, 0.0])
    expected = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    assert advantages_of(rollouts, config) == pytest.approx(expected.tolist(), rel=1e-6)
    assert [each.reward for each in rollouts] == [1.0, 1.0, 1.0, 0.0]
    assert sampling_metrics([Group("a", rollouts)], 0)["reward"] == 0.75
    assert shaping_metrics([Group("a", rollouts)], config) == {"overlong_punishment": (-1.0 - 2.0) / 4}


def test_filtering_looks_at_the_tasks_own_reward():
    """A group that is all right has no signal, however long its answers are."""
    from titan_rl.algorithms.batches.batching import filter_reason

    rollouts = [rollout(0, 2), rollout(1, 8)]
    assert filter_reason(Group("a", rollouts), FilterConfig(no_signal=True)) == "no_signal"


TRUNCATED = pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("grpo", [1.5, -0.5]),
        ("dr_grpo", [0.75, -0.25]),
        ("rloo", [1.0, -1 / 3]),
        ("maxrl", [3.0, -1.0]),
        ("turn_grpo", [1.5, -0.5]),
        ("gdpo", [1.5, -0.5]),
        ("gigpo", [3.0, -1.0]),
        ("reinforce_pp", [1.0, 0.0]),
    ],
)


@TRUNCATED
def test_overlong_filtering_masks_the_loss_and_leaves_the_baseline_as_it_is(name, kept):
    """DAPO, section 3.4, masks the loss of truncated samples: of rewards 1, 0, 0, 0 the others have what they had."""
    rollouts = [rollout(0, 2), rollout(1, 2, reward=0.0)]
    rollouts += [rollout(sample, 10, reward=0.0, status="truncated") for sample in (2, 3)]
    algorithm = ALGORITHMS[name]()
    found = [advantages_of(rollouts, config_of(0, train_truncated=kept), algorithm) for kept in (True, False)]
    # of reinforce_pp rewards of the last token, which the step's whitening follows
    assert found[1] == pytest.approx(kept, rel=1e-5) and found[0][:2] == found[1]


def test_a_masked_sample_is_punished_for_its_length_all_the_same():
    config = config_of(train_truncated=False)
    rollouts = [rollout(0, 2), rollout(1, 8), rollout(2, 10, status="truncated")]
    assert advantages_of(rollouts, config) == pytest.approx([1.0, 0.0], abs=1e-5)  # of rewards 1, 0 and -1


def test_one_sample_that_is_not_cut_short_is_compared_with_those_that_are():
    config = config_of(0, train_truncated=False)
    group = Group("a", [rollout(0, 2), rollout(1, 10, reward=0.0, status="truncated")])
    assert discard_reason(group, config.algorithm) is None
    assert sample_outcomes(group, config.algorithm, 2) == [None, "truncated"]
    assert advantages_of(group.rollouts, config) == pytest.approx([2**-0.5], rel=1e-5)
    [batch] = step_batches([group], GRPO(), config, LAYOUT)
    assert batch.num_trained_tokens == 2 and sum(row.weight_S.sum() for row in batch.rows[0]) == pytest.approx(1)


def test_a_loop_of_ones_own_gives_advantages_to_what_is_trained_on():
    config = config_of(0, train_truncated=False)
    rollouts = [rollout(0, 2), rollout(1, 10, status="truncated"), rollout(2, 2)]
    rollouts[0].advantage, rollouts[2].advantage = 3.0, -4.0
    assert advantages_of(rollouts, config) == [3.0, -4.0]


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_what_is_left_out_has_no_share_in_the_weights(aggregation):
    """Neither in the sum nor in what it is divided by: the others weigh as in a batch without it."""
    config = config_of(train_truncated=False, aggregation=aggregation)
    kept = [rollout(0, 2), rollout(1, 8)]

    def weights(rollouts) -> list[float]:
        [batch] = step_batches([Group("a", rollouts)], GRPO(), config, LAYOUT)
        return sorted(weight for row in batch.rows[0] for weight in row.weight_S.tolist())

    assert weights([*kept, rollout(2, 10, status="truncated")]) == weights(kept)

"""Advantages and the clipped loss against what others publish, written out in plain numpy; and at the edges of numbers.

verl, TRL and OpenRLHF all divide by ``torch.std``, which is over G - 1; verl cuts log-ratios of tokens at 20. Other
losses, and all that is added to them: test_policy_gradient_formulas.py.
"""

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from titan_rl.algorithms.arithmetic.advantages import at_last_token, centred, group_relative, leave_one_out, over_mean
from titan_rl.algorithms.arithmetic.returns import rewards_to_go
from titan_rl.algorithms.base import LossInputs
from titan_rl.algorithms.batches.batching import step_batches
from titan_rl.algorithms.policy_gradient.grpo import GRPO
from titan_rl.algorithms.policy_gradient.reinforce_pp import ReinforcePP
from titan_rl.algorithms.registry import ALGORITHMS
from titan_rl.config.sections.schema import Config
from titan_rl.data.types import Group, Layout, Provenance, Rollout, Turn
from titan_rl.kernels.policy_loss import LARGEST_LOG_RATIO, Objective, policy_loss
from titan_rl.trainer.objective.objective import agreement_sums

LOW, HIGH = 0.2, 0.28
INF, NAN = math.inf, math.nan
GROUPS = [(1.0, 0.0), (1.0, 0.0, 0.0, 0.0), (1.0, 1.0, 0.0, 1.0), (-2.0, 0.5, 0.25, -1.0, 3.0, 0.0, 0.0, 1.0)]


def unbiased_deviation(rewards_G: np.ndarray) -> float:
    """sqrt(sum (r - mean)^2 / (G - 1))"""
    return math.sqrt(((rewards_G - rewards_G.mean()) ** 2).sum() / (len(rewards_G) - 1))


@pytest.mark.parametrize("rewards", GROUPS)
def test_advantages_are_verls_and_trls(rewards):
    """verl: (r - mean) / (std + 1e-6); TRL: (r - mean) / (std + 1e-4)."""
    rewards_G = np.array(rewards)
    found_G, deviation = group_relative(rewards_G, normalize_std=True), unbiased_deviation(rewards_G)
    np.testing.assert_allclose(found_G, (rewards_G - rewards_G.mean()) / (deviation + 1e-6), rtol=1e-12)
    np.testing.assert_allclose(found_G, (rewards_G - rewards_G.mean()) / (deviation + 1e-4), rtol=1e-3)
    assert torch.tensor(rewards).std().item() == pytest.approx(deviation, rel=1e-6)  # what they call


def test_the_advantages_of_four_samples_by_hand():
    """One right of four: the deviation is sqrt(0.75 / 3) = 0.5, not sqrt(0.75 / 4) = 0.433."""
    assert group_relative(np.array([1.0, 0.0, 0.0, 0.0]), True) == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-5)


@pytest.mark.parametrize("rewards", GROUPS)
def test_advantages_know_no_zero_and_no_unit(rewards):
    """A constant more or less changes nothing, so rewards below zero are as good as any; nor does another unit."""
    rewards_G = np.array(rewards)
    for normalize_std in (True, False):
        expected_G = group_relative(rewards_G, normalize_std)
        np.testing.assert_allclose(group_relative(rewards_G - 5, normalize_std), expected_G, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(group_relative(100 * rewards_G, True), group_relative(rewards_G, True), rtol=1e-4)


@pytest.mark.parametrize("normalize_std", [True, False])
def test_a_sample_alone_has_no_advantage(normalize_std):
    """The unbiased deviation of one number is NaN."""
    assert group_relative(np.array([1.0]), normalize_std).tolist() == [0.0]


@pytest.mark.parametrize("rewards", GROUPS)
def test_the_baseline_of_a_sample_is_the_mean_of_the_others(rewards):
    """RLOO; verl: G / (G - 1) (r - mean); TRL: r - (sum - r) / (G - 1)."""
    expected_G = [rewards[i] - np.mean(rewards[:i] + rewards[i + 1 :]) for i in range(len(rewards))]
    found_G = leave_one_out(np.array(rewards))
    np.testing.assert_allclose(found_G, expected_G, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(found_G, len(rewards) / (len(rewards) - 1) * centred(np.array(rewards)), rtol=1e-12)


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3, -2.5])
@pytest.mark.parametrize("size", [1, 2, 7])
@pytest.mark.parametrize("advantages_of", [centred, leave_one_out, over_mean])
def test_a_group_without_variance_has_no_advantage(advantages_of, size, reward):
    reward = abs(reward) if advantages_of is over_mean else reward
    assert advantages_of(np.full(size, reward)).tolist() == [0.0] * size


@pytest.mark.parametrize(
    "rewards", [(-1.0, -1.0), (0.0, -1.0), (1.0, -1.0), (1.0, -1 / 3, -2 / 3), (1.0, -0.9999), (-1e-3, 1.0)]
)
def test_rewards_below_zero_are_refused_where_the_mean_divides(rewards):
    """It may be as near to 0 as rounding has it: of (1, -1/3, -2/3) it is 3.7e-17, and advantages were a million."""
    with pytest.raises(ValueError, match=r"a reward is -.*, and the group's mean divides: give rewards from 0 up"):
        ALGORITHMS["maxrl"]().advantages([SimpleNamespace(reward=reward) for reward in rewards])


@pytest.mark.parametrize(
    "rewards", [(0.3 - 0.1 - 0.2, 1.0), (0.3 - 0.1 - 0.2, 0.0), (1e-300, 0.0, 0.0), (1.0,) + 7 * (0.0,)]
)
def test_an_advantage_over_the_mean_is_never_above_the_number_of_the_others(rewards):
    """With all of a group's reward in one sample, the mean is 1 / G of it."""
    found_G = over_mean(np.array(rewards))
    assert np.abs(found_G).max() <= len(rewards) - 1 and abs(found_G.sum()) < 1e-9


ON_ROLLOUTS = [name for name, cls in ALGORITHMS.items() if cls.trains_on == "rollouts"]


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("name", ON_ROLLOUTS)
def test_a_reward_that_is_no_number_is_named_by_its_sample(name, value):
    """A task's is never trained on (environments/interfaces/score.py); a loop of one's own may hand one over."""
    rollouts = [
        replace(rollout_of(reward, 2), sample=n, turns=[Turn(1, 3, "stop")])
        for n, reward in ((4, 1.0), (7, value), (9, 0.0))
    ]
    group, config = Group("p", rollouts), Config()
    with pytest.raises(RuntimeError, match="advantages of p: ValueError: the reward of sample 7 is"):
        step_batches([group], ALGORITHMS[name](), config, Layout(1, 64))
    if name != "distillation":  # which asks for none
        with pytest.raises(ValueError, match="sample 7 is"):
            ALGORITHMS[name]().advantages(rollouts)


def test_a_turns_reward_that_is_no_number_is_named_by_its_sample():
    rollouts = [replace(rollout_of(1.0, 2), sample=n, turns=[Turn(1, 3, "stop")]) for n in range(2)]
    rollouts[1].turn_rewards = [NAN]
    with pytest.raises(ValueError, match="a reward of sample 1 is not finite"):
        ALGORITHMS["turn_grpo"]().advantages(rollouts)


def rollout_of(reward: float, num_tokens: int) -> Rollout:
    """A prompt of one token, and what the model wrote."""
    provenance = np.array([Provenance.TEMPLATE] + [Provenance.MODEL] * num_tokens, np.int8)
    nothing = np.zeros(1 + num_tokens, np.float32)
    return Rollout("p", 0, nothing.astype(np.int32), provenance, nothing, nothing, [], "ok", reward)


@pytest.mark.parametrize(("name", "options", "expected"), [
    ("grpo", {}, [1.5, -0.5, -0.5, -0.5]),
    ("dapo", {}, [1.5, -0.5, -0.5, -0.5]),
    ("cispo", {}, [1.5, -0.5, -0.5, -0.5]),
    ("gspo", {}, [1.5, -0.5, -0.5, -0.5]),
    ("sapo", {}, [1.5, -0.5, -0.5, -0.5]),
    ("dppo", {}, [1.5, -0.5, -0.5, -0.5]),
    ("gdpo", {}, [1.5, -0.5, -0.5, -0.5]),
    ("grpo", {"normalize_std": False}, [0.75, -0.25, -0.25, -0.25]),
    ("dr_grpo", {}, [0.75, -0.25, -0.25, -0.25]),
    ("rloo", {}, [1.0, -1 / 3, -1 / 3, -1 / 3]),
    ("maxrl", {}, [3.0, -1.0, -1.0, -1.0]),
])  # fmt: skip
def test_advantages_by_name(name, options, expected):
    """One right of four."""
    algorithm = ALGORITHMS[name](ALGORITHMS[name].Settings(**options))
    found_G = algorithm.advantages([rollout_of(reward, 3) for reward in (1.0, 0.0, 0.0, 0.0)])
    assert found_G == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("baseline", "rewards"), [(False, [1.0, 0.0, 0.5]), (True, [0.5, -0.5, 0.0])])
def test_reinforce_pp_rewards_the_last_token(baseline, rewards):
    algorithm = ReinforcePP(ReinforcePP.Settings(baseline=baseline))
    found = algorithm.advantages([rollout_of(r, n) for r, n in ((1.0, 3), (0.0, 1), (0.5, 2))])
    assert [of_tokens.tolist() for of_tokens in found] == [[0, 0, rewards[0]], [rewards[1]], [0, rewards[2]]]
    assert [len(x) for x in at_last_token(np.ones(2), [rollout_of(1.0, 0), rollout_of(1.0, 1)])] == [0, 1]


def numpy_to_go(rewards: np.ndarray, discount: float) -> np.ndarray:
    """verl: running = r[t] + gamma * running, from the last token to the first."""
    found, running = np.zeros_like(rewards), 0.0
    for t in reversed(range(len(rewards))):
        found[t] = running = rewards[t] + discount * running
    return found


@pytest.mark.parametrize("discount", [1.0, 0.9])
def test_rewards_to_go(discount):
    """Ragged samples, one of them empty, one of one token, one in which nothing counts."""
    lengths, rng = (4, 1, 0, 3, 6), np.random.default_rng(0)
    rewards = [rng.normal(size=length) for length in lengths]
    weight_S = torch.tensor([1.0] * 5 + [0.0] * 3 + [1.0] * 6)
    masked = [*rewards[:3], np.full(3, NAN), rewards[4]]
    found_S = rewards_to_go(torch.tensor(np.concatenate(masked)), weight_S, torch.tensor([0, 4, 5, 5, 8, 14]), discount)
    expected = [numpy_to_go(r, discount) for r in [*rewards[:3], np.zeros(3), rewards[4]]]
    np.testing.assert_allclose(found_S, np.concatenate(expected), rtol=1e-12)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_bad_reward_is_its_samples_alone(value):
    rewards_S = torch.tensor([1.0, 2.0, value, 3.0, 4.0])
    found_S = rewards_to_go(rewards_S, torch.ones(5), torch.tensor([0, 1, 3, 5]))
    np.testing.assert_array_equal(found_S, [1.0, NAN, NAN, 7.0, 4.0])


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_divergence_in_the_reward(estimator, decoupled):
    """OpenRLHF: reward[t] = -kl_coefficient kl[t], and the score at the last token; then the sums to go."""
    rng, lengths = np.random.default_rng(1), (3, 1, 4)
    sampling, proximal, reference, at_tokens = (rng.normal(size=8) for _ in range(4))
    x = reference - (proximal if decoupled else sampling)
    kl = {"k1": -x, "k2": x**2 / 2, "k3": np.exp(x) - 1 - x}[estimator]
    zero_S, ends = torch.zeros(8, dtype=torch.float64), np.cumsum(lengths)
    inputs = LossInputs(
        *(zero_S, torch.tensor(sampling), torch.tensor(at_tokens), torch.ones(8), zero_S, torch.tensor([0, *ends])),
        reference_logprob_S=torch.tensor(reference),
        proximal_logprob_S=torch.tensor(proximal),
    )
    settings = {"kl_coefficient": 0.3, "kl_in": "reward", "kl_estimator": estimator, "decoupled": decoupled}
    found_S = ReinforcePP(ReinforcePP.Settings(discount=0.9, **settings)).refine(inputs).advantage_S
    parts = np.split(at_tokens - 0.3 * kl, ends[:-1])
    np.testing.assert_allclose(found_S, np.concatenate([numpy_to_go(part, 0.9) for part in parts]), rtol=1e-12)
    found_S = GRPO(GRPO.Settings(**settings)).refine(inputs).advantage_S
    parts = np.split(0.3 * kl, ends[:-1])
    expected_S = at_tokens - np.concatenate([numpy_to_go(part, 1.0) for part in parts])
    np.testing.assert_allclose(found_S, expected_S, rtol=1e-12, atol=1e-14)


def published_loss(logprob_S, old_S, advantage_S, weight_S) -> tuple[float, np.ndarray]:
    """sum of w max(-A r, -A clip(r, 1 - low, 1 + high)) with r = exp(clip(logprob - old, -20, 20)); its gradient.

    TRL writes -min(r A, clip(r) A), which is the same, and does not clip the difference.
    """
    difference_S = logprob_S - old_S
    ratio_S = np.exp(np.clip(difference_S, -20, 20))
    plain_S, clipped_S = -advantage_S * ratio_S, -advantage_S * np.clip(ratio_S, 1 - LOW, 1 + HIGH)
    flows_S = (plain_S >= clipped_S) & (np.abs(difference_S) <= 20)
    return float((weight_S * np.maximum(plain_S, clipped_S)).sum()), weight_S * plain_S * flows_S


def learners_loss(logprob_S, old_S, advantage_S, weight_S):
    algorithm = GRPO(GRPO.Settings(clip_low=LOW, clip_high=HIGH))
    return algorithm.loss(LossInputs(logprob_S, old_S, advantage_S, weight_S, torch.zeros_like(old_S)))[0]


def kernels_loss(logprob_S, old_S, advantage_S, weight_S):
    return policy_loss(logprob_S, old_S, advantage_S, weight_S, Objective(clip_low=LOW, clip_high=HIGH))[0]


OURS = pytest.mark.parametrize("loss_of", [learners_loss, kernels_loss])


def loss_and_gradient(loss_of, *columns) -> tuple[float, np.ndarray]:
    columns = [torch.tensor(column, dtype=torch.float64) for column in columns]
    loss = loss_of(columns[0].requires_grad_(), *columns[1:])
    loss.backward()
    return loss.item(), columns[0].grad.numpy()


@OURS
def test_the_loss_is_the_published_one(loss_of):
    """Ratios from far below to far above the bounds, both signs, uneven weights."""
    rng = np.random.default_rng(3)
    old_S, advantage_S, weight_S = -rng.random(200) * 5, rng.normal(size=200), rng.random(200)
    logprob_S = old_S + rng.normal(size=200) * 0.5
    columns = (logprob_S, old_S, advantage_S, weight_S)
    (loss, gradient_S), (expected, expected_S) = loss_and_gradient(loss_of, *columns), published_loss(*columns)
    assert loss == pytest.approx(expected, rel=1e-12)
    np.testing.assert_allclose(gradient_S, expected_S, rtol=1e-12, atol=1e-15)


@OURS
@pytest.mark.parametrize(
    ("difference", "advantage", "loss", "gradient"),
    [
        (30.0, 1.0, -1.28, 0.0),  # gains no more than the bound
        (30.0, -1.0, math.exp(20), 0.0),  # cut: e**20, and no gradient, instead of one of e**30
        (-30.0, 1.0, -math.exp(-20), 0.0),
        (-30.0, -1.0, 0.8, 0.0),
        (200.0, -1.0, math.exp(20), 0.0),  # e**200 is infinite in fp32
        (19.0, -1.0, math.exp(19), math.exp(19)),  # below the cut all is as it was
        (-19.0, 1.0, -math.exp(-19), -math.exp(-19)),
    ],
)
def test_far_ratios_by_hand(loss_of, difference, advantage, loss, gradient):
    column = [np.array([x]) for x in (-1.0 + difference, -1.0, advantage, 1.0)]
    found = loss_and_gradient(loss_of, *column)
    assert found == (pytest.approx(loss, rel=1e-12), pytest.approx([gradient], rel=1e-12))
    expected = published_loss(*column)
    assert found == (pytest.approx(expected[0], rel=1e-12), pytest.approx(expected[1], rel=1e-12))


@OURS
def test_a_far_token_leaves_the_others_as_they_were(loss_of):
    """In fp32, where e**200 is infinite: the gradient of a row is that of its other tokens."""
    logprob_S = torch.tensor([-1.0, 199.0, -1.0]).requires_grad_()
    loss_of(logprob_S, torch.full((3,), -1.0), torch.tensor([1.0, -1.0, 2.0]), torch.ones(3)).backward()
    assert logprob_S.grad.tolist() == [-1.0, 0.0, -2.0]


@OURS
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize(("logprob", "old"), [(-1.0, -INF), (-INF, -1.0), (-1.0, NAN), (NAN, -1.0), (INF, -1.0)])
def test_what_is_no_number_is_never_hidden(loss_of, logprob, old, advantage):
    """A log-probability that is infinite or NaN is a fault: the step must be left out, and its sample named."""
    columns = [
        np.array([of_the_first, x])
        for of_the_first, x in zip((-1.0, -1.0, 1.0, 1.0), (logprob, old, advantage, 1.0), strict=True)
    ]
    loss, gradient_S = loss_and_gradient(loss_of, *columns)
    assert not math.isfinite(loss)
    assert gradient_S[0] == -1.0


def test_agreement_is_cut_too():
    sums = agreement_sums(torch.tensor([199.0, -1.0, NAN]), torch.full((3,), -1.0), torch.tensor([True, True, False]))
    assert float(sums["agreement_max"]) == pytest.approx(math.exp(LARGEST_LOG_RATIO))
    assert float(sums["agreement_mean"]) == pytest.approx(1 + math.exp(LARGEST_LOG_RATIO))
    assert float(sums["kl_k3"]) == pytest.approx(math.exp(20) - 21)

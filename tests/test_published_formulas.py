"""Advantages and the clipped loss against what others publish, written out in plain numpy; and at the edges of numbers.

verl, TRL and OpenRLHF all divide by ``torch.std``, which is over G - 1; verl and OpenRLHF cut log-ratios at 20.
"""

import math

import numpy as np
import pytest
import torch

from titan_rl.algorithms.advantages import group_relative
from titan_rl.algorithms.losses import clipped_policy_loss
from titan_rl.kernels.policy_loss import LARGEST_LOG_RATIO, Objective, policy_loss
from titan_rl.trainer.objective import agreement_sums

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
    return clipped_policy_loss(logprob_S, old_S, advantage_S, weight_S, clip_low=LOW, clip_high=HIGH)[0]


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

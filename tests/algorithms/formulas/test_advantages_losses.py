"""Advantages and losses against arithmetic by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import titan_rl.models.device  # isort: skip  # noqa: F401  (before any other torchtitan module)

from titan_rl.algorithms import dry_run as probe
from titan_rl.algorithms.arithmetic.advantages import group_relative
from titan_rl.algorithms.arithmetic.values import value_loss
from titan_rl.algorithms.base import LossInputs, Needs
from titan_rl.algorithms.offline.sft import SFT
from titan_rl.algorithms.policy_gradient.grpo import GRPO
from titan_rl.algorithms.registry import ALGORITHMS
from titan_rl.data.batches.packing import token_weights
from titan_rl.data.types import Sample
from titan_rl.trainer.objective.objective import loss_and_sums

ALGORITHM = GRPO(GRPO.Settings(clip_low=0.2, clip_high=0.3))


def inputs_of(ratio, advantage, weight=None) -> LossInputs:
    sampling_S = torch.full((len(ratio),), -1.0)
    logprob_S = (sampling_S + torch.tensor(ratio).log()).requires_grad_()
    weight_S = torch.full((len(ratio),), 1.0) if weight is None else torch.tensor(weight)
    return LossInputs(logprob_S, sampling_S, torch.tensor(advantage), weight_S, torch.zeros(len(ratio)))


def test_grpo_by_hand():
    advantages_G = group_relative(np.array([1.0, 0.0, 0.0, 1.0]), normalize_std=True)
    assert advantages_G == pytest.approx(np.array([1, -1, -1, 1]) * 0.75**0.5, rel=1e-5)
    advantages_G = group_relative(np.array([3.0, 0.0, 0.0]), normalize_std=True)
    assert advantages_G == pytest.approx(np.array([2, -1, -1]) / 3**0.5, rel=1e-5)


def test_dr_grpo_does_not_divide():
    advantages_G = group_relative(np.array([3.0, 0.0, 0.0]), normalize_std=False)
    assert advantages_G == pytest.approx([2, -1, -1], abs=1e-15)


@pytest.mark.parametrize("normalize_std", [True, False])
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 0.7, 1 / 3, -2.5])
@pytest.mark.parametrize("size", [2, 3, 6, 7, 13])
def test_equal_rewards_have_no_advantage_at_all(reward, size, normalize_std):
    assert not group_relative(np.full(size, reward), normalize_std).any()


def test_demonstrations_all_count_alike():
    assert SFT().advantages([None] * 3) == [1, 1, 1]


def test_clipped_loss_by_hand():
    ratio, advantage, weight = [0.5, 1.0, 1.1, 2.0, 0.5, 2.0], [1, 1, 2, 1, -1, -1], [0.1, 0.2, 0.3, 0.1, 0.2, 0.1]
    gains = [0.5 * 1, 1.0 * 1, 1.1 * 2, 1.3 * 1, 0.8 * -1, 2.0 * -1]
    loss, sums = ALGORITHM.loss(inputs_of(ratio, advantage, weight))
    assert loss.item() == pytest.approx(-np.dot(gains, weight), rel=1e-6)
    assert int(sums["clip_fraction"]) == 2  # 2.0 with a positive and 0.5 with a negative advantage


def test_gradient_is_the_policy_gradient_and_zero_where_clipped():
    ratio, advantage = np.array([0.5, 1.1, 2.0, 0.5, 2.0], np.float32), np.array([1, 2, 1, -1, -1], np.float32)
    inputs = inputs_of(ratio.tolist(), advantage.tolist())
    ALGORITHM.loss(inputs)[0].backward()
    expected = -ratio * advantage * np.array([1, 1, 0, 0, 1])
    assert inputs.logprob_S.grad.numpy() == pytest.approx(expected, rel=1e-5)


def test_on_policy_gradient_is_minus_advantage():
    inputs = inputs_of([1.0, 1.0], [0.7, -0.4])
    ALGORITHM.loss(inputs)[0].backward()
    assert inputs.logprob_S.grad.tolist() == pytest.approx([-0.7, 0.4])


def test_tokens_of_weight_zero_count_for_nothing():
    loss, sums = ALGORITHM.loss(inputs_of([2.0, 2.0], [1, 1], [0.0, 0.0]))
    assert loss.item() == 0 and int(sums["clip_fraction"]) == 0


def test_supervised_loss_by_hand():
    inputs = inputs_of([1.0, 2.0, 4.0], [1, 1, 1], [0.5, 0.25, 0.25])
    loss, _ = SFT().loss(inputs)
    assert loss.item() == pytest.approx(1 - 0.25 * np.log(2) - 0.25 * np.log(4), rel=1e-6)


@pytest.mark.parametrize(
    "algorithm", [cls for cls in (SFT, *ALGORITHMS.values()) if cls().is_token_sum and cls().needs == Needs()]
)
def test_loss_of_the_whole_is_the_sum_over_any_parts(algorithm):
    rng = np.random.default_rng(0)
    columns = [torch.tensor(rng.normal(size=20)) for _ in range(3)] + [torch.tensor(rng.random(20))] * 2
    loss = algorithm().loss
    whole, _ = loss(LossInputs(*columns))
    parts = [loss(LossInputs(*part))[0] for part in zip(*(c.split([7, 1, 12]) for c in columns), strict=True)]
    assert float(sum(parts)) == pytest.approx(float(whole), rel=1e-12)


def row_of(algorithm, held: float) -> tuple[LossInputs, str]:
    """Four samples, of which one has no token that counts; ``held``: in every column of the tokens that do not count.
    And the column that the gradient flows through."""
    inputs, learned = probe._row(algorithm), probe._trained_column(algorithm)
    weight_S = inputs.weight_S * (torch.arange(len(inputs.weight_S)) != 4)
    columns = {}
    for name, column in vars(inputs).items():
        if isinstance(column, torch.Tensor) and name not in ("weight_S", "offsets_N"):
            is_mine = (weight_S > 0).reshape(-1, *[1] * (column.dim() - 1))
            columns[name] = torch.where(is_mine, column, held)
    columns[learned] = columns[learned].requires_grad_()
    return replace(inputs, weight_S=weight_S, **columns), learned


def value_and_gradient(algorithm, held: float) -> tuple[torch.Tensor, torch.Tensor, dict]:
    inputs, learned = row_of(algorithm, held)
    loss, metrics = algorithm.loss(inputs)
    [gradient] = torch.autograd.grad(loss, getattr(inputs, learned))
    return loss.detach(), gradient, metrics


ALL_LOSSES = {name: cls() for name, cls in ALGORITHMS.items()}
ALL_LOSSES["distillation, top_k"] = ALGORITHMS["distillation"](ALGORITHMS["distillation"].Settings(top_k=3))
WHOLE = dict(kl_coefficient=0.1, entropy_coefficient=0.1, decoupled=True, importance="sequence", reject="geometric")
ALL_LOSSES["all that there is"] = GRPO(GRPO.Settings(**WHOLE, reject_low=0.1))


@pytest.mark.parametrize("held", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ALL_LOSSES)
def test_a_token_that_does_not_count_may_hold_any_number(name, held):
    loss, gradient, metrics = value_and_gradient(ALL_LOSSES[name], held)
    expected, expected_gradient, expected_metrics = value_and_gradient(ALL_LOSSES[name], 0.5)
    assert torch.isfinite(loss) and loss == expected
    assert torch.isfinite(gradient).all() and gradient.any()
    torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=0)
    assert {k: float(v) for k, v in metrics.items()} == {k: float(v) for k, v in expected_metrics.items()}


@pytest.mark.parametrize("name", ["dpo", "simpo", "orpo", "reward_model"])
def test_a_partner_without_a_pair_counts_for_nothing_whatever_it_holds(name):
    """All of a chosen answer is masked: the rejected one is no pair's any more."""
    algorithm = ALGORITHMS[name]()
    inputs, learned = row_of(algorithm, 0.5)
    column = torch.where(torch.arange(8) == 1, np.nan, getattr(inputs, learned).detach()).requires_grad_()
    weight_S = torch.tensor([0.0, 0.25, 0.25, 0.25, 0.0, 0.0, 0.0, 0.0])
    loss, _ = algorithm.loss(replace(inputs, weight_S=weight_S, **{learned: column}))
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(column.grad).all()


@pytest.mark.parametrize("clip", [None, 0.2])
def test_a_value_that_does_not_count_may_be_any_number(clip):
    value_S = torch.tensor([0.5, np.nan, np.inf], requires_grad=True)
    columns = torch.tensor([[0.4, np.nan, 0.0], [1.0, 0.0, np.nan], [1.0, 0.0, 0.0]])
    loss, _ = value_loss(value_S, *columns, clip)
    loss.backward()
    assert loss.item() == pytest.approx(0.125) and value_S.grad.tolist() == [-0.5, 0.0, 0.0]


def test_metrics_beside_the_loss_do_not_hear_of_tokens_that_do_not_count():
    statistics = torch.tensor([[-1.0, np.nan], [0.5, np.nan]])
    columns = {
        "logprob_S": torch.tensor([-1.0, np.nan]),
        "advantage_S": torch.ones(2),
        "offsets_N": torch.tensor([0, 2]),
    }
    loss, sums = loss_and_sums(GRPO(), statistics, columns | {"weight_S": torch.tensor([1.0, 0.0])})
    assert torch.isfinite(loss) and all(torch.isfinite(value) for value in sums.values())
    assert sums["entropy"] == 0.5


def samples_of(*num_trained: int) -> list[Sample]:
    return [
        Sample(np.zeros(2 + n, np.int32), np.array([0, 0] + [1] * n, np.int8), np.zeros(2 + n, np.float32), 1.0)
        for n in num_trained
    ]


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token", [1 / 7, 1 / 7, 1 / 7]),
        ("sequence", [1 / 3 / 1, 1 / 3 / 2, 1 / 3 / 4]),
        ("constant", [1 / 3 / 10, 1 / 3 / 10, 1 / 3 / 10]),
    ],
)
def test_weights_of_the_aggregations(aggregation, expected):
    assert token_weights(samples_of(1, 2, 4), aggregation, max_new_tokens=10) == pytest.approx(expected)


def test_samples_without_trained_tokens_have_a_weight():
    for aggregation in ("token", "sequence", "constant"):
        assert np.isfinite(token_weights(samples_of(0, 0), aggregation, 10)).all()

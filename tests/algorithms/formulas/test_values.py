"""Advantages by a critic's values, and its loss, against float64 arithmetic done token after token."""

import numpy as np
import pytest
import torch

from titan_rl.algorithms.arithmetic.returns import rewards_to_go
from titan_rl.algorithms.arithmetic.values import explained_variance, generalized_advantages, value_loss
from titan_rl.algorithms.base import LossInputs
from titan_rl.algorithms.batches.batching import step_batches
from titan_rl.algorithms.policy_gradient.ppo import PPO
from titan_rl.algorithms.registry import ALGORITHMS
from titan_rl.config.sections.schema import Config
from titan_rl.data.types import Group, Layout, Provenance, Rollout, Row, Turn

COUNTS = [3, 1, 0, 5, 1]
"""Trained tokens of the samples of a row: some have one, one has none."""
OFFSETS_N = torch.tensor(np.cumsum([0, *COUNTS]))
S = sum(COUNTS)


def column(seed: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(S, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_hand(rewards_S, value_S, discount: float, trace: float) -> tuple[list[float], list[float]]:
    """A_t = sum_k (discount trace)^k d_{t+k}, written out for each token."""
    advantages, returns = [], []
    for begin, end in zip(OFFSETS_N[:-1].tolist(), OFFSETS_N[1:].tolist(), strict=True):
        values = [*value_S[begin:end].tolist(), 0.0]
        surprises = [float(rewards_S[begin + t]) + discount * values[t + 1] - values[t] for t in range(end - begin)]
        for t in range(end - begin):
            advantage = sum((discount * trace) ** k * surprises[t + k] for k in range(end - begin - t))
            advantages.append(advantage)
            returns.append(advantage + values[t])
    return advantages, returns


@pytest.mark.parametrize(("discount", "trace"), [(1.0, 1.0), (1.0, 0.95), (0.9, 0.5), (1.0, 0.0)])
def test_advantages_are_those_of_the_sum_written_out(discount, trace):
    rewards_S, value_S = column(0), column(1)
    advantage_S, return_S = generalized_advantages(rewards_S, value_S, OFFSETS_N, discount, trace)
    wanted, wanted_returns = by_hand(rewards_S, value_S, discount, trace)
    assert advantage_S.tolist() == pytest.approx(wanted, abs=1e-9)
    assert return_S.tolist() == pytest.approx(wanted_returns, abs=1e-9)


def test_a_sample_of_two_tokens_by_hand():
    """V = (1/2, 1/4), a reward of 1 at the end; discount 0.9, trace 0.5:
    d = (0 + 0.9/4 - 1/2, 1 - 1/4) = (-0.275, 0.75), A = (-0.275 + 0.45 * 0.75, 0.75) = (0.0625, 0.75)."""
    rewards_S, value_S = torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.25])
    advantage_S, return_S = generalized_advantages(rewards_S, value_S, torch.tensor([0, 2]), 0.9, 0.5)
    assert advantage_S.tolist() == pytest.approx([0.0625, 0.75], abs=1e-7)
    assert return_S.tolist() == pytest.approx([0.5625, 1.0], abs=1e-7)


def test_with_trace_1_returns_are_what_came_after_whatever_the_values_are():
    rewards_S = column(0)
    _, return_S = generalized_advantages(rewards_S, column(1, 100.0), OFFSETS_N, 1.0, 1.0)
    for begin, end in zip(OFFSETS_N[:-1].tolist(), OFFSETS_N[1:].tolist(), strict=True):
        assert return_S[begin:end].tolist() == pytest.approx(
            [float(rewards_S[t:end].sum()) for t in range(begin, end)], abs=1e-9
        )


def loss_by_hand(value, old, returns, weights, clip) -> tuple[float, list[float]]:
    """The loss, and its derivative for each value."""
    loss, gradient = 0.0, []
    for v, o, r, w in zip(value, old, returns, weights, strict=True):
        bounded = v if clip is None else o + min(max(v - o, -clip), clip)
        plain, clipped = (v - r) ** 2, (bounded - r) ** 2
        loss += w * max(plain, clipped) / 2
        gradient.append(w * (v - r) if plain >= clipped or abs(v - o) <= clip else 0.0)
    return loss, gradient


WEIGHT_S = torch.tensor([0.1, 0.1, 0.1, 0.3, 0.0, 0.0, 0.0, 0.0, 0.0, 0.2], dtype=torch.float64)
"""The sample with five tokens counts for nothing."""


@pytest.mark.parametrize("clip", [None, 0.2, 10.0])
def test_the_value_loss_and_its_gradient_by_hand(clip):
    value_S = column(2).requires_grad_()
    # beyond the bound upwards, downwards, just inside, and exactly where they were
    old_S = value_S.detach() + torch.tensor([0.7, -0.7, 0.1, -0.5, 0.7, -0.7, 0.1, 0.0, 0.3, 0.4])
    return_S = value_S.detach() + torch.tensor([0.1, -0.1, 1.0, 0.9, 0.1, -0.1, 1.0, 0.9, 0.1, 2.0])
    loss, sums = value_loss(value_S, old_S, return_S, WEIGHT_S, clip)
    columns = [c.detach().tolist() for c in (value_S, old_S, return_S, WEIGHT_S)]
    wanted, gradient = loss_by_hand(*columns, clip)
    assert float(loss) == pytest.approx(wanted, abs=1e-9)
    [got] = torch.autograd.grad(loss, value_S)
    assert got.tolist() == pytest.approx(gradient, abs=1e-9)
    counted_S = WEIGHT_S > 0
    moved_S, far_S = value_S.detach() - old_S, (value_S.detach() - return_S)[counted_S]
    assert float(sums["error_squared"]) == pytest.approx(float(far_S.square().sum()))
    if clip == 0.2:
        beyond_S = (moved_S.abs() > clip) & counted_S
        assert 0 < int(sums["clipped"]) < int(beyond_S.sum())
    else:
        assert not sums["clipped"]


def test_a_value_beyond_the_bound_and_nearer_to_the_return_gets_no_gradient():
    """It moved by 0.5 from 0 towards 1, 0.2 were allowed: the loss is (0.2 - 1)^2 / 2, and is flat."""
    value_S = torch.tensor([0.5], requires_grad=True)
    loss, sums = value_loss(value_S, torch.zeros(1), torch.ones(1), torch.ones(1), 0.2)
    assert float(loss) == pytest.approx(0.32, abs=1e-7) and int(sums["clipped"]) == 1
    assert not torch.autograd.grad(loss, value_S)[0].any()


def test_rows_without_a_trained_token_and_numbers_that_count_for_nothing():
    value_S = torch.full((2,), 3.0, requires_grad=True)
    loss, sums = value_loss(value_S, torch.full((2,), torch.inf), torch.full((2,), torch.nan), torch.zeros(2), 0.2)
    assert float(loss) == 0 and not any(float(value) for value in sums.values())
    assert explained_variance({name: float(value) for name, value in sums.items()}, 0) == 0


def test_explained_variance_is_that_of_the_whole():
    value_S, return_S = column(5), column(6)
    _, sums = value_loss(value_S, value_S, return_S, torch.ones(S, dtype=torch.float64), None)
    wanted = 1 - float((return_S - value_S).var(correction=0) / return_S.var(correction=0))
    assert explained_variance({name: float(value) for name, value in sums.items()}, S) == pytest.approx(wanted)
    _, perfect = value_loss(return_S, return_S, return_S, torch.ones(S, dtype=torch.float64), None)
    assert explained_variance({name: float(value) for name, value in perfect.items()}, S) == 1


@pytest.mark.parametrize("level", [10000.3, 1000.1, -0.3])
def test_returns_that_are_equal_leave_nothing_to_explain(level):
    """What rounding leaves of their spread, when rows are added up, is no spread to divide by."""
    return_S, totals = torch.full((1000,), level), {}
    for row_S in return_S.split(10):
        value_S = row_S + torch.linspace(-1, 1, 10)
        _, sums = value_loss(value_S, value_S, row_S, torch.ones(10), None)
        totals = {name: totals.get(name, 0.0) + float(value) for name, value in sums.items()}
    assert explained_variance(totals, 1000) == 0


def test_small_returns_have_a_spread_like_any_other():
    return_S = torch.tensor([1e-7, 3e-7], dtype=torch.float64)
    _, sums = value_loss(return_S, return_S, return_S, torch.ones(2), None)
    assert explained_variance({name: float(value) for name, value in sums.items()}, 2) == 1


def rollout(num_tokens: int, reward: float) -> Rollout:
    """A tool's token follows the model's first one."""
    kinds = [Provenance.TEMPLATE] * 2 + [Provenance.MODEL, Provenance.TOOL] + [Provenance.MODEL] * (num_tokens - 1)
    zeros = np.zeros(len(kinds))
    return Rollout("p", 0, zeros, np.array(kinds, np.int8), zeros, zeros, [Turn(2, 3, "stop")], "ok", reward)


def inputs_of(**columns: torch.Tensor) -> LossInputs:
    nothing_S = torch.zeros(S, dtype=torch.float64)
    names = ("logprob_S", "sampling_logprob_S", "advantage_S", "weight_S", "entropy_S")
    return LossInputs(**dict.fromkeys(names, nothing_S) | {"offsets_N": OFFSETS_N} | columns)


def test_the_reward_is_given_at_the_last_token_that_the_model_wrote():
    rewards = PPO().advantages([rollout(3, 1.0), rollout(1, 0.5)])
    assert [array.tolist() for array in rewards] == [[0.0, 0.0, 1.0], [0.5]]


def turns_around_a_tool(sample: int, reward: float, num_tool_tokens: int) -> Rollout:
    """Three tokens of the model, so many of a tool, and three of the model again."""
    kinds = [Provenance.TEMPLATE] * 2 + [Provenance.MODEL] * 3 + [Provenance.TOOL] * num_tool_tokens
    kinds += [Provenance.MODEL] * 3
    zeros, end = np.zeros(len(kinds), np.float32), len(kinds)
    turns = [Turn(2, 5, "stop"), Turn(end - 3, end, "stop")]
    return Rollout("p", sample, zeros.astype(np.int32), np.array(kinds, np.int8), zeros, zeros, turns, "ok", reward)


@pytest.mark.parametrize("name", ["reinforce_pp", "ppo"])
def test_what_a_tool_says_between_neither_stops_nor_discounts_a_return(name):
    """The model's tokens before it are credited as if it had said nothing: there are five to the last."""
    algorithm = ALGORITHMS[name]()

    def row_of(num_tool_tokens: int) -> Row:
        rollouts = [turns_around_a_tool(sample, float(sample), num_tool_tokens) for sample in (0, 1)]
        [batch] = step_batches([Group("p", rollouts)], algorithm, Config(), Layout(1, 256))
        [row] = batch.rows[0]
        return row

    quiet, told = row_of(0), row_of(50)
    for column in ("advantage_S", "weight_S", "offsets_N"):
        assert getattr(told, column).tolist() == getattr(quiet, column).tolist()
    columns = (torch.tensor(getattr(told, column)) for column in ("advantage_S", "weight_S", "offsets_N"))
    assert rewards_to_go(*columns, 0.9)[-6:].tolist() == pytest.approx([0.9**n for n in (5, 4, 3, 2, 1, 0)])


def test_refining_takes_the_divergence_off_each_tokens_reward_and_can_look_further_for_the_critic():
    settings = PPO.Settings(kl_coefficient=0.3, kl_in="reward", kl_estimator="k1", critic_lambda=1.0, gae_lambda=0.9)
    ppo = PPO(settings)
    assert ppo.needs.reference and ppo.needs.critic and ppo.normalizes_batch
    sampling_S, reference_S, rewards_S, value_S = (column(seed) for seed in (7, 8, 9, 10))
    found = ppo.refine(
        inputs_of(
            advantage_S=rewards_S,
            sampling_logprob_S=sampling_S,
            reference_logprob_S=reference_S,
            value_S=value_S,
            weight_S=torch.ones(S, dtype=torch.float64),
        )
    )
    kl_S = sampling_S - reference_S
    assert found.advantage_S.tolist() == pytest.approx(by_hand(rewards_S - 0.3 * kl_S, value_S, 1.0, 0.9)[0], abs=1e-9)
    assert found.return_S.tolist() == pytest.approx(by_hand(rewards_S - 0.3 * kl_S, value_S, 1.0, 1.0)[1], abs=1e-9)


@pytest.mark.parametrize("whiten", [True, False])
def test_whitening_is_a_setting(whiten):
    assert PPO(PPO.Settings(whiten=whiten)).normalizes_batch is whiten

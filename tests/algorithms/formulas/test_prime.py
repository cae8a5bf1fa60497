"""PRIME's formulas against float64 arithmetic that is written out here, sample after sample: values and gradients."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from titan_rl.algorithms.arithmetic.implicit_rewards import means_of_samples, outcome_loss
from titan_rl.algorithms.base import LossInputs
from titan_rl.algorithms.batches.batching import step_batches
from titan_rl.algorithms.policy_gradient.prime import PRIME
from titan_rl.config.load import load_config
from titan_rl.data.types import Group, Layout, Provenance, Rollout, Turn
from titan_rl.trainer.objective.nonfinite import parts

GROUPS = ((3, 1, 0, 5), (1, 1), (4,))
"""Trained tokens of the samples of each group: ragged, one token, none at all; two; one sample alone."""
COUNTS = [count for group in GROUPS for count in group]
OFFSETS_N = torch.tensor(np.cumsum([0, *COUNTS]))
S = sum(COUNTS)
MASKED = (1, 3, 6)
"""Tokens of weight 0: of the first sample and of the fourth, and the second sample's only one."""
LIVE_S = torch.tensor([place not in MASKED for place in range(S)])
OUTCOMES = [1.0, 0.0, 1.0, 0.25, 1.0, 1.0, 0.0]


def column(seed: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(S, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_sample(values_S: torch.Tensor) -> list[list[float]]:
    """Those that count."""
    ends = OFFSETS_N.tolist()
    return [[float(values_S[t]) for t in range(a, b) if LIVE_S[t]] for a, b in zip(ends[:-1], ends[1:], strict=True)]


def groups_of_samples() -> list[list[int]]:
    numbers = iter(range(len(COUNTS)))
    return [[next(numbers) for _ in group] for group in GROUPS]


# what the model learns


def outcome_columns(scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-ratios, outcomes and weights; all samples with a token that counts weigh 1/5."""
    owner_S = np.repeat(np.arange(len(COUNTS)), COUNTS)
    live = [len(values) for values in by_sample(column(0))]
    weights = [float(LIVE_S[t]) / live[n] / 5 if live[n] else 0.0 for t, n in enumerate(owner_S)]
    outcomes = [OUTCOMES[n] for n in owner_S]
    return column(0, scale), torch.tensor(outcomes, dtype=torch.float64), torch.tensor(weights, dtype=torch.float64)


def loss_by_hand(log_ratio_S: torch.Tensor, beta: float) -> tuple[float, list[float]]:
    """The mean cross-entropy, and its derivative for each log-ratio: beta (sigmoid(x) - o) / 5."""
    loss, slopes = 0.0, []
    for values, outcome, count in zip(by_sample(log_ratio_S), OUTCOMES, COUNTS, strict=True):
        right = 1 / (1 + math.exp(-beta * sum(values)))
        if values:
            loss -= (outcome * math.log(right) + (1 - outcome) * math.log(1 - right)) / 5
        slopes += [beta * (right - outcome) / 5] * count
    return loss, [slope if LIVE_S[t] else 0.0 for t, slope in enumerate(slopes)]


@pytest.mark.parametrize(("beta", "scale"), [(0.05, 1.0), (1.0, 2.0)])
def test_the_loss_is_the_mean_cross_entropy_of_outcomes_and_its_gradient_by_hand(beta, scale):
    log_ratio_S, outcome_S, weight_S = outcome_columns(scale)
    assert sum(1 for values in by_sample(log_ratio_S) if values) == 5
    log_ratio_S.requires_grad_()
    loss, sums = outcome_loss(beta * log_ratio_S, outcome_S, weight_S, OFFSETS_N)
    wanted, slopes = loss_by_hand(log_ratio_S.detach(), beta)
    assert loss.item() == pytest.approx(wanted, abs=1e-9)
    assert torch.autograd.grad(loss, log_ratio_S)[0].tolist() == pytest.approx(slopes, abs=1e-9)
    told = [
        (sum(values) > 0) == (outcome > 0.5)
        for values, outcome in zip(by_sample(log_ratio_S.detach()), OUTCOMES, strict=True)
        if values
    ]
    assert (int(sums["accurate"]), int(sums["samples"])) == (sum(told), 5) and 0 < sum(told) < 5
    total = sum(beta * sum(values) for values in by_sample(log_ratio_S.detach()))
    assert float(sums["process_reward"]) == pytest.approx(total, abs=1e-9)


def test_two_answers_by_hand():
    """Sums of log 3 and -log 3, told apart rightly and wrongly: -(log 3/4 + log 1/4) / 2."""
    log_3, half = math.log(3), torch.tensor([0.25, 0.25, 0.5])
    rewards_S = torch.tensor([log_3 - 1, 1.0, -log_3], dtype=torch.float64)
    loss, sums = outcome_loss(rewards_S, torch.ones(3), half, torch.tensor([0, 2, 3]))
    assert loss.item() == pytest.approx(-(math.log(3 / 4) + math.log(1 / 4)) / 2, abs=1e-7)
    assert int(sums["accurate"]) == 1


def test_what_counts_for_nothing_may_hold_any_number_and_what_counts_may_not():
    log_ratio_S, outcome_S, weight_S = outcome_columns()
    wanted, _ = outcome_loss(log_ratio_S, outcome_S, weight_S, OFFSETS_N)
    spoilt_S = torch.where(weight_S > 0, log_ratio_S, torch.nan).requires_grad_()
    loss, _ = outcome_loss(spoilt_S, outcome_S, weight_S, OFFSETS_N)
    assert float(loss.detach()) == float(wanted) and torch.autograd.grad(loss, spoilt_S)[0].isfinite().all()
    for bad in (torch.inf, -torch.inf, torch.nan):
        spoilt_S = log_ratio_S.clone()
        spoilt_S[0] = bad
        assert not outcome_loss(spoilt_S, outcome_S, weight_S, OFFSETS_N)[0].isfinite()


# advantages


def inputs_of(**columns: torch.Tensor) -> LossInputs:
    nothing_S = torch.zeros(S, dtype=torch.float64)
    names = ("logprob_S", "sampling_logprob_S", "advantage_S", "weight_S", "entropy_S")
    weight_S = LIVE_S.double() / S
    return LossInputs(**dict.fromkeys(names, nothing_S) | {"offsets_N": OFFSETS_N, "weight_S": weight_S} | columns)


def summed(prime: PRIME, inputs: LossInputs) -> torch.Tensor:
    """Of each sample, over its group: as the trainer does it."""
    terms_N2 = prime.group_terms(inputs)
    sums = [terms_N2[group].nan_to_num(0).sum(0).expand(len(group), 2) for group in groups_of_samples()]
    return torch.cat(sums)


def refined(prime: PRIME, **columns: torch.Tensor) -> torch.Tensor:
    inputs = inputs_of(**columns)
    return prime.refine(replace(inputs, group_sums_NM=summed(prime, inputs))).advantage_S


def process_by_hand(rewards_S: torch.Tensor, discount: float) -> list[float]:
    """Equation 5's first line, written out; 0 where no other sample of the group has a token that counts."""
    samples, advantages = by_sample(rewards_S), []
    means = [sum(values) / len(values) if values else None for values in samples]
    for group in groups_of_samples():
        for n in group:
            others = [means[m] for m in group if m != n and means[m] is not None]
            left = [value - sum(others) / len(others) if others else 0.0 for value in samples[n]]
            places = iter(range(len(left)))
            for t in range(int(OFFSETS_N[n]), int(OFFSETS_N[n + 1])):
                begin = next(places) if LIVE_S[t] else None
                advantages.append(None if begin is None else sum(v * discount**k for k, v in enumerate(left[begin:])))
    return advantages


def assert_where_it_counts(found_S: torch.Tensor, wanted: list[float | None]) -> None:
    for value, expected in zip(found_S.tolist(), wanted, strict=True):
        if expected is not None:
            assert value == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("weight", [1.0, 0.3, 0.0])
def test_advantages_are_returns_less_the_means_of_the_others_and_the_outcomes_part(weight):
    rewards_S, outcome_S = column(3), column(4)
    prime = PRIME(PRIME.Settings(process_weight=weight))
    found_S = refined(prime, process_reward_S=rewards_S, advantage_S=outcome_S)
    process = process_by_hand(rewards_S, 1.0)
    wanted = [None if p is None else float(o) + weight * p for p, o in zip(process, outcome_S, strict=True)]
    assert_where_it_counts(found_S, wanted)


def test_a_discount_counts_tokens_that_count():
    """A masked token that lies between two has a place of its own, and no reward."""
    rewards_S = torch.where(LIVE_S, column(3), torch.nan)
    found_S = refined(PRIME(PRIME.Settings(discount=0.5)), process_reward_S=rewards_S)
    [a, b] = by_sample(rewards_S)[0]
    means = [sum(v) / len(v) for v in by_sample(rewards_S)[:4] if v][1:]
    baseline = sum(means) / len(means)
    assert float(found_S[0]) == pytest.approx(a - baseline + 0.25 * (b - baseline), abs=1e-9)
    assert float(found_S[2]) == pytest.approx(b - baseline, abs=1e-9)


def test_two_samples_of_two_tokens_by_hand():
    """Rewards (1, 2) and (0, 4): the means 3/2 and 2 are each other's baselines; outcomes 1 and 0 add 1 and -1."""
    prime = PRIME()
    columns = torch.tensor([1.0, 2.0, 0.0, 4.0]), torch.ones(4), torch.tensor([0, 2, 4])
    terms_N2 = means_of_samples(*columns)
    assert terms_N2.tolist() == [[1.0, 1.5], [1.0, 2.0]]
    inputs = LossInputs(*[torch.zeros(4)] * 2, torch.tensor([1.0, 1.0, -1.0, -1.0]), torch.ones(4), torch.zeros(4))
    found = dict(process_reward_S=columns[0], offsets_N=columns[2], group_sums_NM=terms_N2.sum(0).expand(2, 2))
    found_S = prime.refine(replace(inputs, **found)).advantage_S
    assert found_S.tolist() == pytest.approx([1 + (-1 + 0), 1 + 0, -1 + (-1.5 + 2.5), -1 + 2.5], abs=1e-6)


def test_equal_rewards_of_a_group_leave_the_outcomes_part_alone():
    outcome_S = column(4)
    found_S = refined(PRIME(), process_reward_S=torch.full((S,), 0.7, dtype=torch.float64), advantage_S=outcome_S)
    assert_where_it_counts(found_S, [float(o) if live else None for o, live in zip(outcome_S, LIVE_S, strict=True)])


def test_a_reward_that_is_not_finite_stays_with_its_sample():
    """Also in a group in which it is one of two, and its other one has nothing to be compared with then."""
    for sample in (0, 4):
        begin, end = OFFSETS_N[sample : sample + 2].tolist()
        rewards_S = column(3)
        rewards_S[end - 1] = torch.nan
        found_S = refined(PRIME(), process_reward_S=rewards_S)
        assert [t for t in range(S) if found_S[t].isnan() and LIVE_S[t]] == [t for t in range(begin, end) if LIVE_S[t]]


def test_a_divergence_can_be_taken_off_as_in_the_whole_family():
    settings = PRIME.Settings(kl_coefficient=0.2, kl_in="reward", kl_estimator="k1", process_weight=2.0)
    sampling_S, reference_S, rewards_S = column(7), column(8), column(9)
    found_S = refined(
        PRIME(settings), sampling_logprob_S=sampling_S, reference_logprob_S=reference_S, process_reward_S=rewards_S
    )
    process, wanted = process_by_hand(rewards_S, 1.0), []
    penalties = by_sample(0.2 * (sampling_S - reference_S))
    to_go = iter([sum(values[begin:]) for values in penalties for begin in range(len(values))])
    for p in process:
        wanted.append(None if p is None else 2 * p - next(to_go))
    assert_where_it_counts(found_S, wanted)


def test_the_policys_loss_is_that_of_the_family_and_its_gradient_by_hand():
    """On policy, -w A at each token; beyond the bound nothing."""
    prime = PRIME(PRIME.Settings(clip_high=0.3))
    sampling_S, advantage_S = column(7, 0.1) - 1, column(8)
    ratio_S = torch.tensor([1.0, 1.2, 1.6, 0.5, *[1.0] * (S - 4)], dtype=torch.float64)
    logprob_S = (sampling_S + ratio_S.log()).requires_grad_()
    inputs = inputs_of(
        sampling_logprob_S=sampling_S, advantage_S=advantage_S, logprob_S=logprob_S, reference_logprob_S=sampling_S
    )
    loss, _ = prime.loss(inputs)
    wanted, slopes = 0.0, []
    for r, a, w in zip(ratio_S.tolist(), advantage_S.tolist(), inputs.weight_S.tolist(), strict=True):
        clipped = min(max(r, 0.8), 1.3)
        wanted -= w * min(r * a, clipped * a)
        slopes.append(-w * r * a if r * a <= clipped * a else 0.0)
    assert float(loss.detach()) == pytest.approx(wanted, abs=1e-9)
    assert torch.autograd.grad(loss, logprob_S)[0].tolist() == pytest.approx(slopes, abs=1e-9)


# what the controller sends


def rollout(sample: int, length: int, **reward: float) -> Rollout:
    kinds = np.array([Provenance.TEMPLATE] * 2 + [Provenance.MODEL] * length, np.int8)
    tokens = np.arange(3, 5 + length, dtype=np.int32)
    zeros = np.zeros(len(kinds), np.float32)
    return Rollout("p", sample, tokens, kinds, zeros, tokens, [Turn(2, 2 + length, "stop")], "ok", **reward)


def test_outcomes_are_what_was_verified_and_every_sample_weighs_alike():
    """Not the shaped reward, and not a reward model's; advantages are of what is rewarded."""
    tables = {"algorithm": {"name": "prime", "overlong_buffer": 4}, "rollout": {"max_new_tokens": 6}}
    config = load_config(None, tables)
    rollouts = [rollout(0, 1, reward=1.0), rollout(1, 4, reward=1.0), rollout(2, 2, reward=-3.0)]
    rollouts += [rollout(3, 3, reward=9.0, task_reward=0.5)]
    [batch] = step_batches([Group("p", rollouts)], PRIME(), config, Layout(num_ranks=1, row_tokens=64))
    [[row]] = batch.rows
    of = {name[1]: part for name, part in parts(row)}
    outcomes = [set(row.role_columns["outcome_S"][of[sample]].tolist()) for sample in range(4)]
    assert outcomes == [{1.0}, {1.0}, {0.0}, {0.5}]
    assert [row.role_columns["outcome_weight_S"][of[sample]].sum() for sample in range(4)] == pytest.approx([0.25] * 4)
    assert row.advantage_S[of[1]][0] == pytest.approx(0.5 - (1 - 3 + 9 - 0.25) / 3)

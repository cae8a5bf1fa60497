"""policy_loss: its gradient against differences, its settings against their papers, Triton against the reference."""

import itertools
import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from kernel_checks import poison, run_interpreted

from titan_rl.kernels.policy_loss import SUMS, Estimator, Objective, policy_loss

NAN = float("nan")
OBJECTIVES = [
    Objective(),
    Objective(clip_low=0.1, clip_high=0.3, dual_clip=1.5),
    Objective(kind="cispo", clip_high=0.1),
    *(Objective(kl_coefficient=0.3, kl_estimator=estimator) for estimator in get_args(Estimator)),
    *(Objective(kl_coefficient=0.3, kl_estimator=estimator, kl_clip=0.05) for estimator in get_args(Estimator)),
]
OBJECTIVES += [replace(objective, level=level) for level in ("sequence", "sequence_token") for objective in OBJECTIVES]
LENGTHS = [(1,), (3, 1, 70, 0, 26), (64, 64), (129,)]
"""Tokens of each sequence: one token; ragged, with an empty one; blocks filled exactly; a block and one more."""


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    poison(monkeypatch)


def tokens(lengths, objective: Objective, dtype=torch.float64) -> dict:
    """Random tokens of which some are not trained and hold NaN, of which ratios go far past the bounds."""
    generator = torch.Generator().manual_seed(sum(lengths))

    def normal(scale: float = 1.0) -> torch.Tensor:
        return scale * torch.randn(sum(lengths), generator=generator, dtype=torch.float64)

    logprob_S = normal() - 3
    trained_S = torch.rand(sum(lengths), generator=generator) < 0.8
    trained_S[0] = True
    columns = {
        "logprob_S": logprob_S,
        "old_logprob_S": logprob_S + normal(0.4),
        "advantage_S": normal(),
        "importance_S": normal(0.4).exp(),
        "reference_logprob_S": logprob_S + normal(0.4) if objective.kl_coefficient else None,
    }
    columns = {name: x if x is None else torch.where(trained_S, x, NAN).to(dtype) for name, x in columns.items()}
    weight_S = torch.where(trained_S, torch.rand(sum(lengths), generator=generator, dtype=torch.float64) + 0.1, 0)
    offsets_N = torch.tensor([0, *lengths]).cumsum(0)
    return columns | {"weight_S": weight_S.to(dtype), "offsets_N": offsets_N}


def evaluate(columns: dict, objective: Objective, implementation: str = "reference"):
    logprob_S = columns["logprob_S"].clone().requires_grad_()
    loss, sums = policy_loss(objective=objective, implementation=implementation, **columns | {"logprob_S": logprob_S})
    (2 * loss).backward()
    return loss.detach(), logprob_S.grad, sums


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_gradient_is_that_of_the_loss(objective):
    """But CISPO's and GSPO-token's, which have constant factors."""
    columns = tokens((5, 1, 9), objective)
    trained_S = columns["weight_S"] > 0

    def loss(trained_logprob_S):
        logprob_S = torch.full_like(columns["logprob_S"], NAN).masked_scatter(trained_S, trained_logprob_S)
        return policy_loss(objective=objective, **columns | {"logprob_S": logprob_S})[0]

    if objective.kind == "clip" and objective.level != "sequence_token":
        assert torch.autograd.gradcheck(loss, columns["logprob_S"][trained_S].requires_grad_())
    _, grad_S, _ = evaluate(columns, objective)
    assert torch.isfinite(grad_S).all() and (grad_S[~trained_S] == 0).all()


def one(objective: Objective, ratio: float, advantage: float):
    """Loss, gradient and sums of one token sampled with probability exp(-1)."""
    minus_one = torch.full((1,), -1.0, dtype=torch.float64)
    columns = {"logprob_S": minus_one + torch.tensor([ratio]).log(), "old_logprob_S": minus_one}
    columns |= {"advantage_S": torch.tensor([advantage]), "weight_S": torch.ones(1), "offsets_N": torch.tensor([0, 1])}
    loss, grad_S, sums = evaluate(columns, objective)
    return float(loss), float(grad_S) / 2, sums


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.1, 2.0, -2.2, -2.2),  # inside the bounds
        (1.5, 2.0, -2.6, 0.0),  # above: gains no more
        (1.5, -2.0, 3.0, 3.0),  # above, but it should fall: not bounded
        (5.0, -2.0, 6.0, 0.0),  # above the dual bound
        (0.5, -2.0, 1.8, 0.0),  # below, and it should fall
    ],
)
def test_bounds(ratio, advantage, loss, gradient):
    objective = Objective(clip_low=0.1, clip_high=0.3, dual_clip=3.0)
    found = one(objective, ratio, advantage)
    assert found[:2] == pytest.approx((loss, gradient), rel=1e-6)
    assert found[2]["clipped"] == (gradient == 0)


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    _, gradient, sums = one(Objective(kind="cispo", clip_high=0.3), 1.5, 2.0)
    assert gradient == pytest.approx(-1.3 * 2.0) and sums["clipped"] == 1


def test_ratio_of_a_sequence_is_the_geometric_mean_of_its_trained_tokens():
    columns = tokens((3, 4), Objective(level="sequence"))
    _, _, sums = evaluate(columns, Objective(level="sequence"))
    difference_S, trained_S = columns["logprob_S"] - columns["old_logprob_S"], columns["weight_S"] > 0
    parts = zip(difference_S.split([3, 4]), trained_S.split([3, 4]), strict=True)
    expected = sum(part[kept].mean().exp() * kept.sum() for part, kept in parts)
    torch.testing.assert_close(sums["ratio"], expected)


def test_importance_is_a_factor_of_the_surrogate_alone():
    columns = tokens((50,), Objective(kl_coefficient=0.3))
    objective = Objective(clip_low=0.99, clip_high=100.0, kl_coefficient=0.3)
    kept = {name: x[columns["weight_S"] > 0] for name, x in columns.items() if name != "offsets_N"}
    ratio_S = (kept["logprob_S"] - kept["old_logprob_S"]).exp()
    toward_S = kept["reference_logprob_S"] - kept["logprob_S"]
    terms_S = -kept["importance_S"] * ratio_S * kept["advantage_S"] + 0.3 * (toward_S.exp() - 1 - toward_S)
    loss, _, sums = evaluate(columns, objective)
    torch.testing.assert_close(loss, (terms_S * kept["weight_S"]).sum())
    torch.testing.assert_close(sums["reference_kl"], (toward_S.exp() - 1 - toward_S).sum())


@pytest.mark.parametrize(("advantage", "loss"), [(1.0, -1.2), (0.0, 0.0), (-1.0, torch.tensor(20.0).exp().item())])
def test_ratios_are_never_infinite(advantage, loss):
    assert one(Objective(), 1e30, advantage)[0] == pytest.approx(loss)


def test_settings_that_need_something():
    columns = tokens((3,), Objective())
    for objective, missing in [
        (Objective(kl_coefficient=1.0), "reference_logprob_S"),
        (Objective(level="sequence"), "offsets_N"),
        (Objective(level="sequence_token"), "offsets_N"),
    ]:
        with pytest.raises(ValueError, match=missing):
            policy_loss(objective=objective, **columns | {missing: None})
    with pytest.raises(ValueError, match="dual_clip"):
        Objective(dual_clip=0.5)


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def check_triton(lengths, objective):
    """In fp32 against the reference in float64."""
    exact = evaluate(tokens(lengths, objective), objective)
    found = evaluate(tokens(lengths, objective, torch.float32), objective, "triton")
    magnitude = float(exact[1].abs().sum() + (tokens(lengths, objective)["weight_S"] > 0).sum())
    for mine, exactly in zip(found[:2], exact[:2], strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine.double(), exactly, atol=2**-20, rtol=2**-18)
    for name in SUMS:
        assert float(found[2][name]) == pytest.approx(float(exact[2][name]), abs=2**-20 * magnitude), name


@pytest.mark.parametrize("objective", OBJECTIVES)
def check_triton_at_the_edges(objective):
    """Ratios of e**30 and e**-30 as the reference cuts them; what is no number makes the loss none."""
    columns = tokens((4, 3), objective, torch.float32)
    columns = {n: x if x is None or n.endswith("_N") else x.nan_to_num(-1.0) for n, x in columns.items()}
    columns["weight_S"] = torch.ones(7)
    for difference in (30.0, -30.0):
        columns["old_logprob_S"] = columns["logprob_S"] - difference
        for mine, exactly in zip(
            *(evaluate(columns, objective, by)[:2] for by in ("triton", "reference")), strict=True
        ):
            torch.testing.assert_close(mine, exactly, rtol=1e-4, atol=1e-6)
    for name, value in itertools.product(("logprob_S", "old_logprob_S"), (NAN, -math.inf)):
        bad = columns | {name: columns[name].clone()}
        bad[name][2] = value
        for by in ("triton", "reference"):
            assert evaluate(bad, objective, by)[0].isnan(), (name, value, by)


def check_triton_without_what_may_be_left_out():
    columns = {name: tokens((40,), Objective(), torch.float32)[name] for name in ("logprob_S", "old_logprob_S")}
    columns |= {"advantage_S": torch.ones(40), "weight_S": torch.zeros(40)}
    loss, grad_S, sums = evaluate(columns, Objective(), "triton")
    assert loss == 0 and not grad_S.any() and not any(sums.values())


def check_triton_without_tokens():
    columns = dict.fromkeys(("logprob_S", "old_logprob_S", "advantage_S", "weight_S"), torch.zeros(0))
    assert evaluate(columns, Objective(), "triton")[0] == 0


def test_triton_in_its_interpreter():
    run_interpreted(__file__)

"""SAPO's gate and DPPO's mask by hand, in the places where they part from PPO's clip."""

import math
from dataclasses import replace

import pytest
import torch

from titan_rl.algorithms.arithmetic.trust_region import binary_divergence, soft_gate
from titan_rl.algorithms.base import LossInputs
from titan_rl.algorithms.policy_gradient.grpo import GRPO
from titan_rl.algorithms.policy_gradient.ratios.dppo import DPPO
from titan_rl.algorithms.policy_gradient.ratios.sapo import SAPO


def found(algorithm, policy: float, sampler: float, advantage: float, **columns) -> tuple[float, float, dict]:
    """Loss of one token of these probabilities, its gradient for the log-probability, and the metrics."""
    logprob_S = torch.tensor([math.log(policy)], dtype=torch.float64, requires_grad=True)
    others = [torch.tensor([value], dtype=torch.float64) for value in (math.log(sampler), advantage, 1.0, 0.0)]
    inputs = LossInputs(logprob_S, *others, offsets_N=torch.tensor([0, 1]))
    columns = {name: torch.tensor([math.log(value)], dtype=torch.float64) for name, value in columns.items()}
    loss, metrics = algorithm.loss(replace(inputs, **columns))
    [gradient] = torch.autograd.grad(loss, [logprob_S])
    return loss.item(), gradient.item(), {name: float(value) for name, value in metrics.items()}


@pytest.mark.parametrize(
    ("policy", "advantage", "loss", "gradient"),
    [
        (0.3, 2.0, -2 * 2.489837, -2 * 1.5 * 0.940015),  # r = 1.5: 4 sigmoid(0.5), and 4 sigmoid (1 - sigmoid)
        (0.3, -1.0, 2.393585, 1.5 * 0.934140),  # 4 / 1.05 sigmoid(0.525)
        (0.1, -1.0, 1.415938, 0.5 * 0.934140),  # r = 0.5: 4 / 1.05 sigmoid(-0.525)
        (0.2, 2.0, -4.0, -2.0),  # r = 1: 4 sigmoid(0) = 2, and the gradient of every policy gradient
        (0.2, -1.0, 2 / 1.05, 1.0),
        (0.2, 0.0, 0.0, 0.0),
    ],
)
def test_sapo_by_hand(policy, advantage, loss, gradient):
    found_loss, found_gradient, metrics = found(SAPO(), policy, 0.2, advantage)
    assert (found_loss, found_gradient) == pytest.approx((loss, gradient), abs=1e-5)
    if advantage:
        assert metrics["gate_slope"] == pytest.approx(gradient / (-advantage * policy / 0.2), abs=1e-5)


def test_sapos_gradient_fades_where_ppos_ends():
    """At r = 2 PPO has none; SAPO has 4 sigmoid(1) (1 - sigmoid(1)) = 0.786 of the ratio's, and less the further."""
    assert found(GRPO(), 0.4, 0.2, 1.0)[1] == 0
    assert found(SAPO(), 0.4, 0.2, 1.0)[1] == pytest.approx(-2 * 0.786448, abs=1e-5)
    assert abs(found(SAPO(), 0.9, 0.02, 1.0)[1]) < 1e-15


def test_the_slope_is_the_gates_derivative():
    ratio_S = torch.tensor([0.0, 0.4, 1.0, 2.5, 1e8], dtype=torch.float64, requires_grad=True)
    gated_S, slope_S = soft_gate(ratio_S, torch.tensor([1.0, 2.0, 0.5, 1.05, 1.0], dtype=torch.float64))
    [derivative_S] = torch.autograd.grad(gated_S.sum(), [ratio_S])
    torch.testing.assert_close(slope_S, derivative_S)
    assert slope_S[2] == 1 and not slope_S.requires_grad


RARE, LIKELY = (1e-3, 1e-5), (0.8, 0.99)
"""Probabilities of policy and sampler: a hundred times as likely, and by a fifth less."""


@pytest.mark.parametrize("divergence", ["tv", "kl"])
@pytest.mark.parametrize(
    ("token", "advantage", "ppo", "dppo"),
    [
        (RARE, 1.0, 0.0, -100.0),  # PPO clips what moves next to no probability
        (LIKELY, -1.0, 0.8 / 0.99, 0.0),  # and goes on with what moves a fifth of all: its ratio is 0.808
        (LIKELY, 1.0, -0.8 / 0.99, -0.8 / 0.99),  # the way back is free
        (RARE, -1.0, 100.0, 100.0),
        (tuple(reversed(LIKELY)), 1.0, 0.0, 0.0),
        (tuple(reversed(LIKELY)), -1.0, 0.99 / 0.8, 0.99 / 0.8),
    ],
)
def test_dppo_masks_by_probability_and_not_by_ratio(token, advantage, ppo, dppo, divergence):
    assert found(GRPO(GRPO.Settings(clip_high=0.2)), *token, advantage)[1] == pytest.approx(ppo)
    loss, gradient, metrics = found(DPPO(DPPO.Settings(divergence=divergence)), *token, advantage)
    assert gradient == pytest.approx(dppo) and loss == pytest.approx(dppo)
    assert metrics["masked_fraction"] == (dppo == 0) and "clip_fraction" not in metrics


@pytest.mark.parametrize(
    ("token", "kl"),
    [
        (LIKELY, 0.181005),  # 0.99 log(0.99 / 0.8) + 0.01 log(0.01 / 0.2) = 0.210962 - 0.029957
        (RARE, 0.000944439),  # 1e-5 log(1e-2) + (1 - 1e-5) log((1 - 1e-5) / (1 - 1e-3))
        ((0.5, 0.5), 0.0),
    ],
)
def test_binary_divergences_by_hand(token, kl):
    policy_S, sampler_S = (torch.tensor([probability], dtype=torch.float64).log() for probability in token)
    assert float(binary_divergence(policy_S, sampler_S, "tv")) == pytest.approx(abs(token[0] - token[1]))
    assert float(binary_divergence(policy_S, sampler_S, "kl")) == pytest.approx(kl, rel=1e-5, abs=1e-12)


@pytest.mark.parametrize("logprobs", [(0.0, 0.0), (0.0, -1e-9), (-1e-9, 0.0), (0.0, -0.5), (-60.0, -0.5)])
def test_a_certain_token_has_a_finite_divergence(logprobs):
    for kind in ("tv", "kl"):
        divergence_S = binary_divergence(*(torch.tensor([value]) for value in logprobs), kind)
        assert torch.isfinite(divergence_S).all() and divergence_S.item() > -1e-6


@pytest.mark.parametrize(("sampler", "masked"), [(0.6, True), (0.7, False)])
def test_dppos_region_is_the_samplers_also_where_ratios_are_to_the_proximal_policy(sampler, masked):
    """The policy has 0.8 and the proximal policy, too: its own ratio is 1."""
    algorithm = DPPO(DPPO.Settings(decoupled=True))
    _, gradient, metrics = found(algorithm, 0.8, sampler, 1.0, proximal_logprob_S=0.8)
    assert gradient == (0.0 if masked else -1.0) and metrics["masked_fraction"] == masked

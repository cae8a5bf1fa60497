"""The column "here" of docs/algorithms.md's table of conventions, by values that a pocket calculator gives.

Each expected value is of the formula alone, in Python's float64; what others have in its place stands beside it.
"""

import math

import numpy as np
import pytest
import torch

from titan_rl.algorithms.base import LossInputs
from titan_rl.algorithms.batches.batching import step_batches
from titan_rl.algorithms.policy_gradient.grpo import GRPO
from titan_rl.algorithms.policy_gradient.ppo import PPO
from titan_rl.algorithms.policy_gradient.ratios.cispo import CISPO
from titan_rl.algorithms.policy_gradient.ratios.gspo import GSPO
from titan_rl.config.sections.schema import Config, RolloutConfig
from titan_rl.data.types import Group, Layout, Provenance, Rollout, Turn

E = math.exp


def loss_and_gradient(algorithm, logprobs, sampling, advantage, reference=None) -> tuple[float, list[float]]:
    """Of one sample whose tokens weigh 1 together, in float64."""

    def column(values):
        return torch.tensor(values, dtype=torch.float64)

    count, zero_S = len(logprobs), torch.zeros(len(logprobs), dtype=torch.float64)
    logprob_S = column(logprobs).requires_grad_()
    weight_S = torch.full_like(zero_S, 1 / count)
    inputs = LossInputs(
        *(logprob_S, column(sampling), zero_S + advantage, weight_S, zero_S, torch.tensor([0, count])),
        reference_logprob_S=None if reference is None else column(reference),
    )
    loss, _ = algorithm.loss(inputs)
    loss.backward()
    assert logprob_S.grad is not None
    return loss.item(), logprob_S.grad.tolist()


@pytest.mark.parametrize(
    ("mean", "loss", "gradient"),
    [
        (9.0, E(9), E(9) / 2),
        (11.0, E(11), E(11) / 2),  # 59874.1 and 29937.1; verl, which cuts at 10: 22026.5 and 0
        (25.0, E(20), 0.0),
    ],
)
def test_gspos_mean_log_ratio_is_cut_at_20(mean, loss, gradient):
    """Two tokens at mean - 1 and mean + 1, advantage -1, which no bound of the ratio holds back from above."""
    found = loss_and_gradient(GSPO(), [-1.0, -1.0], [-mean, -2.0 - mean], -1.0)
    assert found == (pytest.approx(loss, rel=1e-12), pytest.approx([gradient] * 2, rel=1e-12))


@pytest.mark.parametrize(
    ("difference", "clip", "value", "gradient"),
    [
        (3.0, None, E(3) - 4, 1 - E(3)),  # 16.0855 and -19.0855; verl: 10 and 0
        (11.0, None, E(11) - 12, 1 - E(11)),  # 59862.1 and -59873.1
        (30.0, None, E(20) - 21, 0.0),  # its log-ratio is cut at 20
        (3.0, 10.0, 10.0, 0.0),
        (11.0, 10.0, 10.0, 0.0),
        (2.0, 10.0, E(2) - 3, 1 - E(2)),  # 4.389: verl has the same
        (-12.0, 10.0, 10.0, 0.0),
    ],
)
def test_k3_is_not_bounded_unless_it_is_asked_for(difference, clip, value, gradient):
    """The reference finds the token e^difference times as likely; without advantage, on policy."""
    algorithm = GRPO(GRPO.Settings(kl_coefficient=1.0, kl_clip=clip))
    found = loss_and_gradient(algorithm, [-4.0], [-4.0], 0.0, [-4.0 + difference])
    assert found == (pytest.approx(value, rel=1e-12), pytest.approx([gradient], rel=1e-12))


@pytest.mark.parametrize(("clip", "value", "gradient"), [(None, 18.0, -6.0), (10.0, 10.0, 0.0)])
def test_k2_has_the_same_bound(clip, value, gradient):
    """OpenRLHF's for every estimator; k2 = 6^2 / 2."""
    algorithm = GRPO(GRPO.Settings(kl_coefficient=1.0, kl_clip=clip, kl_estimator="k2"))
    found = loss_and_gradient(algorithm, [-7.0], [-7.0], 0.0, [-1.0])
    assert found == (pytest.approx(value, rel=1e-12), pytest.approx([gradient], rel=1e-12))


@pytest.mark.parametrize(("clip", "advantages"), [(None, [14.0, 12.0]), (10.0, [12.0, 10.0])])
def test_k1_in_the_reward_is_bounded_on_both_sides(clip, advantages):
    """Two tokens with k1 = -2 and -12: the (negative) penalties from each on are taken off 0."""
    settings = GRPO.Settings(kl_coefficient=1.0, kl_in="reward", kl_estimator="k1", kl_clip=clip)
    zero_S = torch.zeros(2, dtype=torch.float64)
    columns = zero_S, torch.tensor([-5.0, -13.0]).double(), zero_S, zero_S + 1, zero_S, torch.tensor([0, 2])
    reference_S = torch.tensor([-3.0, -1.0]).double()
    refined = GRPO(settings).refine(LossInputs(*columns, reference_logprob_S=reference_S))
    assert refined.advantage_S.tolist() == advantages


@pytest.mark.parametrize(("log_ratio", "factor"), [(1.0, E(1)), (29.0, 5.0), (-29.0, E(-20))])
def test_cispo_has_a_gradient_beyond_the_cut(log_ratio, factor):
    """The ratio is a constant there, at most 5: what it is cut at takes no gradient away."""
    loss, gradient = loss_and_gradient(CISPO(), [-1.0], [-1.0 - log_ratio], 1.0)
    assert (loss, gradient) == (pytest.approx(factor, rel=1e-12), pytest.approx([-factor], rel=1e-12))


def test_a_groups_deviation_is_over_one_less_than_its_samples():
    """Rewards 3, 1, 2: the mean is 2, the deviation 1, not sqrt(2/3); with an epsilon of 1e-6."""
    rollouts = [answer(sample, "MM", reward) for sample, reward in enumerate((3.0, 1.0, 2.0))]
    assert GRPO().advantages(rollouts) == pytest.approx(np.array([1.0, -1.0, 0.0]) / (1 + 1e-6), rel=1e-12)


def answer(sample: int, kinds: str, reward: float) -> Rollout:
    """A prompt of two tokens; then M of the model, T of a tool."""
    provenance = [Provenance.TEMPLATE] * 2 + [Provenance.MODEL if kind == "M" else Provenance.TOOL for kind in kinds]
    count = len(provenance)
    return Rollout(
        *("p", sample, np.arange(3, 3 + count, dtype=np.int32), np.array(provenance, np.int8)),
        logprobs=np.zeros(count, np.float32),
        versions=np.zeros(count, np.int32),
        turns=[Turn(2, count, "stop")],
        status="ok",
        reward=reward,
    )


def test_gae_skips_what_tools_wrote():
    """Values 1/2, 1/4 and 0 at three tokens of the model, two of a tool after the first; discount 0.9, lambda 0.5:

    d = (0.9/4 - 1/2, 0 - 1/4, 1) = (-0.275, -0.25, 1);  A_3 = 1,  A_2 = -0.25 + 0.45 = 0.2,  A_1 = -0.275 + 0.09.
    """
    rollouts = [answer(0, "MTTMM", 1.0), answer(1, "MTTMM", 0.0)]
    algorithm = PPO(PPO.Settings(discount=0.9, gae_lambda=0.5))
    config = Config(rollout=RolloutConfig(share_prefix=False))
    [batch] = step_batches([Group("p", rollouts)], algorithm, config, Layout(1, 64))
    [row] = batch.rows[0]
    assert [count for *_, count in row.owners] == [3, 3]
    columns = {name: torch.from_numpy(getattr(row, name)) for name in ("advantage_S", "weight_S", "offsets_N")}
    nothing_S, value_S = torch.zeros(6), torch.tensor([0.5, 0.25, 0.0] * 2)
    inputs = LossInputs(
        logprob_S=nothing_S, sampling_logprob_S=nothing_S, entropy_S=nothing_S, value_S=value_S, **columns
    )
    refined = algorithm.refine(inputs)
    winner = slice(*row.offsets_N[:2]) if row.owners[0][1] == 0 else slice(*row.offsets_N[1:])
    assert refined.advantage_S[winner].tolist() == pytest.approx([-0.185, 0.2, 1.0], abs=1e-6)
    assert refined.return_S is not None
    assert refined.return_S[winner].tolist() == pytest.approx([0.315, 0.45, 1.0], abs=1e-6)

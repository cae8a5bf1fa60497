"""Every algorithm on a real model: neither the rows that samples fall into nor what the head is told changes gradients.

With everything on that its settings have: a reference (another model), the proximal policy, corrections, entropy.
"""

import pytest
import torch
from batches import batch_of

from titan_rl.algorithms.base import Needs
from titan_rl.algorithms.registry import ALGORITHMS, make_algorithm
from titan_rl.config.load import load_config
from titan_rl.config.sections.schema import AlgorithmConfig
from titan_rl.models.builtin.tiny import make_tiny
from titan_rl.trainer.step.learner import Learner
from titan_rl.trainer.titan_config import build_titan

pytestmark = pytest.mark.usefixtures("process_group")

ALONE = sorted(name for name, cls in ALGORITHMS.items() if cls.trains_on == "rollouts" and cls().needs == Needs())
"""Algorithms that need no other model unless their settings ask for one."""
CORRECTED = {"decoupled": True, "importance": "token", "importance_high": 1.02}
KL = {"kl_coefficient": 0.1}
REJECT = {"reject": "geometric", "reject_low": 0.9, "reject_high": 1.1}
CASES = [
    *((name, {}) for name in ALONE),
    *((name, KL | {"entropy_coefficient": 0.01, **REJECT}) for name in ALONE),
    ("grpo", KL | CORRECTED | {"kl_estimator": "k3_unbiased"}),
    ("gspo", KL | CORRECTED | {"importance": "sequence", "token_gradient": True}),
    ("rloo", CORRECTED | {"importance": "geometric", "importance_bound": "mask"}),
    ("reinforce_pp", KL | CORRECTED | {"kl_in": "reward", "kl_estimator": "k1", "discount": 0.9}),
    ("dapo", KL | {"kl_in": "reward", "kl_estimator": "k2"}),
    ("sapo", KL | CORRECTED | {"kl_estimator": "k3_unbiased"}),
    ("dppo", KL | CORRECTED | {"divergence": "kl", "threshold": 0.001}),
]
TOLD = [
    (name, options)
    for name, options in CASES
    if make_algorithm(AlgorithmConfig(name=name, options=options), []).is_token_sum
]
CASE = pytest.mark.parametrize(("name", "options"), CASES)
ROLLOUTS = [
    *((name, {}) for name in ("grpo", "gspo")),
    *((name, options) for name, options in CASES if "importance" in options or "kl_in" in options),
    *((name, KL | {"entropy_coefficient": 0.01, **REJECT}) for name in ("grpo", "gspo")),
    ("turn_grpo", {"decoupled": True, "importance": "sequence", "importance_high": 1.02}),
]
"""Ratios and returns of whole rollouts, and one of tokens alone."""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The policy's directory, and the reference's."""
    paths = [tmp_path_factory.mktemp(name) for name in ("policy", "reference")]
    for seed, path in enumerate(paths, 1):
        make_tiny(path, seed=seed, hidden_size=32, num_layers=1)
    return paths


@pytest.fixture
def make_learner(models):
    policy, reference = models

    def make(name: str, options: dict) -> Learner:
        tables = {"algorithm": {"name": name, **options}, "reference": {"path": str(reference)}}
        config = load_config(None, tables)
        return Learner(config, build_titan(config), policy)

    return make


def gradient(learner: Learner, **layout) -> tuple[dict[str, float], torch.Tensor]:
    [rows] = learner.prepare([batch_of(0, **layout).rows[0]])
    totals = learner.forward_backward(rows)
    flat = torch.cat([p.grad.full_tensor().detach().flatten().clone() for p in learner.model_parts[0].parameters()])
    learner.optimizer.zero_grad()
    return {name: float(value) for name, value in totals.items()}, flat


@CASE
def test_layout_changes_neither_loss_nor_gradient(make_learner, name, options):
    learner = make_learner(name, options)
    totals, flat = gradient(learner, row_tokens=1000, share_prefix=False)
    assert flat.norm() > 0 and totals["count"] > 0
    for layout in ({"row_tokens": 20}, {"row_tokens": 40, "share_prefix": False}, {"row_tokens": 1000}):
        other_totals, other_flat = gradient(learner, **layout)
        assert other_totals == pytest.approx(totals, rel=1e-5, abs=1e-6)
        assert (other_flat - flat).norm() < 1e-5 * flat.norm()


@pytest.mark.parametrize(("name", "options"), ROLLOUTS)
def test_branches_of_a_rollout_may_lie_in_any_rows(make_learner, name, options):
    """With ratios of whole rollouts, and what is taken off rewards, as in one row that holds them all."""
    learner = make_learner(name, options)
    totals, flat = gradient(learner, row_tokens=1000, share_prefix=False, branches=True)
    assert flat.norm() > 0 and totals["count"] > 0
    assert any(row.split for row in batch_of(0, row_tokens=20, branches=True).rows[0])
    for layout in ({"row_tokens": 20}, {"row_tokens": 40, "share_prefix": False}, {"row_tokens": 1000}):
        other_totals, other_flat = gradient(learner, **layout, branches=True)
        assert other_totals == pytest.approx(totals, rel=1e-5, abs=1e-6)
        assert (other_flat - flat).norm() < 1e-5 * flat.norm()


@pytest.mark.parametrize(("name", "options"), TOLD)
def test_the_head_is_told_the_gradient_that_the_loss_has(make_learner, name, options):
    learner = make_learner(name, options)
    told = gradient(learner, row_tokens=64)
    learner.algorithm.is_token_sum = False
    found = gradient(learner, row_tokens=64)
    assert found[0] == told[0] and (found[1] - told[1]).norm() <= 1e-6 * told[1].norm()


def test_everything_is_on(make_learner):
    """What is tested above would be tested of nothing if the reference were the policy, or no sample were rejected."""
    learner = make_learner("grpo", KL | CORRECTED | REJECT)
    totals, _ = gradient(learner, row_tokens=64)
    assert totals["reference_kl"] / totals["count"] > 1e-3
    assert 0 < totals["rejected_fraction"] < totals["count"]
    assert 0 < totals["importance_bounded"] < totals["count"]


def test_an_entropy_bonus_moves_the_weights_alone(make_learner):
    """With advantages of zero, along the gradient of the entropy."""
    learner = make_learner("grpo", {"entropy_coefficient": 0.01})
    [before] = learner.train_step([batch_of(0, scale=0.0).rows[0]], [False])
    for _ in range(5):
        [after] = learner.train_step([batch_of(0, scale=0.0).rows[0]], [False])
    assert after.entropy > before.entropy

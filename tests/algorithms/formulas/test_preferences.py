"""Losses of preferences against float64 arithmetic that is written out here: values and gradients, and what must not
change them."""

import math

import numpy as np
import pytest
import torch

from titan_rl.algorithms.base import LossInputs
from titan_rl.algorithms.offline.dpo import DPO
from titan_rl.algorithms.offline.kto import KTO, with_zero
from titan_rl.algorithms.offline.reference_free import ORPO, SimPO
from titan_rl.algorithms.offline.reward_model import RewardModel

LENGTHS = (3, 1, 1, 4, 2, 5)
"""Trained tokens of each sample: ragged, and answers of one token; three pairs."""
MASKED = (1, 5)
"""Tokens of weight 0 (of samples 0 and 3)."""


def columns(seed: int = 0, scale: float = 1.0) -> dict[str, np.ndarray]:
    rng, count = np.random.default_rng(seed), sum(LENGTHS)
    owner_S = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    live_S = ~np.isin(np.arange(count), MASKED)
    weight_S = live_S / np.array([live_S[owner_S == n].sum() for n in owner_S]) / len(LENGTHS)
    logprob_S = -rng.exponential(1.0, count) * scale - 0.01
    reference_S = -rng.exponential(1.0, count) * scale - 0.01
    return dict(owner=owner_S, weight=weight_S, logprob=logprob_S, reference=reference_S)


def inputs(found: dict, *, advantage=0.0, value: bool = False) -> tuple[LossInputs, torch.Tensor]:
    """float64; and the leaf whose gradient is wanted."""
    leaf_S = torch.tensor(found["logprob"], requires_grad=True)
    weight_S, zeros_S = torch.tensor(found["weight"]), torch.zeros(len(found["weight"]), dtype=torch.float64)
    advantage_S = zeros_S + torch.tensor(np.broadcast_to(advantage, len(zeros_S)).copy())
    offsets_N = torch.tensor([0, *np.cumsum(np.bincount(found["owner"], minlength=len(LENGTHS)))])
    roles = dict(value_S=leaf_S) if value else dict(reference_logprob_S=torch.tensor(found["reference"]))
    return LossInputs(zeros_S if value else leaf_S, zeros_S, advantage_S, weight_S, zeros_S, offsets_N, **roles), leaf_S


def by_sample(found: dict, name: str) -> list[list[float]]:
    """The values that count, by sample."""
    live = found["weight"] > 0
    return [list(found[name][(found["owner"] == n) & live]) for n in range(len(LENGTHS))]


def numerical_gradient(loss, found: dict, step: float = 1e-5) -> np.ndarray:
    """By central differences of the reference computation."""
    gradient = np.zeros(len(found["logprob"]))
    for place in range(len(gradient)):
        ends = []
        for sign in (1, -1):
            moved = found["logprob"].copy()
            moved[place] += sign * step
            ends.append(loss(found | {"logprob": moved}))
        gradient[place] = (ends[0] - ends[1]) / (2 * step)
    return gradient


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > -30 else x


def pairs_of(found: dict, mean: bool = False) -> list[tuple[float, float, float, float]]:
    """Log-probabilities of the chosen and the rejected answer, under policy and reference."""
    totals = {}
    for name in ("logprob", "reference"):
        totals[name] = [sum(v) / (len(v) if mean else 1) for v in by_sample(found, name)]
    policy, reference = totals["logprob"], totals["reference"]
    return [(policy[n], policy[n + 1], reference[n], reference[n + 1]) for n in range(0, len(LENGTHS), 2)]


def dpo_by_hand(found: dict, loss: str, beta: float, smoothing: float, mean: bool) -> float:
    total = 0.0
    for chosen, rejected, chosen_reference, rejected_reference in pairs_of(found, mean):
        h = (chosen - chosen_reference) - (rejected - rejected_reference)
        total += {
            "sigmoid": lambda h=h: -(1 - smoothing) * log_sigmoid(beta * h) - smoothing * log_sigmoid(-beta * h),
            "robust": lambda h=h: (
                (-(1 - smoothing) * log_sigmoid(beta * h) + smoothing * log_sigmoid(-beta * h)) / (1 - 2 * smoothing)
            ),
            "ipo": lambda h=h: (h - 1 / (2 * beta)) ** 2,
            "hinge": lambda h=h: max(0.0, 1 - beta * h),
        }[loss]()
    return total / 3


def simpo_by_hand(found: dict) -> float:
    return sum(-log_sigmoid(2.0 * (c - r) - 1.0) for c, r, _, _ in pairs_of(found, mean=True)) / 3


def orpo_by_hand(found: dict) -> float:
    def odds(mean: float) -> float:
        return mean - math.log(1 - math.exp(mean))

    return sum(-c - 0.1 * log_sigmoid(odds(c) - odds(r)) for c, r, _, _ in pairs_of(found, mean=True)) / 3


LABELS = (1, -1, -1, 1, 1, -1)
ZERO = 0.7


def kto_by_hand(found: dict) -> float:
    total = 0.0
    for label, ours, theirs in zip(LABELS, by_sample(found, "logprob"), by_sample(found, "reference"), strict=True):
        ratio = sum(ours) - sum(theirs)
        weight = 1.5 if label > 0 else 0.5
        total += weight * (1 - 1 / (1 + math.exp(-0.3 * label * (ratio - ZERO))))
    return total / len(LABELS)


MARGINS = (0.5, 0.0, 2.0)


def reward_model_by_hand(found: dict) -> float:
    last = [values[-1] for values in by_sample(found, "logprob")]
    return (
        sum(
            -log_sigmoid(last[2 * p] - last[2 * p + 1] - MARGINS[p]) + 0.01 * (last[2 * p] + last[2 * p + 1]) ** 2
            for p in range(3)
        )
        / 3
    )


def labels_S(found: dict) -> np.ndarray:
    return np.array([with_zero(LABELS[n], ZERO) for n in found["owner"]])


def margins_S(found: dict) -> np.ndarray:
    return np.array([0.0 if n % 2 else MARGINS[n // 2] for n in found["owner"]])


CASES = {
    f"{loss} {smoothing} {mean}": (
        DPO(DPO.Settings(loss=loss, beta=0.3, label_smoothing=smoothing, length_normalize=mean)),
        lambda found, loss=loss, smoothing=smoothing, mean=mean: dpo_by_hand(found, loss, 0.3, smoothing, mean),
        {},
    )
    for loss, smoothing in (("sigmoid", 0.0), ("sigmoid", 0.2), ("robust", 0.2), ("ipo", 0.0), ("hinge", 0.0))
    for mean in (False, True)
}
CASES["simpo"] = (SimPO(), simpo_by_hand, {})
CASES["orpo"] = (ORPO(), orpo_by_hand, {})
CASES["kto"] = (
    KTO(KTO.Settings(beta=0.3, desirable_weight=1.5, undesirable_weight=0.5)),
    kto_by_hand,
    {"advantage": labels_S},
)
CASES["reward model"] = (
    RewardModel(RewardModel.Settings(centering=0.01)),
    reward_model_by_hand,
    {"advantage": margins_S, "value": True},
)


def loss_and_gradient(name: str, found: dict) -> tuple[torch.Tensor, dict, torch.Tensor]:
    algorithm, _, settings = CASES[name]
    advantage = settings["advantage"](found) if "advantage" in settings else 0.0
    given, leaf_S = inputs(found, advantage=advantage, value=settings.get("value", False))
    loss, metrics = algorithm.loss(given)
    loss.backward()
    return loss.detach(), metrics, leaf_S.grad


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_are_those_of_the_formula(name, seed):
    found, by_hand = columns(seed), CASES[name][1]
    loss, _, gradient_S = loss_and_gradient(name, found)
    assert loss.item() == pytest.approx(by_hand(found), abs=1e-9)
    wanted = numerical_gradient(by_hand, found)
    assert np.abs(gradient_S.numpy() - wanted).max() < 1e-6 and np.abs(wanted).max() > 1e-3


@pytest.mark.parametrize("name", CASES)
def test_huge_ratios_stay_finite(name):
    loss, _, gradient_S = loss_and_gradient(name, columns(1, scale=1e4))
    assert torch.isfinite(loss) and torch.isfinite(gradient_S).all()


@pytest.mark.parametrize("name", CASES)
def test_a_masked_sample_and_its_partner_count_for_nothing(name):
    """Whatever it holds; labels have no partner."""
    found = columns(2)
    masked = found["owner"] == 3
    found["weight"] = np.where(masked, 0.0, found["weight"])
    held = found | {"logprob": np.where(masked, np.nan, found["logprob"])}
    loss, _, gradient_S = loss_and_gradient(name, held)
    algorithm, _, settings = CASES[name]
    gone = (3,) if name == "kto" else (2, 3)
    assert torch.isfinite(loss) and torch.isfinite(gradient_S).all()
    assert not gradient_S[np.isin(found["owner"], gone)].any() and gradient_S[found["owner"] == 0].any()
    kept = ~np.isin(found["owner"], gone)
    shorter = {key: values[kept] for key, values in found.items()}
    if name != "kto":  # the samples that are left are numbered anew
        shorter["owner"] = np.where(shorter["owner"] > 3, shorter["owner"] - 2, shorter["owner"])
        settings = settings | ({"advantage": lambda _: margins_S(found)[kept]} if "advantage" in settings else {})
    advantage = settings["advantage"](shorter) if "advantage" in settings else 0.0
    given, _ = inputs(shorter, advantage=advantage, value=settings.get("value", False))
    assert algorithm.loss(given)[0].item() == pytest.approx(loss.item(), abs=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_what_is_not_finite_and_counts_makes_the_loss_so(name):
    """It is then named, and nothing is learned from it (trainer/objective/nonfinite.py)."""
    found = columns(3)
    counts = int(np.flatnonzero(found["owner"] == 2)[-1])
    found["logprob"][counts] = -np.inf
    loss, _, _ = loss_and_gradient(name, found)
    assert not torch.isfinite(loss)


@pytest.mark.parametrize("name", CASES)
def test_a_row_of_pairs_is_the_sum_of_its_parts(name):
    """However pairs are spread over rows, of which some only fill up."""
    found = columns(4)
    whole, metrics, gradient_S = loss_and_gradient(name, found)
    algorithm, _, settings = CASES[name]
    parts, sums, gradients = 0.0, dict.fromkeys(metrics, 0.0), []
    for pair in range(3):
        part = np.isin(found["owner"], (2 * pair, 2 * pair + 1))
        piece = {key: values[part] for key, values in found.items()}
        advantage = settings["advantage"](found)[part] if "advantage" in settings else 0.0
        piece["owner"] = piece["owner"] - 2 * pair
        given, leaf_S = inputs(piece, advantage=advantage, value=settings.get("value", False))
        loss, counted = algorithm.loss(given)
        loss.backward()
        parts, gradients = parts + loss.item(), [*gradients, leaf_S.grad]
        sums = {key: total + counted[key].item() for key, total in sums.items()}
    assert parts == pytest.approx(whole.item(), abs=1e-12)
    assert torch.allclose(torch.cat(gradients), gradient_S, atol=1e-12)
    assert sums == pytest.approx({key: value.item() for key, value in metrics.items()}, abs=1e-12)


def test_metrics_tell_what_is_preferred():
    found = columns(5)
    _, metrics, _ = loss_and_gradient("sigmoid 0.0 False", found)
    differences = [(c - cr) - (r - rr) for c, r, cr, rr in pairs_of(found)]
    assert metrics["rewards/margins"].item() == pytest.approx(0.3 * sum(differences))
    assert metrics["rewards/accuracies"].item() == sum(d > 0 for d in differences) and not metrics["rewards/ties"]


def test_certain_answers_have_odds_that_are_finite():
    found = columns(6) | {"logprob": np.zeros(sum(LENGTHS))}
    loss, _, gradient_S = loss_and_gradient("orpo", found)
    assert torch.isfinite(loss) and torch.isfinite(gradient_S).all()


def test_smoothing_has_a_meaning():
    with pytest.raises(ValueError, match="no meaning with loss = 'ipo'"):
        DPO.Settings(loss="ipo", label_smoothing=0.1)
    with pytest.raises(ValueError, match="loss = 'robust' is 'sigmoid' with label_smoothing = 0: set label_smoothing"):
        DPO.Settings(loss="robust")

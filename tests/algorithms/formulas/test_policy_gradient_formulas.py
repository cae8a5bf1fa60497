"""Every surrogate, divergence and off-policy correction against the field's formulas, written out here a sample at a
time in numpy's float64, with gradients by central differences; what a formula holds constant is held constant.

Sources: TRL's GRPOTrainer, verl's core_algos and rollout correction, OpenRLHF's loss, prime-rl's loss.
"""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from kernel_checks import run_interpreted

from titan_rl.algorithms.base import LossInputs, Needs
from titan_rl.algorithms.policy_gradient.grpo import GRPO, DrGRPO
from titan_rl.algorithms.policy_gradient.ratios.cispo import CISPO
from titan_rl.algorithms.policy_gradient.ratios.dapo import DAPO
from titan_rl.algorithms.policy_gradient.ratios.dppo import DPPO
from titan_rl.algorithms.policy_gradient.ratios.gspo import GSPO
from titan_rl.algorithms.policy_gradient.ratios.sapo import SAPO
from titan_rl.algorithms.policy_gradient.reinforce_pp import ReinforcePP
from titan_rl.algorithms.policy_gradient.rloo import RLOO
from titan_rl.algorithms.registry import ALGORITHMS

INF, NAN = math.inf, math.nan
LENGTHS = (5, 1, 3, 7, 1, 4)
"""Tokens of each sample: ragged, of one token, and the third has none that counts."""
COLUMNS = ("logprob", "sampling", "proximal", "reference", "advantage", "weight", "entropy")

WIDE = {"clip_low": 0.1, "clip_high": 0.3}
CORRECTED = {"decoupled": True, **WIDE}
CASES = {
    "grpo": (GRPO, {}),
    "bounds apart": (GRPO, WIDE),
    "dr_grpo": (DrGRPO, WIDE),
    "dapo": (DAPO, {}),
    "dual clip": (GRPO, {"dual_clip": 1.5}),
    "rloo": (RLOO, {}),
    "reinforce_pp": (ReinforcePP, {}),
    "gspo": (GSPO, {"clip_low": 0.05, "clip_high": 0.1}),
    "gspo token": (GSPO, {"clip_low": 0.05, "clip_high": 0.1, "token_gradient": True}),
    "cispo": (CISPO, {"clip_low": 0.2, "clip_high": 0.1}),
    "cispo without a lower bound": (CISPO, {"clip_high": 0.1}),
    "sapo": (SAPO, {"tau_positive": 2.0, "tau_negative": 3.0}),
    "corrected sapo": (SAPO, {"decoupled": True, "importance": "token", "importance_high": 1.2}),
    "dppo": (DPPO, {"threshold": 0.02}),
    "dppo by kl": (DPPO, {"divergence": "kl", "threshold": 0.005}),
    "dppo, dual clip": (DPPO, {"threshold": 0.02, "dual_clip": 1.5}),
    "corrected dppo": (DPPO, {"threshold": 0.02, "decoupled": True, "importance": "token", "importance_high": 1.2}),
    "entropy": (GRPO, {"entropy_coefficient": 0.01}),
    "decoupled": (GRPO, CORRECTED),
    **{
        f"{estimator} {cls.__name__}": (cls, {"kl_coefficient": 0.3, "kl_estimator": estimator})
        for estimator in ("k2", "k3", "k3_unbiased")
        for cls in (GRPO, GSPO, CISPO, SAPO, DPPO)
    },
    **{
        f"bounded {estimator}": (GRPO, {"kl_coefficient": 0.3, "kl_estimator": estimator, "kl_clip": 0.05})
        for estimator in ("k2", "k3", "k3_unbiased")
    },
    **{
        f"{bound} {level}": (GRPO, {"importance": level, "importance_bound": bound, "importance_high": 1.2} | CORRECTED)
        for bound in ("truncate", "mask")
        for level in ("token", "sequence", "geometric")
    },
    "icepop": (GRPO, {"importance": "token", "importance_bound": "mask", "importance_low": 0.8} | CORRECTED),
    "corrected gspo": (GSPO, {"importance": "sequence", **CORRECTED}),
    "corrected divergence": (
        GRPO,
        {"importance": "token", "kl_coefficient": 0.2, "kl_estimator": "k3_unbiased", **CORRECTED},
    ),
    **{
        f"reject {level} {decoupled}": (GRPO, {"reject": level, "decoupled": decoupled, **bounds})
        for level, bounds in {
            "sequence": {"reject_low": 0.5, "reject_high": 1.5},
            "geometric": {"reject_low": 0.8, "reject_high": 1.25},
            "worst_token": {"reject_low": 0.45},
        }.items()
        for decoupled in (False, True)
    },
    "reject the worse": (GRPO, {"reject": "geometric", "reject_low": 0.9, "reject_only_negative": True}),
}
"""An algorithm and its settings; bounds are such that some tokens lie within and some outside."""
ALL = pytest.mark.parametrize("case", CASES)


def made_up(lengths=LENGTHS, seed=0, dtype=np.float64) -> dict[str, np.ndarray]:
    """Columns of a row by name. A token of weight 0 holds NaN; two ratios are huge and one is tiny."""
    rng = np.random.default_rng(seed)
    count = sum(lengths)
    old = -3 * rng.random(count) - 0.5
    columns = {name: old + 0.3 * rng.normal(size=count) for name in ("logprob", "sampling", "proximal", "reference")}
    columns |= {"advantage": rng.normal(size=count), "entropy": rng.random(count), "weight": rng.random(count) + 0.1}
    trained = rng.random(count) < 0.8
    begins = np.cumsum((0, *lengths))
    for number, length in enumerate(lengths):
        trained[begins[number] : begins[number + 1]] |= length == 1
    if len(lengths) > 3:
        trained[begins[2] : begins[3]] = False
        last = begins[3] + np.arange(3)
        trained[last] = True
        columns["logprob"][last] += (30.0, -30.0, 12.0)
    untrained = NAN * np.ones(count)
    columns = {name: np.where(trained, x, 0.0 if name == "weight" else untrained) for name, x in columns.items()}
    return {name: x.astype(np.float32).astype(dtype) for name, x in columns.items()}


def samples_of(columns: dict, lengths=LENGTHS) -> list[dict[str, np.ndarray]]:
    """The trained tokens of each sample."""
    ends = np.cumsum(lengths)
    parts = [{name: x[end - n : end] for name, x in columns.items()} for n, end in zip(lengths, ends, strict=True)]
    return [{name: x[part["weight"] > 0] for name, x in part.items()} for part in parts]


# The field's formulas: of one sample, all of whose tokens count. ``held``: what a stop-gradient sees.


def cut_exp(x):
    return np.exp(np.clip(x, -20, 20))


def published_importance(s, sample):
    if not s.decoupled or s.importance == "none":
        return 1.0
    log_ratio = sample["proximal"] - sample["sampling"]
    ratio = {"token": cut_exp(log_ratio), "sequence": cut_exp(log_ratio.sum()), "geometric": cut_exp(log_ratio.mean())}
    weight = ratio[s.importance]
    if s.importance_bound == "truncate":
        return np.minimum(weight, s.importance_high)
    return np.where((weight > s.importance_high) | (weight < s.importance_low), 0.0, weight)


def published_is_rejected(s, sample, held) -> bool:
    if s.reject == "none":
        return False
    log_ratio = (sample["proximal"] if s.decoupled else held) - sample["sampling"]
    ratios = {"sequence": [log_ratio.sum()], "geometric": [log_ratio.mean()], "worst_token": log_ratio}[s.reject]
    high = INF if s.reject_high is None else s.reject_high
    return bool((cut_exp(np.array(ratios)) < s.reject_low).any() or (cut_exp(np.array(ratios)) > high).any())


def published_mask(s, held, sampling, advantage):
    """DPPO, equations 12 to 14: whether a token is kept."""
    held, sampling = np.minimum((held, sampling), 0)
    (p, q), eps = np.exp((held, sampling)), np.finfo(np.float64).eps
    divergence, threshold = np.abs(p - q), s.threshold or 0.15
    if s.divergence == "kl":
        rest = np.maximum(1 - q, eps)
        divergence = q * (sampling - held) + rest * np.log(rest / np.maximum(1 - p, eps))
    return ~((advantage * (held - sampling) > 0) & (divergence > threshold))


def published_surrogate(cls, s, logprob, held, old, sampling, advantage):
    log_ratio = logprob - old
    if cls is GSPO and not s.token_gradient:
        log_ratio = np.full_like(logprob, log_ratio.mean())
    elif cls is GSPO:
        log_ratio = logprob - held + (held - old).mean()
    ratio = cut_exp(log_ratio)
    if cls is CISPO:
        return -np.clip(cut_exp(held - old), 1 - s.clip_low, 1 + s.clip_high) * advantage * logprob
    if cls is SAPO:
        tau = np.where(advantage > 0, s.tau_positive, s.tau_negative)
        return -4 / tau / (1 + np.exp(-tau * (ratio - 1))) * advantage
    loss = np.maximum(-advantage * ratio, -advantage * np.clip(ratio, 1 - s.clip_low, 1 + s.clip_high))
    if cls is DPPO:
        loss = np.where(published_mask(s, held, sampling, advantage), -ratio * advantage, 0.0)
    if s.dual_clip is not None:
        loss = np.where(advantage < 0, np.minimum(-advantage * s.dual_clip, loss), loss)
    return loss


def published_divergence(estimator, bound, logprob, reference, old, importance):
    """``bound``: verl's clamp of k3, and OpenRLHF's of any."""
    x = reference - logprob
    if estimator == "k2":
        return np.minimum(0.5 * (logprob - reference) ** 2, bound)
    k3 = np.minimum(cut_exp(x) - np.clip(x, -20, 20) - 1, bound)
    return k3 if estimator == "k3" else cut_exp(logprob - old) * importance * k3


def published_terms(cls, s, columns, logprob, held, entropy, lengths=LENGTHS) -> np.ndarray:
    """Of all tokens that count; the loss is their sum."""
    all_terms = []
    for sample in samples_of(columns | {"logprob": logprob, "held": held, "entropy": entropy}, lengths):
        if len(sample["weight"]) and published_is_rejected(s, sample, sample["held"]):
            kept = sample["advantage"] >= 0 if s.reject_only_negative else np.zeros(len(sample["weight"]), bool)
            assert cls is GRPO  # whose other tokens do not know of those that are left out
            sample = {name: x[kept] for name, x in sample.items()}
        if not len(sample["weight"]):
            continue
        old = sample["proximal"] if s.decoupled else sample["sampling"]
        importance = published_importance(s, sample)
        columns_of = *(sample[name] for name in ("logprob", "held")), old, sample["sampling"], sample["advantage"]
        terms = importance * published_surrogate(cls, s, *columns_of)
        if s.kl_coefficient and s.kl_in == "loss":
            bound = INF if s.kl_clip is None else s.kl_clip
            kl = published_divergence(s.kl_estimator, bound, sample["logprob"], sample["reference"], old, importance)
            terms = terms + s.kl_coefficient * kl
        all_terms.append(sample["weight"] * (terms - s.entropy_coefficient * sample["entropy"]))
    return np.concatenate(all_terms)


def differences(function, x: np.ndarray, moved: np.ndarray) -> np.ndarray:
    """The gradient of the sum of ``function``'s terms at ``x``, of the ``moved`` entries, by central differences of
    fourth order; of each term first, so that a huge one hides no other."""
    gradient, step = np.zeros_like(x), 1e-4
    for place in np.flatnonzero(moved):
        at = [function(np.where(np.arange(len(x)) == place, x + k * step, x)) for k in (-2, -1, 1, 2)]
        gradient[place] = ((at[0] - at[3]) - 8 * (at[1] - at[2])).sum() / (12 * step)
    return gradient


# Ours


def inputs_of(columns: dict, lengths=LENGTHS, dtype=torch.float64) -> LossInputs:
    c = {name: torch.tensor(x, dtype=dtype) for name, x in columns.items()}
    return LossInputs(
        *(c[name] for name in ("logprob", "sampling", "advantage", "weight", "entropy")),
        offsets_N=torch.tensor((0, *lengths)).cumsum(0),
        reference_logprob_S=c["reference"],
        proximal_logprob_S=c["proximal"],
    )


def evaluate(algorithm, inputs: LossInputs):
    """Loss, its gradients for log-probabilities and entropies, metrics."""
    leaves = [inputs.logprob_S.clone().requires_grad_(), inputs.entropy_S.clone().requires_grad_()]
    loss, metrics = algorithm.loss(replace(inputs, logprob_S=leaves[0], entropy_S=leaves[1]))
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    grads = [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, grads, strict=True)]
    return loss.item(), *(grad.double().numpy() for grad in grads), {k: float(v) for k, v in metrics.items()}


def close(found, expected, tolerance=1e-6) -> None:
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)


def compare(case: str, dtype: torch.dtype, implementation: str) -> None:
    cls, options = CASES[case]
    algorithm = cls(cls.Settings(**options))
    algorithm.implementation = implementation
    columns = made_up()
    loss, grad_S, entropy_grad_S, _ = evaluate(algorithm, inputs_of(columns, dtype=dtype))
    held, entropy, trained_S = columns["logprob"], columns["entropy"], columns["weight"] > 0
    close(loss, published_terms(cls, algorithm.settings, columns, held, held, entropy).sum())

    def of_logprob(logprob):
        return published_terms(cls, algorithm.settings, columns, logprob, held, entropy)

    def of_entropy(entropy):
        return published_terms(cls, algorithm.settings, columns, held, held, entropy)

    expected_S = differences(of_logprob, held, trained_S)
    close(grad_S / max(1, np.abs(expected_S).max()), expected_S / max(1, np.abs(expected_S).max()))
    close(entropy_grad_S, differences(of_entropy, entropy, trained_S))


@ALL
def test_loss_and_gradient_are_the_published_ones(case):
    compare(case, torch.float64, "reference")


@ALL
def check_loss_and_gradient_by_triton(case):
    compare(case, torch.float32, "triton")


def test_the_bounds_of_divergences_part_the_tokens():
    columns = made_up()
    x_S = (columns["reference"] - columns["logprob"])[columns["weight"] > 0]
    for kl_S in (0.5 * x_S**2, np.exp(np.clip(x_S, -20, 20)) - 1 - np.clip(x_S, -20, 20)):
        assert 0 < (kl_S > 0.05).sum() < len(kl_S)


def test_triton_in_its_interpreter():
    run_interpreted(__file__)


@ALL
def test_every_case_tells_its_tokens_apart(case):
    """Bounds that all tokens keep, or none, would test nothing."""
    cls, options = CASES[case]
    algorithm, columns = cls(cls.Settings(**options)), made_up()
    *_, metrics = evaluate(algorithm, inputs_of(columns))
    count = (columns["weight"] > 0).sum()
    told = {"importance_bounded", "rejected_fraction", "masked_fraction", "gate_slope"} & metrics.keys()
    for name in told or {"clip_fraction"}:
        assert 0 < metrics[name] < count, (case, name)


@ALL
def test_any_split_of_samples_into_rows_has_the_same_total(case):
    cls, options = CASES[case]
    algorithm, columns = cls(cls.Settings(**options)), made_up()
    whole = evaluate(algorithm, inputs_of(columns))
    for ends in ((1, 2, 3, 4, 5, 6), (3, 6), (1, 6), (4, 5, 6)):
        parts = []
        for begin, end in itertools.pairwise((0, *ends)):
            places = slice(sum(LENGTHS[:begin]), sum(LENGTHS[:end]))
            part = {name: x[places] for name, x in columns.items()}
            parts.append(evaluate(algorithm, inputs_of(part, LENGTHS[begin:end])))
        close(sum(part[0] for part in parts), whole[0], 1e-12)
        close(np.concatenate([part[1] for part in parts]), whole[1], 1e-12)
        for name, total in whole[3].items():
            close(sum(part[3][name] for part in parts), total, 1e-12)


@ALL
@pytest.mark.parametrize("value", [-INF, INF, NAN])
def test_what_is_no_number_is_never_hidden(case, value):
    """In whatever column the loss reads, of a token that counts; the other samples' gradients stay as they were."""
    cls, options = CASES[case]
    algorithm, columns = cls(cls.Settings(**options)), made_up((3, 4, 1))
    read = {"logprob": True, "sampling": True, "proximal": algorithm.needs.proximal}
    read |= {"reference": algorithm.needs.reference}
    _, grad_S, _, _ = evaluate(algorithm, inputs_of(columns, (3, 4, 1)))
    for name in (name for name, is_read in read.items() if is_read):
        bad = columns | {name: columns[name].copy()}
        bad[name][3 + np.flatnonzero(columns["weight"][3:7] > 0)[0]] = value
        loss, bad_grad_S, _, _ = evaluate(algorithm, inputs_of(bad, (3, 4, 1)))
        assert math.isnan(loss), name
        np.testing.assert_array_equal(bad_grad_S[:3], grad_S[:3])
        np.testing.assert_array_equal(bad_grad_S[7:], grad_S[7:])


@pytest.mark.parametrize(
    "name", [name for name, cls in sorted(ALGORITHMS.items()) if cls.trains_on == "rollouts" and cls().needs == Needs()]
)
def test_a_row_in_which_nothing_counts(name):
    columns = {key: np.full(4, -INF) for key in COLUMNS} | {"weight": np.zeros(4)}
    settings = {"kl_coefficient": 0.1, "entropy_coefficient": 0.1, "decoupled": True, "importance": "geometric"}
    settings |= {"reject": "worst_token", "reject_low": 0.1}
    algorithm = ALGORITHMS[name](ALGORITHMS[name].Settings(**settings))
    loss, grad_S, entropy_grad_S, metrics = evaluate(algorithm, inputs_of(columns, (2, 2)))
    assert loss == 0 and not grad_S.any() and not entropy_grad_S.any() and not any(metrics.values())

"""Distillation against formulas written out in numpy's float64, and the head's words against logits in full."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from titan_rl.algorithms.base import LossInputs
from titan_rl.algorithms.policy_gradient.teachers.distillation import Distillation, binned_divergence
from titan_rl.config.load import ConfigError, load_config
from titan_rl.controller.preflight.checks import check
from titan_rl.data.storage.sampling_mask import SamplingMask
from titan_rl.kernels.linear_logprob import linear_logprob
from titan_rl.models.builtin.tiny import make_tiny
from titan_rl.models.layers import top_tokens
from titan_rl.models.layers.decoder import Float32Head

LENGTHS = (5, 1, 3, 7, 1, 4)
"""Tokens of each sample: ragged, of one token, and the third has none that counts."""
OFFSETS = np.concatenate([[0], np.cumsum(LENGTHS)])
S, V = int(OFFSETS[-1]), 11


def columns(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    names = ("logprob_S", "sampling_logprob_S", "teacher_logprob_S", "proximal_logprob_S", "entropy_S")
    found = {name: -np.abs(rng.normal(1, 0.5, S)) for name in names}
    weight_S = rng.uniform(0.5, 1.5, S) / S
    weight_S[OFFSETS[2] : OFFSETS[3]] = 0
    weight_S[1] = 0
    found["teacher_logprob_S"][-1] = -300.0  # what the student said, the teacher never would
    return found | {"weight_S": weight_S, "advantage_S": np.zeros(S)}


def inputs_of(found: dict[str, np.ndarray], **more) -> LossInputs:
    tensors = {name: torch.tensor(values, dtype=torch.float64) for name, values in (found | more).items()}
    return LossInputs(**tensors, offsets_N=torch.tensor(OFFSETS))


def credited(reward_S: np.ndarray, weight_S: np.ndarray, discount: float) -> np.ndarray:
    """What every token is credited with, a token at a time."""
    out_S = np.zeros(S)
    for begin, end in zip(OFFSETS, OFFSETS[1:], strict=False):
        for t in range(begin, end):
            out_S[t] = sum(discount ** (u - t) * reward_S[u] for u in range(t, end) if weight_S[u] > 0)
    return out_S


@pytest.mark.parametrize("discount", [0.0, 0.9, 1.0])
def test_a_token_is_credited_with_what_the_teacher_says_from_it_on(discount):
    found, algorithm = columns(), Distillation(Distillation.Settings(discount=discount))
    wanted_S = credited(found["teacher_logprob_S"] - found["sampling_logprob_S"], found["weight_S"], discount)
    got_S = algorithm.refine(inputs_of(found)).advantage_S
    np.testing.assert_allclose(got_S.numpy(), wanted_S, rtol=1e-6, atol=1e-6)


def test_the_proximal_policy_is_what_decoupled_distillation_judges():
    found, algorithm = columns(), Distillation(Distillation.Settings(decoupled=True))
    wanted_S = credited(found["teacher_logprob_S"] - found["proximal_logprob_S"], found["weight_S"], 0.0)
    np.testing.assert_allclose(algorithm.refine(inputs_of(found)).advantage_S.numpy(), wanted_S, atol=1e-6)


def test_sampled_loss_and_gradient():
    found = columns()
    found["sampling_logprob_S"][:4] = found["logprob_S"][:4] + [-0.5, -0.1, 0.1, 0.5]  # some are clipped
    algorithm, weight_S = Distillation(), found["weight_S"]
    refined_S = algorithm.refine(inputs_of(found)).advantage_S

    def wanted(logprob_S: np.ndarray) -> float:
        ratio_S = np.exp(np.clip(logprob_S - found["sampling_logprob_S"], -20, 20))
        surrogate_S = np.minimum(ratio_S * refined_S.numpy(), np.clip(ratio_S, 0.8, 1.2) * refined_S.numpy())
        return -(weight_S * surrogate_S).sum()

    inputs = inputs_of(found)
    leaf_S = inputs.logprob_S.requires_grad_()
    loss, sums = algorithm.loss(replace(inputs, advantage_S=refined_S))
    loss.backward()
    assert loss.item() == pytest.approx(wanted(found["logprob_S"]), rel=1e-6, abs=1e-6)
    np.testing.assert_allclose(leaf_S.grad.numpy(), numeric_gradient(wanted, found["logprob_S"]), rtol=1e-6, atol=1e-6)
    counted_S = weight_S > 0
    distance = (found["logprob_S"] - found["teacher_logprob_S"])[counted_S].sum()
    assert float(sums["teacher_kl"]) == pytest.approx(distance, rel=1e-6)


def numeric_gradient(function, at: np.ndarray, step: float = 1e-6) -> np.ndarray:
    out = np.zeros_like(at)
    for place in np.ndindex(*at.shape):
        high, low = at.copy(), at.copy()
        high[place] += step
        low[place] -= step
        out[place] = (function(high) - function(low)) / (2 * step)
    return out


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@pytest.mark.parametrize("top_k", [1, 3, V - 1])
def test_the_divergence_over_the_teachers_words_and_the_rest(top_k):
    """As a function of the student's logits, through all of its log-probabilities."""
    rng, weight_S = np.random.default_rng(3), columns()["weight_S"]
    logits_SV, teacher_SV = rng.normal(0, 2, (S, V)), log_softmax(rng.normal(0, 2, (S, V)))
    words_SK = np.argsort(-teacher_SV, axis=1)[:, :top_k]

    def wanted(logits_SV: np.ndarray) -> float:
        total, logprob_SV = 0.0, log_softmax(logits_SV)
        for s in range(S):
            rest = np.setdiff1d(np.arange(V), words_SK[s])
            p = np.append(np.exp(logprob_SV[s, words_SK[s]]), np.exp(logprob_SV[s, rest]).sum())
            q = np.append(np.exp(teacher_SV[s, words_SK[s]]), np.exp(teacher_SV[s, rest]).sum())
            total += weight_S[s] * (p * np.log(p / q)).sum()
        return total

    leaf_SV = torch.tensor(logits_SV, requires_grad=True)
    chosen_SK = leaf_SV.log_softmax(-1).gather(1, torch.tensor(words_SK))
    teacher_SK = torch.tensor(np.take_along_axis(teacher_SV, words_SK, 1))
    inputs = replace(inputs_of(columns()), word_logprob_SK=chosen_SK, teacher_word_logprob_SK=teacher_SK)
    loss, _ = Distillation(Distillation.Settings(top_k=top_k)).loss(inputs)
    loss.backward()
    assert loss.item() == pytest.approx(wanted(logits_SV), rel=1e-6)
    np.testing.assert_allclose(leaf_SV.grad.numpy(), numeric_gradient(wanted, logits_SV), rtol=1e-6, atol=1e-8)


def test_with_the_whole_vocabulary_it_is_the_divergence():
    logits_SV, teacher_SV = (torch.randn(S, V, dtype=torch.float64) for _ in range(2))
    logits_SV.requires_grad_()
    logprob_SV, teacher_SV = logits_SV.log_softmax(-1), teacher_SV.log_softmax(-1)
    whole_S = (logprob_SV.exp() * (logprob_SV - teacher_SV)).sum(-1)
    binned_S = binned_divergence(logprob_SV, teacher_SV)
    torch.testing.assert_close(binned_S, whole_S, rtol=1e-9, atol=1e-9)
    gradients = [torch.autograd.grad(found_S.sum(), logits_SV, retain_graph=True)[0] for found_S in (binned_S, whole_S)]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)


def test_a_distribution_on_one_word_has_finite_numbers():
    logits_SV = (1000.0 * torch.eye(4)).requires_grad_()
    teacher_SV = (1000.0 * torch.eye(4)[[1, 0, 2, 3]]).log_softmax(-1)
    found_S = binned_divergence(logits_SV.log_softmax(-1)[:, :2], teacher_SV[:, :2])
    [gradient_SV] = torch.autograd.grad(found_S.sum(), logits_SV)
    assert found_S.isfinite().all() and gradient_SV.isfinite().all()
    assert float(found_S[0].detach()) == pytest.approx(1000) and found_S[3] == 0


@pytest.mark.parametrize("chunk_size", [1, 64, 2**24])
def test_words_beside_the_target_as_logits_in_full_give_them(monkeypatch, chunk_size):
    monkeypatch.setattr(top_tokens, "_CHUNK_SIZE", chunk_size)
    torch.manual_seed(1)
    hidden_SD, weight_VD = torch.randn(S, 6, dtype=torch.float64), torch.randn(V, 6, dtype=torch.float64)
    target_S, words_SK, grad_SK = torch.randint(V, (S,)), torch.randint(V, (S, 4)), torch.randn(S, 4).double()
    hidden_SD.requires_grad_(), weight_VD.requires_grad_()
    logprob_S, _ = linear_logprob(hidden_SD, weight_VD, target_S, temperature=0.7)
    found_SK = top_tokens.word_logprobs(hidden_SD, weight_VD, target_S, logprob_S, words_SK, temperature=0.7)
    wanted_SV = (hidden_SD @ weight_VD.T / 0.7).log_softmax(-1)
    wanted_SK = wanted_SV.gather(1, words_SK)
    torch.testing.assert_close(found_SK, wanted_SK, rtol=1e-10, atol=1e-10)
    for leaf in (hidden_SD, weight_VD):
        found, wanted = (gradient(x, grad_SK, leaf) for x in (found_SK, wanted_SK))
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    top_SK, top_logprob_SK = top_tokens.likeliest_words(hidden_SD, weight_VD, target_S, logprob_S, 5, temperature=0.7)
    best = wanted_SV.topk(5)
    assert torch.equal(top_SK, best.indices)
    torch.testing.assert_close(top_logprob_SK, best.values, rtol=1e-10, atol=1e-10)


def gradient(of: torch.Tensor, weight: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad((of * weight).sum(), leaf, retain_graph=True)[0]


def tables(tmp_path, **algorithm) -> dict:
    make_tiny(tmp_path / "teacher", seed=1)
    return {"algorithm": {"name": "distillation", **algorithm}, "teacher": {"path": str(tmp_path / "teacher")}}


def test_distillation_without_a_teacher_is_refused():
    with pytest.raises(ConfigError, match="needs a teacher: give its Hugging Face directory as teacher.path"):
        check(load_config(None, {"algorithm": {"name": "distillation"}}))


def test_a_setting_of_sampled_words_beside_top_k_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="discount has no effect with top_k > 0"):
        check(load_config(None, tables(tmp_path, top_k=4, discount=1.0)))


def test_more_words_than_there_are_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="give no more than that"):
        check(load_config(None, tables(tmp_path, top_k=4000)))


def test_both_forms_pass_what_is_tried_before_a_run(tmp_path):
    for top_k in (0, 8):
        check(load_config(None, tables(tmp_path, top_k=top_k)))


@pytest.mark.parametrize(
    "words", [{"words_SK": torch.tensor([[1]])}, {"num_likeliest": 1}], ids=["chosen", "likeliest"]
)
def test_a_head_gives_no_other_words_where_some_were_left_out(words):
    head: Any = SimpleNamespace(weight=torch.ones(16, 2))
    masked = {"target_S": torch.tensor([0]), "mask": SamplingMask.of([np.array([0, 3])], 16)}
    with pytest.raises(AssertionError, match="among those that a mask leaves out"):
        Float32Head.forward(head, torch.ones(1, 2), **masked, **words)
    assert Float32Head.forward(head, torch.ones(1, 2), **masked).shape == (2, 1)

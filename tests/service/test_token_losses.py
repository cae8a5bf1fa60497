"""Losses by the Tinker API's names: values by hand, and gradients of each token's log-probability."""

import math

import pytest
import torch

from titan_rl.algorithms.base import LossInputs
from titan_rl.algorithms.token_losses import TOKEN_LOSSES, make_token_loss

_P, _Q = (0.5, 0.2, 0.9), (0.25, 0.4, 0.9)
_A = (2.0, -1.0, 0.5)
"""Two tokens whose ratios are 2 and 0.5, and one whose ratio is 1."""
_LOG = [math.log(p) for p in _P]
_SETTINGS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}


def _inputs(advantages=_A, weights=(1.0, 1.0, 1.0), offsets=(0, 3)) -> LossInputs:
    logprob_S = torch.tensor(_LOG, dtype=torch.float64, requires_grad=True)
    sampling_S = torch.tensor([math.log(q) for q in _Q], dtype=torch.float64)
    rest = torch.tensor(advantages, dtype=torch.float64), torch.tensor(weights, dtype=torch.float64)
    return LossInputs(logprob_S, sampling_S, *rest, torch.zeros(3), torch.tensor(offsets))


_MEAN = (2 * 0.5 * 1) ** (1 / 3)


@pytest.mark.parametrize(
    ("name", "settings", "loss", "gradient"),
    [
        ("cross_entropy", {}, -(2 * _LOG[0] - _LOG[1] + 0.5 * _LOG[2]), (-2.0, 1.0, -0.5)),
        ("importance_sampling", {}, -(2 * 2 - 0.5 + 0.5), (-4.0, 0.5, -0.5)),
        # of the first token 1.2 * 2 is the smaller; of the second 0.8 * -1 is, so that neither has a gradient
        ("ppo", _SETTINGS, -(2.4 - 0.8 + 0.5), (0.0, 0.0, -0.5)),
        ("cispo", _SETTINGS, -(1.2 * 2 * _LOG[0] - 0.8 * _LOG[1] + 0.5 * _LOG[2]), (-2.4, 0.8, -0.5)),
        (
            "dro",
            {"beta": 0.5},
            -(2 * _LOG[0] - _LOG[1] + 0.5 * _LOG[2] - 0.25 * 2 * math.log(2) ** 2),
            (-(2 - 0.5 * math.log(2)), -(-1 + 0.5 * math.log(2)), -0.5),
        ),
        ("gspo", _SETTINGS, -_MEAN * (2 - 1 + 0.5), (-2.0 * _MEAN, 1.0 * _MEAN, -0.5 * _MEAN)),
    ],
)
def test_values_and_gradients_are_those_by_hand(name, settings, loss, gradient):
    inputs = _inputs()
    value, _ = make_token_loss(name, settings).loss(inputs)
    value.backward()
    assert float(value.detach()) == pytest.approx(loss, abs=1e-9)
    assert inputs.logprob_S.grad is not None
    assert inputs.logprob_S.grad.tolist() == pytest.approx(list(gradient), abs=1e-9)


def test_a_sequence_s_ratio_is_of_its_own_tokens_of_weight_one():
    inputs = _inputs(advantages=(2.0, 0.0, 0.5), weights=(1.0, 0.0, 1.0), offsets=(0, 2, 3))
    value, _ = make_token_loss("gspo", {"clip_high_threshold": 10.0}).loss(inputs)
    assert float(value.detach()) == pytest.approx(-(2 * 2 + 1 * 0.5))


@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_a_token_of_weight_zero_has_no_part(name):
    inputs = _inputs(advantages=(2.0, 0.0, 0.5), weights=(1.0, 0.0, 1.0))
    value, _ = make_token_loss(name, {}).loss(inputs)
    value.backward()
    assert inputs.logprob_S.grad is not None and inputs.logprob_S.grad[1] == 0


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("pp0", {}, "unknown"),
        ("stable_reinforce", {}, "unknown"),
        ("ppo", {"beta": 1.0}, "clip_low_threshold"),
        ("cross_entropy", {"beta": 1.0}, "none"),
        ("cispo", {"clip_low_threshold": 2.0, "clip_high_threshold": 1.0}, "low <= high"),
    ],
)
def test_a_wrong_name_or_setting_is_one_line(name, settings, words):
    with pytest.raises(ValueError, match=words) as error:
        make_token_loss(name, settings)
    assert "\n" not in str(error.value)

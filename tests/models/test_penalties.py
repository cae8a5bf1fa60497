"""Penalties on packed rows: what vLLM's formula gives each token by itself, forward and backward, in any tiles."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from batches import WORDS, batch_of

from titan_rl.data.batches.packing import dummy_row
from titan_rl.data.storage.decoding import PenalizedTokens, Penalties
from titan_rl.data.types import Row
from titan_rl.kernels.linear_logprob import linear_logprob
from titan_rl.models.layers.penalties import logit_penalties
from titan_rl.trainer.objective.nonfinite import only, units

PENALTIES = {
    "repetition": Penalties(repetition=1.3),
    "less than 1": Penalties(repetition=0.8),
    "presence": Penalties(presence=0.7),
    "frequency": Penalties(frequency=0.4),
    "all": Penalties(1.2, -0.5, 0.3),
}
ROWS = {"shared": {}, "each alone": {"share_prefix": False}, "branches": {"branches": True}, "masked": {"masked": True}}
DIM = 16


def penalized(logits_V: torch.Tensor, sample: PenalizedTokens, number: int) -> torch.Tensor:
    """vLLM's formula for one token, over the whole vocabulary."""
    start, place, penalties = sample.start_S[number], sample.place_S[number], sample.penalties
    in_prompt_V, count_V = (
        torch.bincount(torch.from_numpy(part).long(), minlength=WORDS)
        for part in (sample.tokens[:start], sample.tokens[start:place])
    )
    repeated_V = torch.where(logits_V > 0, logits_V / penalties.repetition, logits_V * penalties.repetition)
    logits_V = torch.where((in_prompt_V > 0) | (count_V > 0), repeated_V, logits_V)
    return logits_V - penalties.frequency * count_V - penalties.presence * (count_V > 0)


def in_full(row: Row, hidden_SD, weight_VD, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    logits_SV, offsets = list(hidden_SD @ weight_VD.T), row.branch_offsets
    for sample, begin in zip(row.penalized, offsets, strict=False):
        for number in range(0 if sample is None else len(sample.place_S)):
            logits_SV[begin + number] = penalized(logits_SV[begin + number], sample, number)
    scaled_SV = torch.stack(logits_SV) / temperature
    if row.mask is not None:
        for place in range(len(row.mask)):
            left_out = np.setdiff1d(np.arange(WORDS), row.mask.kept(place))
            scaled_SV[place] = scaled_SV[place].index_fill(0, torch.from_numpy(left_out), -1e30)
    logprob_SV = scaled_SV.log_softmax(-1)
    target_S = torch.from_numpy(row.target_S)[:, None]
    return logprob_SV.gather(1, target_S)[:, 0], -(logprob_SV.exp() * logprob_SV).sum(-1)


def rows_with(penalties: Penalties, **settings) -> list[Row]:
    return [row for row in batch_of(3, penalties=penalties, **settings).rows[0] if row.penalized]


SMALL = {"tile_tokens": 5, "tile_words": 30}


@pytest.mark.parametrize(
    ("name", "rows", "tiles"),
    [
        *((name, "shared", SMALL) for name in PENALTIES),
        *(("all", rows, SMALL) for rows in ROWS),
        *(("all", "shared", tiles) for tiles in ({}, {"tile_tokens": 1, "tile_words": 50})),
    ],
)
def test_each_token_has_vllms_logits(name, rows, tiles):
    for row in rows_with(PENALTIES[name], **ROWS[rows]):
        torch.manual_seed(0)
        hidden_SD = torch.randn(len(row.target_S), DIM, dtype=torch.double, requires_grad=True)
        weight_VD = torch.randn(WORDS, DIM, dtype=torch.double, requires_grad=True)
        settings = {
            "temperature": 0.7,
            "penalties": logit_penalties(row, torch.device("cpu")),
            "mask_SB": None if row.mask is None else torch.from_numpy(row.mask.bits()),
        }
        found = linear_logprob(hidden_SD, weight_VD, torch.from_numpy(row.target_S), **settings, **tiles)
        wanted = in_full(row, hidden_SD, weight_VD, 0.7)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
        factor_S = torch.randn(len(row.target_S), dtype=torch.double)
        gradients = (
            torch.autograd.grad((factor_S * (logprob_S + 0.3 * entropy_S)).sum(), (hidden_SD, weight_VD))
            for logprob_S, entropy_S in (found, wanted)
        )
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_expected_gradients_are_those_of_the_backward():
    [row, *_] = rows_with(PENALTIES["all"])
    torch.manual_seed(0)
    hidden_SD, weight_VD = torch.randn(len(row.target_S), DIM), torch.randn(WORDS, DIM)
    factor_S, found = torch.randn(len(row.target_S)), []
    for expected in (lambda logprob_S, tokens: factor_S[tokens], None):
        leaves = [leaf.clone().requires_grad_() for leaf in (hidden_SD, weight_VD)]
        settings = {"penalties": logit_penalties(row, torch.device("cpu")), "tile_tokens": 4, "tile_words": 30}
        logprob_S, _ = linear_logprob(*leaves, torch.from_numpy(row.target_S), expected_grad=expected, **settings)
        found.append(torch.autograd.grad((factor_S * logprob_S).sum(), leaves))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("samples_per_loss", [1, 2])
def test_a_part_of_a_row_has_its_own_distributions(samples_per_loss):
    """The search for a NaN reads it alone."""
    for row in rows_with(PENALTIES["all"], masked=True):
        torch.manual_seed(0)
        hidden_SD, weight_VD = torch.randn(len(row.target_S), DIM), torch.randn(WORDS, DIM)
        whole_S = logprobs_of(row, hidden_SD, weight_VD)
        for unit in units(row, samples_per_loss):
            alone_S = logprobs_of(only(row, unit), hidden_SD[unit.tokens], weight_VD)
            torch.testing.assert_close(alone_S, whole_S[unit.tokens])


def logprobs_of(row: Row, hidden_SD: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
    mask, penalties = torch.from_numpy(row.mask.bits()), logit_penalties(row, torch.device("cpu"))
    target_S = torch.from_numpy(row.target_S)
    return linear_logprob(hidden_SD, weight_VD, target_S, mask_SB=mask, penalties=penalties)[0]


def test_penalties_of_other_owners_are_an_error():
    [row, *_] = rows_with(PENALTIES["all"])
    with pytest.raises(ValueError, match="zip"):
        logit_penalties(replace(row, penalized=row.penalized[1:]), torch.device("cpu"))


def test_a_row_without_penalties_has_none():
    [row, *_] = batch_of(3).rows[0]
    assert not row.penalized and logit_penalties(row, torch.device("cpu")) is None


def test_a_token_before_every_answer_is_an_error():
    with pytest.raises(ValueError, match="no answer begins before it"):
        PenalizedTokens.of(Penalties(1.2), np.arange(4), np.array([1, 2]), (2,))


def test_memory_is_that_of_the_context():
    """What is kept of a long answer grows with its words, not with words times tokens."""
    tokens = np.random.default_rng(0).integers(0, 50_000, 4000)
    sample = PenalizedTokens.of(Penalties(1.2), tokens, np.arange(1000, 4000), (1000,))
    row = replace(dummy_row(), penalized=[sample], owners=[("a", 0, 3000)])
    columns = vars(logit_penalties(row, torch.device("cpu"))).values()
    assert 0 < sum(column.numel() for column in columns if isinstance(column, torch.Tensor)) < 9 * len(tokens)

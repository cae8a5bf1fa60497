"""Penalties on packed rows: what vLLM's formula gives each token by itself, forward and backward, in any tiles."""

import pickle
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from batches import WORDS, batch_of
from torch.utils._python_dispatch import TorchDispatchMode

from titan_rl.data.batches.packing import pack, token_weights
from titan_rl.data.storage.decoding import Penalties
from titan_rl.data.types import Row, Sample
from titan_rl.kernels.linear_logprob import linear_logprob
from titan_rl.models.layers import penalties as penalties_module
from titan_rl.models.layers.penalties import MOST_ENTRIES, PenalizedTokens, logit_penalties, penalized_tokens
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
        for part in (sample.tokens_T[:start], sample.tokens_T[start:place])
    )
    repeated_V = torch.where(logits_V > 0, logits_V / penalties.repetition, logits_V * penalties.repetition)
    logits_V = torch.where((in_prompt_V > 0) | (count_V > 0), repeated_V, logits_V)
    return logits_V - penalties.frequency * count_V - penalties.presence * (count_V > 0)


def in_full(row: Row, hidden_SD, weight_VD, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    logits_SV, offsets = list(hidden_SD @ weight_VD.T), row.branch_offsets
    for sample, begin in zip(penalized_tokens(row), offsets, strict=False):
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
    sample = Sample(np.arange(4), np.array([0, 1, 1, 1]), np.zeros(4), 0.0, penalties=Penalties(1.2), starts=(2,))
    with pytest.raises(ValueError, match="token 1 was sampled with penalties, and no answer begins before it"):
        packed([sample])


def packed(samples: list[Sample]) -> Row:
    settings = dict(num_ranks=1, row_tokens=20_000, share_prefix=True)
    [[row]] = pack([samples], **settings, weigh=lambda samples: token_weights(samples, "token", 1)).rows
    return row


def answers_to(prompt: np.ndarray, num_answers: int, length: int, penalties: Penalties | None) -> list[Sample]:
    draw, num_words = np.random.default_rng(0), int(prompt.max()) + 1
    kinds = np.repeat([0, 1], [len(prompt), length]).astype(np.int8)
    columns = dict(penalties=penalties, starts=(len(prompt),) if penalties else ())
    answers = (draw.integers(0, num_words, length) for _ in range(num_answers))
    tokens = [np.concatenate([prompt, answer]).astype(np.int32) for answer in answers]
    zeros = np.zeros(len(kinds), np.float32)
    return [Sample(each, kinds, zeros, 0.0, "a", number, **columns) for number, each in enumerate(tokens)]


def test_memory_is_that_of_the_context():
    """What is kept of a long answer grows with its words, not with words times tokens."""
    row = packed(answers_to(np.arange(1000), 1, 3000, Penalties(1.2)))
    columns = vars(logit_penalties(row, torch.device("cpu"))).values()
    assert 0 < sum(column.numel() for column in columns if isinstance(column, torch.Tensor)) < 9 * 4000


def test_a_row_travels_without_its_tokens_once_more():
    plain, penalized = (packed(answers_to(np.arange(1000), 8, 100, each)) for each in (None, Penalties(1.2)))
    assert len(pickle.dumps(penalized)) - len(pickle.dumps(plain)) < 2000


class Peak(TorchDispatchMode):
    """Most bytes of tensors that operations made and that lived at once."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self.alive: set[int] = set()

    def __torch_dispatch__(self, function, types, arguments=(), settings=None):
        found = function(*arguments, **(settings or {}))
        for each in found if isinstance(found, tuple | list) else [found]:
            if isinstance(each, torch.Tensor) and (storage := each.untyped_storage())._cdata not in self.alive:
                self.alive.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())
        self.most = max(self.most, self.now)
        return found

    def _forget(self, storage: int, size: int) -> None:
        self.alive.discard(storage)
        self.now -= size


def peak_of(penalties: Penalties | None) -> int:
    num_words = 1024
    row = packed(answers_to(np.arange(num_words), 1, 2048, penalties))
    hidden_SD, weight_VD = (torch.randn(size, 4, requires_grad=True) for size in (len(row.target_S), num_words))
    settings = {"penalties": logit_penalties(row, torch.device("cpu"))}
    with Peak() as peak:
        logprob_S, _ = linear_logprob(hidden_SD, weight_VD, torch.from_numpy(row.target_S), **settings)
        logprob_S.sum().backward()
    return peak.most


def test_a_full_tile_is_penalized_in_parts(monkeypatch):
    """Each of 2,048 tokens has each of 1,024 words before it: two million penalized logits."""
    plain, mebibyte = peak_of(None), 2**20
    assert peak_of(Penalties(1.1, 0.1, 0.1)) - plain < 16 * mebibyte
    monkeypatch.setattr(penalties_module, "MOST_ENTRIES", 2**21)
    assert peak_of(Penalties(1.1, 0.1, 0.1)) - plain > 100 * mebibyte, "it could not be seen"


def test_parts_are_as_many_as_needed():
    penalties = logit_penalties(packed(answers_to(np.arange(1024), 1, 2048, Penalties(1.1))), torch.device("cpu"))
    parts = penalties.parts(2048, 0, 1024)
    assert [part.start for part in parts] == [part.stop for part in ([slice(0)] + parts)[:-1]]
    assert parts[-1].stop == 2048 and {part.stop - part.start for part in parts} == {MOST_ENTRIES // 1024}
    assert penalties.parts(100, 0, 1024) == [slice(0, 100)] and penalties.parts(2048, 1024, 1024) == [slice(0, 2048)]

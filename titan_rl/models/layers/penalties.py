"""Penalized logits of a packed row's trained tokens, as vLLM's sampler computes them, tile by tile.

vLLM divides a logit above 0 by the repetition penalty, and multiplies another by it, where prompt or answer have the
word; it subtracts the frequency penalty as often as the answer has the word, and the presence penalty where it has it;
temperature and truncation follow. Memory: an entry a word of each answer's context and one an occurrence, some 100
bytes a token; and 8 MiB for the logits of a tile that are penalized at once, at most ``MOST_ENTRIES``.

Dimensions: T tokens of a sample but its last, S trained tokens of a row or a sample, P pairs of an answer and a word of
its context, X occurrences of words, E pairs of a token and a word in a part of a tile.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from titan_rl.data.batches.prefix_tree import places
from titan_rl.data.storage.decoding import PenalizedSample, Penalties
from titan_rl.data.types import Row

MOST_ENTRIES = 2**17
"""Penalized logits that are worked out at once."""


@dataclass(frozen=True)
class PenalizedTokens:
    """Trained tokens of one sample, each drawn from logits that were penalized for what came before it."""

    penalties: Penalties
    tokens_T: np.ndarray
    place_S: np.ndarray
    """int64, ascending: place of each trained token in the sample."""
    start_S: np.ndarray
    """int64: place where the answer begins that it is in; all before that was the request's prompt."""


def penalized_tokens(row: Row) -> list[PenalizedTokens | None]:
    """Penalized tokens of each owner of a row; None where there are no penalties. Empty if there are none at all."""
    if not row.penalized:
        return []
    spans = pairwise(row.branch_offsets.tolist())
    return [sample and _tokens(row, sample, slice(*span)) for sample, span in zip(row.penalized, spans, strict=True)]


def _tokens(row: Row, sample: PenalizedSample, trained: slice) -> PenalizedTokens:
    """``trained``: the sample's trained tokens in the row."""
    place_T = places(sample.ranges)
    place_S = np.searchsorted(place_T, row.source_S[trained]) + 1
    start_S = np.asarray(sample.starts, np.int64)[np.searchsorted(sample.starts, place_S, side="right") - 1]
    return PenalizedTokens(sample.penalties, row.tokens_T[place_T], place_S, start_S)


class _Pairs(NamedTuple):
    """Pairs of one answer, by word; rows count the row's trained tokens."""

    word_P: np.ndarray
    begin_P: np.ndarray
    """First trained token that has the word before it."""
    end_P: np.ndarray
    """One past the answer's last."""
    pair_X: np.ndarray
    """Occurrences in the answer, by the pair's number."""
    row_X: np.ndarray
    """First trained token that has the occurrence before it."""
    penalties: Penalties


def _answers(sample: PenalizedTokens, first_row: int) -> list[_Pairs]:
    """``first_row``: number of the sample's first trained token in the row."""
    if not len(sample.place_S):
        return []
    bounds = [0, *(np.flatnonzero(np.diff(sample.start_S)) + 1).tolist(), len(sample.place_S)]
    spans = zip(bounds, bounds[1:], strict=False)
    return [_pairs(sample, begin, end, first_row) for begin, end in spans]


def _pairs(sample: PenalizedTokens, begin: int, end: int, first_row: int) -> _Pairs:
    """Pairs of the answer that trained tokens [begin, end) of a sample are in."""
    place_S, start = sample.place_S[begin:end], int(sample.start_S[begin])
    first = 0 if sample.penalties.repetition != 1 else start
    context = sample.tokens_T[first : place_S[-1]]
    word_P, first_P, pair_C = np.unique(context, return_index=True, return_inverse=True)
    row_C = np.searchsorted(place_S, np.arange(first, place_S[-1]), side="right") + begin + first_row
    is_output = slice(start - first, None)
    return _Pairs(
        word_P.astype(np.int64),
        row_C[first_P],
        np.full(len(word_P), end + first_row),
        pair_C[is_output],
        row_C[is_output],
        sample.penalties,
    )


class _Entries(NamedTuple):
    """Entries of a tile whose logits are penalized."""

    index_E: torch.Tensor
    """Places in the tile, row by row."""
    count_E: torch.Tensor
    """How often the answer has the word."""
    pair_E: torch.Tensor


@dataclass(frozen=True)
class LogitPenalties:
    """Penalties of the trained tokens from ``first_row`` on; a head applies them to tiles of logits.

    Forward and backward are exact: a penalized logit's derivative is 1 / repetition above 0 and repetition below.
    """

    word_P: torch.Tensor
    """int64, ascending."""
    begin_P: torch.Tensor
    end_P: torch.Tensor
    pair_X: torch.Tensor
    """int64, ascending."""
    row_X: torch.Tensor
    repetition_P: torch.Tensor
    presence_P: torch.Tensor
    frequency_P: torch.Tensor
    scales_gradients: bool
    """Whether any has another derivative than 1: there is a repetition penalty."""
    first_row: int = 0

    def at(self, rows: slice) -> "LogitPenalties":
        """Penalties of some of these tokens."""
        return replace(self, first_row=self.first_row + rows.start)

    def parts(self, num_rows: int, first_word: int, num_words: int) -> list[slice]:
        """Rows of a tile of logits that are penalized at once."""
        _, begin_P, end_P = self._in_tile(num_rows, first_word, num_words)
        is_small = int((end_P - begin_P).sum()) <= MOST_ENTRIES
        step = max(num_rows if is_small else MOST_ENTRIES // num_words, 1)
        return [slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]

    def apply(self, logits_SV: torch.Tensor, first_word: int, temperature: float) -> None:
        """Penalize, in place, one part's logits over ``temperature``, of the words from ``first_word`` on."""
        entries = self._entries(logits_SV, first_word)
        logit_E, repetition_E = logits_SV.view(-1)[entries.index_E], self.repetition_P[entries.pair_E]
        logit_E = torch.where(logit_E > 0, logit_E / repetition_E, logit_E * repetition_E)
        logits_SV.view(-1)[entries.index_E] = (logit_E - self._subtracted(entries) / temperature).to(logits_SV.dtype)

    def derivatives(
        self, logits_SV: torch.Tensor, first_word: int, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Places of penalized logits in a part, and the derivative of each by what it was before; ``logits_SV``: as
        ``apply`` has left them."""
        entries = self._entries(logits_SV, first_word)
        repetition_E = self.repetition_P[entries.pair_E]
        was_positive_E = logits_SV.view(-1)[entries.index_E] + self._subtracted(entries) / temperature > 0
        return entries.index_E, torch.where(was_positive_E, 1 / repetition_E, repetition_E).to(logits_SV.dtype)

    def _subtracted(self, entries: _Entries) -> torch.Tensor:
        has_E = entries.count_E > 0
        return self.frequency_P[entries.pair_E] * entries.count_E + self.presence_P[entries.pair_E] * has_E

    def _in_tile(
        self, num_rows: int, first_word: int, num_words: int
    ) -> tuple[tuple[int, int], torch.Tensor, torch.Tensor]:
        """Pairs [low, high) of a tile's words, and the tile's rows [begin_P, end_P) that have each."""
        low, high = _bounds(self.word_P, first_word, first_word + num_words)
        begin_P = (self.begin_P[low:high] - self.first_row).clamp(0, num_rows)
        end_P = (self.end_P[low:high] - self.first_row).clamp(max=num_rows)
        return (low, high), begin_P, torch.maximum(begin_P, end_P)

    def _entries(self, logits_SV: torch.Tensor, first_word: int) -> _Entries:
        num_rows, num_words = logits_SV.shape
        (low, high), begin_P, end_P = self._in_tile(num_rows, first_word, num_words)
        length_P = end_P - begin_P
        offset_P = length_P.cumsum(0) - length_P
        pair_E = torch.repeat_interleave(length_P)
        row_E = torch.arange(len(pair_E), device=pair_E.device) + (begin_P - offset_P)[pair_E]
        index_E = row_E * num_words + (self.word_P[low:high] - first_word)[pair_E]
        # an occurrence counts from its token on, or from the pair's first in this tile
        first, last = _bounds(self.pair_X, low, high)
        pair_X = self.pair_X[first:last] - low
        row_X = torch.maximum(self.row_X[first:last] - self.first_row, begin_P[pair_X])
        place_X = (row_X + (offset_P - begin_P)[pair_X])[row_X < end_P[pair_X]]
        step_E = torch.bincount(place_X, minlength=len(pair_E))
        total_E = step_E.cumsum(0)
        count_E = total_E - (total_E - step_E)[offset_P[pair_E]]
        return _Entries(index_E, count_E, pair_E + low)


def _bounds(ascending: torch.Tensor, low: int, high: int) -> tuple[int, int]:
    """Where values from ``low`` up to, without, ``high`` lie."""
    first, last = torch.searchsorted(ascending, ascending.new_tensor([low, high])).tolist()
    return first, last


def logit_penalties(row: Row, device: torch.device) -> LogitPenalties | None:
    """Penalties of a row's trained tokens; None if there are none."""
    samples = zip(penalized_tokens(row), row.branch_offsets[: len(row.penalized)].tolist(), strict=True)
    answers = [pairs for sample, first in samples if sample is not None for pairs in _answers(sample, first)]
    return _joined(answers, device) if answers else None


def _joined(answers: Sequence[_Pairs], device: torch.device) -> LogitPenalties:
    """Pairs of all answers, by word."""
    sizes = [len(pairs.word_P) for pairs in answers]
    columns = zip(*((pairs.word_P, pairs.begin_P, pairs.end_P) for pairs in answers), strict=True)
    word_P, begin_P, end_P = map(np.concatenate, columns)
    firsts = np.cumsum([0, *sizes])[:-1]
    pair_X = np.concatenate([pairs.pair_X + first for pairs, first in zip(answers, firsts, strict=True)])
    row_X = np.concatenate([pairs.row_X for pairs in answers])
    order_P = np.argsort(word_P, kind="stable")
    number_P = np.empty_like(order_P)
    number_P[order_P] = np.arange(len(order_P))
    order_X = np.argsort(number_P[pair_X], kind="stable")
    values = [[pairs.penalties.repetition, pairs.penalties.presence, pairs.penalties.frequency] for pairs in answers]
    value_P3 = np.repeat(np.array(values, np.float32), sizes, axis=0)[order_P]
    columns = word_P[order_P], begin_P[order_P], end_P[order_P], number_P[pair_X][order_X], row_X[order_X]
    return LogitPenalties(
        *(torch.from_numpy(column.astype(np.int64)).to(device) for column in columns),
        *torch.from_numpy(value_P3).to(device).unbind(1),
        scales_gradients=any(repetition != 1 for repetition, _, _ in values),
    )

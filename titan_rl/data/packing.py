"""Samples become packed rows, dealt out evenly over data-parallel ranks.

A group's prompt comes once and its samples follow it, each a segment that sees the prompt and itself
(model/attention.py). The last token of a sample is only ever a target, so it is left out of the row. Weights are
worked out over the whole batch here, once, so that no layout can change a loss.

Dimensions: T tokens of a row or a sample, S trained tokens of a row.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from titan_rl.data.types import OUTCOME_COLUMNS, Batch, Provenance, Row, Sample, Segment


@dataclass(frozen=True)
class Unit:
    """What must stay in one row: samples behind one prefix (of length 0 if nothing is shared)."""

    samples: list[Sample]
    weights: list[float]
    prefix_length: int

    @property
    def num_tokens(self) -> int:
        return self.prefix_length + sum(len(s.tokens) - 1 - self.prefix_length for s in self.samples)


def token_weights(samples: list[Sample], aggregation: str, max_new_tokens: int) -> list[float]:
    """The weight of each sample's trained tokens; with ``token`` and ``sequence`` the batch's weights sum to 1."""
    counts = [int((s.provenance == Provenance.MODEL).sum()) for s in samples]
    match aggregation:
        case "token":
            return [1 / max(sum(counts), 1)] * len(samples)
        case "sequence":
            return [1 / (len(samples) * max(count, 1)) for count in counts]
        case "constant":
            return [1 / (len(samples) * max_new_tokens)] * len(samples)
    raise AssertionError(aggregation)


def _common_prefix(samples: list[Sample]) -> int:
    """Length of what all samples share before the model's first token: the prompt, and what their environments said
    alike before it."""
    length = min(int((s.provenance == Provenance.MODEL).argmax()) for s in samples)
    is_same_T = np.logical_and.reduce([s.tokens[:length] == samples[0].tokens[:length] for s in samples])
    return length if is_same_T.all() else int(is_same_T.argmin())


def _units(
    group: list[Sample], weights: list[float], row_tokens: int, share_prefix: bool, keep_together: bool
) -> list[Unit]:
    prefix_length = _common_prefix(group) if share_prefix and len(group) > 1 else 0
    if keep_together:
        return [Unit(group, weights, prefix_length)]
    units, begin, size = [], 0, prefix_length
    for position, sample in enumerate(group):
        extra = len(sample.tokens) - 1 - prefix_length
        if position > begin and (size + extra > row_tokens or not prefix_length):
            units.append(Unit(group[begin:position], weights[begin:position], prefix_length))
            begin, size = position, prefix_length
        size += extra
    units.append(Unit(group[begin:], weights[begin:], prefix_length))
    return units


def _deal(units: list[Unit], row_tokens: int, multiple: int) -> list[list[Unit]]:
    """Largest first into the emptiest row that has room; rows are opened ``multiple`` at a time."""
    total = sum(unit.num_tokens for unit in units)
    rows: list[list[Unit]] = [[] for _ in range(multiple * max(1, math.ceil(total / row_tokens / multiple)))]
    sizes = [0] * len(rows)
    for unit in sorted(units, key=lambda u: -u.num_tokens):
        emptiest = sizes.index(min(sizes))
        if sizes[emptiest] and sizes[emptiest] + unit.num_tokens > row_tokens:
            emptiest = len(rows)
            rows += [[] for _ in range(multiple)]
            sizes += [0] * multiple
        rows[emptiest].append(unit)
        sizes[emptiest] += unit.num_tokens
    return rows


def dummy_row() -> Row:
    """Keeps ranks and stages in step; weight 0 keeps it out of loss and metrics."""
    place, value = np.zeros(1, np.int64), np.zeros(1, np.float32)
    return Row(place, place, [Segment(0, 1)], place, place, value, value, value)


def _advantage_S(sample: Sample, count: int) -> np.ndarray:
    if isinstance(sample.advantage, np.ndarray):
        assert sample.advantage.shape == (count,), "an array of advantages has one for each token that the model wrote"
        return sample.advantage
    return np.full(count, sample.advantage)


class _RowBuilder:
    def __init__(self, num_samples: int) -> None:
        """``num_samples``: of the whole batch."""
        self.num_samples = num_samples
        self.tokens: list[np.ndarray] = []
        self.positions: list[np.ndarray] = []
        self.segments: list[Segment] = []
        self.trained: list[tuple[np.ndarray, ...]] = []
        self.outcomes: list[tuple[np.ndarray, ...]] = []
        self.owners: list[tuple[str, int, int]] = []
        self.size = 0

    def _lay(self, tokens: np.ndarray, first_position: int, prefix_start: int, prefix_length: int) -> int:
        start = self.size
        if len(tokens):
            self.tokens.append(tokens)
            self.positions.append(np.arange(first_position, first_position + len(tokens)))
            self.segments.append(Segment(start, len(tokens), prefix_start, prefix_length))
            self.size += len(tokens)
        return start

    def add(self, unit: Unit) -> None:
        prefix_length = unit.prefix_length
        prefix_start = self._lay(unit.samples[0].tokens[:prefix_length], 0, 0, 0)
        for sample, weight in zip(unit.samples, unit.weights, strict=True):
            start = self._lay(sample.tokens[prefix_length:-1], prefix_length, prefix_start, prefix_length)
            # the place in the row of each of the sample's tokens but the last: the prefix's, then its own
            place_T = np.concatenate(
                [np.arange(prefix_start, prefix_start + prefix_length), np.arange(start, self.size)]
            )
            trained_S = np.flatnonzero(sample.provenance == Provenance.MODEL)
            assert not len(trained_S) or trained_S[0] > 0, "the model wrote a first token with nothing before it"
            self.owners.append((sample.prompt_id, sample.sample, len(trained_S)))
            self.trained.append(
                (
                    place_T[trained_S - 1],
                    sample.tokens[trained_S],
                    sample.logprobs[trained_S],
                    _advantage_S(sample, len(trained_S)),
                    np.full(len(trained_S), weight),
                )
            )
            if sample.outcome is not None:
                share = 1 / (self.num_samples * max(len(trained_S), 1))
                self.outcomes.append((np.full(len(trained_S), sample.outcome), np.full(len(trained_S), share)))

    def build(self) -> Row:
        if not self.size:
            return dummy_row()
        source, target, logprob, advantage, weight = (
            np.concatenate(column) for column in zip(*self.trained, strict=True)
        )
        outcomes = (np.concatenate(column).astype(np.float32) for column in zip(*self.outcomes, strict=True))
        return Row(
            tokens_T=np.concatenate(self.tokens).astype(np.int64),
            positions_T=np.concatenate(self.positions).astype(np.int64),
            segments=self.segments,
            source_S=source.astype(np.int64),
            target_S=target.astype(np.int64),
            logprob_S=logprob.astype(np.float32),
            advantage_S=advantage.astype(np.float32),
            weight_S=weight.astype(np.float32),
            owners=self.owners,
            found=dict(zip(OUTCOME_COLUMNS, outcomes, strict=False)),
        )


def pack(
    groups: list[list[Sample]],
    *,
    num_ranks: int,
    row_tokens: int,
    share_prefix: bool,
    weigh: Callable[[list[Sample]], list[float]],
    row_multiple: int = 1,
    keep_together: bool = False,
) -> Batch:
    """Rows of at most ``row_tokens`` tokens for each rank, their number a multiple of ``row_multiple``.

    A rank here is a group of trainer ranks that take the same rows. A sample must fit into a row by itself.
    ``keep_together``: a group stands in one row, its samples one after the other; so the whole group must fit.
    """
    samples = [sample for group in groups for sample in group]
    assert all(len(s.tokens) - 1 <= row_tokens for s in samples), "a sample is longer than a row"
    weights = iter(weigh(samples))
    units = [
        unit
        for group in groups
        for unit in _units(group, [next(weights) for _ in group], row_tokens, share_prefix, keep_together)
    ]
    assert all(unit.num_tokens <= row_tokens for unit in units), "a group is longer than a row"
    rows = []
    for row_units in _deal(units, row_tokens, num_ranks * row_multiple):
        builder = _RowBuilder(len(samples))
        for unit in row_units:
            builder.add(unit)
        rows.append(builder.build())
    return Batch(
        rows=[rows[rank::num_ranks] for rank in range(num_ranks)],
        num_tokens=sum(unit.num_tokens for unit in units),
        num_trained_tokens=sum(int((s.provenance == Provenance.MODEL).sum()) for s in samples),
        has_signal=any(np.any(s.advantage != 0) for s in samples),
    )


def _pad_row(row: Row, num_tokens: int) -> Row:
    """The row with tokens at its end that see only each other and that nothing is trained on."""
    missing, start = num_tokens - len(row.tokens_T), len(row.tokens_T)
    if not missing:
        return row
    # no segment longer than the row has: attention over padding must not cost more than over the row
    longest = max(segment.length for segment in row.segments)
    pieces = [Segment(begin, min(longest, num_tokens - begin)) for begin in range(start, num_tokens, longest)]
    zeros = np.zeros(missing, np.int64)
    return replace(
        row,
        tokens_T=np.concatenate([row.tokens_T, zeros]),
        positions_T=np.concatenate([row.positions_T, zeros]),
        segments=[*row.segments, *pieces],
    )


def fit_rows(rows: list[Row], *, token_multiple: int, row_multiple: int, same_length: bool) -> list[Row]:
    """Rows as a layout needs them: sequence parallel cuts a row into equal parts, a pipeline wants one shape."""
    rows = [*rows, *(dummy_row() for _ in range(-len(rows) % row_multiple))]
    longest = max(len(row.tokens_T) for row in rows)
    lengths = [longest if same_length else len(row.tokens_T) for row in rows]
    return [_pad_row(row, length + -length % token_multiple) for row, length in zip(rows, lengths, strict=True)]

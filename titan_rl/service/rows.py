"""Clients' examples become packed rows, and the rows' log-probabilities the examples' again. Pure.

Every position of an example has a target of its own, as the client gives it, so that all are trained tokens of a row;
the example's coefficients (advantages, or the weights of a cross-entropy) are its ``advantage_S``. Examples that follow
each other and begin alike, as the samples of a prompt do, share a segment; where nothing is learned there either, what
the first of them gives counts for all.

Dimensions: T tokens of an example, S trained tokens of a row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from titan_rl.data.batches.packing import dummy_row
from titan_rl.data.types import Layout, Row, Segment

_LEAST_SHARED = 8
"""Tokens that examples must have in common to share them."""


@dataclass(frozen=True)
class TrainingExample:
    """Example of a forward and backward pass."""

    tokens: np.ndarray
    """int64 [T]"""
    targets: np.ndarray
    """int64 [T]: the token that each position is to predict."""
    coefficients: np.ndarray
    """float32 [T]: advantages, or weights of a cross-entropy."""
    sampling_logprobs: np.ndarray
    """float32 [T]; zeros where the loss does without."""
    mask: np.ndarray
    """float32 [T]: 1 where a position is in the loss, else 0."""


@dataclass(frozen=True)
class _Unit:
    """Examples of one row with the tokens that they all begin with."""

    numbers: list[int]
    examples: list[TrainingExample]
    shared: int

    @property
    def num_tokens(self) -> int:
        return self.shared + sum(len(example.tokens) - self.shared for example in self.examples)

    def with_next(self, number: int, example: TrainingExample) -> "_Unit":
        shared = min(self.shared, _in_common(self.examples[0].tokens, example.tokens))
        return _Unit([*self.numbers, number], [*self.examples, example], shared)


@dataclass(frozen=True)
class PackedExamples:
    """Rows of each group of ranks, and where each example lies in them."""

    rows: list[list[Row]]
    places: list[tuple[int, int, np.ndarray]]
    """Of each example: its group, its row there, and of each of its positions the trained token, int64 [T]."""

    def logprobs(self, by_group: Mapping[int, Mapping[int, np.ndarray]]) -> list[np.ndarray]:
        """Log-probabilities of each example, float32 [T]. ``by_group[group][row]``: those of a row."""
        return [by_group[group][row][trained] for group, row, trained in self.places]


def pack_examples(
    examples: Sequence[TrainingExample], layout: Layout, *, share: bool = True, skips_zeros: bool = True
) -> PackedExamples:
    """Pack examples into rows, the longest first into the emptiest row.

    ``share``: what they have in common. ``skips_zeros``: the loss of a token whose coefficient is 0 is 0, whatever its
    log-probability. Errors: ValueError for an example longer than a row."""
    longest = max(len(example.tokens) for example in examples)
    if longest > layout.row_tokens:
        raise ValueError(
            f"an example has {longest} tokens, and rows have room for {layout.row_tokens}: cut it, or raise "
            f"training.seq_len of the server"
        )
    multiple = layout.num_ranks * layout.row_multiple
    rows: list[list[_Unit]] = [[] for _ in range(multiple)]
    sizes = [0] * multiple
    for unit in sorted(_units(examples, layout.row_tokens, share=share), key=lambda unit: -unit.num_tokens):
        emptiest = sizes.index(min(sizes))
        if sizes[emptiest] and sizes[emptiest] + unit.num_tokens > layout.row_tokens:
            emptiest = len(rows)
            rows += [[] for _ in range(multiple)]
            sizes += [0] * multiple
        rows[emptiest].append(unit)
        sizes[emptiest] += unit.num_tokens
    built, places = [], {}
    for index, units in enumerate(rows):
        builder = _RowBuilder(skips_zeros=skips_zeros)
        for unit in units:
            for number, trained in zip(unit.numbers, builder.add(unit), strict=True):
                places[number] = index % layout.num_ranks, index // layout.num_ranks, trained
        built.append(builder.build())
    ordered = [places[number] for number in range(len(examples))]
    return PackedExamples([built[group :: layout.num_ranks] for group in range(layout.num_ranks)], ordered)


def _units(examples: Sequence[TrainingExample], row_tokens: int, *, share: bool) -> list[_Unit]:
    """Examples that follow each other and begin alike, as many as a row has room for."""
    units: list[_Unit] = []
    for number, example in enumerate(examples):
        longer = units[-1].with_next(number, example) if units and share else None
        if longer is not None and longer.shared >= _LEAST_SHARED and longer.num_tokens <= row_tokens:
            units[-1] = longer
        else:
            units.append(_Unit([number], [example], len(example.tokens)))
    return units


def _in_common(one: np.ndarray, other: np.ndarray) -> int:
    """Number of tokens that two examples begin with alike."""
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if len(different) else length


class _RowBuilder:
    def __init__(self, *, skips_zeros: bool) -> None:
        self._skips_zeros = skips_zeros
        self.tokens: list[np.ndarray] = []
        self.positions: list[np.ndarray] = []
        self.segments: list[Segment] = []
        self.columns: list[tuple[np.ndarray, ...]] = []
        """Of each example's trained tokens: source, target, sampling log-probability, coefficient, mask."""
        self.owners: list[tuple[str, int, int]] = []
        self._size = self._num_trained = 0

    def add(self, unit: _Unit) -> list[np.ndarray]:
        """Lay a unit; of each of its examples the trained tokens of its positions."""
        first, shared = unit.examples[0], unit.shared
        prefix_T = self._lay(first.tokens[:shared], 0, ())
        segment = ((self.segments[-1].start, shared),) if shared else ()
        of_first: np.ndarray | None = None
        found = []
        for number, example in zip(unit.numbers, unit.examples, strict=True):
            place_T = np.concatenate([prefix_T, self._lay(example.tokens[shared:], shared, segment)])
            again = np.zeros(len(place_T), bool)
            if of_first is not None:
                again[:shared] = self._is_given(first, example, shared)
            own = np.flatnonzero(~again)
            trained = np.empty(len(place_T), np.int64)
            trained[own] = self._num_trained + np.arange(len(own))
            if of_first is None:
                of_first = trained
            trained[again] = of_first[np.flatnonzero(again)]
            columns = example.targets, example.sampling_logprobs, example.coefficients, example.mask
            self.columns.append((place_T[own], *(column[own] for column in columns)))
            self.owners.append((str(number), 0, len(own)))
            self._num_trained += len(own)
            found.append(trained)
        return found

    def _lay(self, tokens: np.ndarray, position: int, prefix: tuple[tuple[int, int], ...]) -> np.ndarray:
        """Places of tokens in the row."""
        places = self._size + np.arange(len(tokens))
        if len(tokens):
            self.tokens.append(tokens)
            self.positions.append(position + np.arange(len(tokens)))
            self.segments.append(Segment(self._size, len(tokens), prefix))
            self._size += len(tokens)
        return places

    def _is_given(self, first: TrainingExample, example: TrainingExample, shared: int) -> np.ndarray:
        """Bool [shared]: positions where an example predicts what the first one does, and neither learns."""
        given = first.targets[:shared] == example.targets[:shared]
        for each in (first, example):
            given &= (each.coefficients if self._skips_zeros else each.mask)[:shared] == 0
        return given

    def build(self) -> Row:
        if not self._size:
            return dummy_row()
        source, target, logprob, coefficient, mask = (
            np.concatenate(column) for column in zip(*self.columns, strict=True)
        )
        return Row(
            tokens_T=np.concatenate(self.tokens).astype(np.int64),
            positions_T=np.concatenate(self.positions).astype(np.int64),
            segments=self.segments,
            source_S=source.astype(np.int64),
            target_S=target.astype(np.int64),
            logprob_S=logprob.astype(np.float32),
            advantage_S=coefficient.astype(np.float32),
            weight_S=mask.astype(np.float32),
            owners=self.owners,
        )

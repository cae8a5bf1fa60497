"""Clients' examples become packed rows, and the rows' log-probabilities the examples' again. Pure.

Every position of an example has a target of its own, as the client gives it, so that all are trained tokens of a row;
the example's coefficients (advantages, or the weights of a cross-entropy) are its ``advantage_S``.

Dimensions: T tokens of an example, S trained tokens of a row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from titan_rl.data.batches.packing import dummy_row
from titan_rl.data.types import Layout, Row, Segment


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
class PackedExamples:
    """Rows of each group of ranks, and where each example lies in them."""

    rows: list[list[Row]]
    places: list[tuple[int, int, int]]
    """Of each example: its group, its row there, and where its trained tokens begin."""
    lengths: list[int]

    def logprobs(self, by_group: Mapping[int, Mapping[int, np.ndarray]]) -> list[np.ndarray]:
        """Log-probabilities of each example, float32 [T]. ``by_group[group][row]``: those of a row."""
        return [
            by_group[group][row][start : start + length]
            for (group, row, start), length in zip(self.places, self.lengths, strict=True)
        ]


def pack_examples(examples: Sequence[TrainingExample], layout: Layout) -> PackedExamples:
    """Pack examples into rows, the longest first into the emptiest row.

    Errors: ValueError for an example longer than a row."""
    multiple = layout.num_ranks * layout.row_multiple
    rows: list[list[int]] = [[] for _ in range(multiple)]
    sizes = [0] * multiple
    lengths = [len(example.tokens) for example in examples]
    if max(lengths) > layout.row_tokens:
        raise ValueError(
            f"an example has {max(lengths)} tokens, and rows have room for {layout.row_tokens}: cut it, or raise "
            f"training.seq_len of the server"
        )
    for number in sorted(range(len(examples)), key=lambda number: -lengths[number]):
        emptiest = sizes.index(min(sizes))
        if sizes[emptiest] and sizes[emptiest] + lengths[number] > layout.row_tokens:
            emptiest = len(rows)
            rows += [[] for _ in range(multiple)]
            sizes += [0] * multiple
        rows[emptiest].append(number)
        sizes[emptiest] += lengths[number]
    places = [(0, 0, 0)] * len(examples)
    for index, members in enumerate(rows):
        start = 0
        for number in members:
            places[number] = index % layout.num_ranks, index // layout.num_ranks, start
            start += lengths[number]
    built = [_row([(number, examples[number]) for number in members]) for members in rows]
    return PackedExamples([built[group :: layout.num_ranks] for group in range(layout.num_ranks)], places, lengths)


def _row(members: list[tuple[int, TrainingExample]]) -> Row:
    if not members:
        return dummy_row()
    examples = [example for _, example in members]
    lengths = [len(example.tokens) for example in examples]
    starts = np.cumsum([0, *lengths])
    total = int(starts[-1])
    return Row(
        tokens_T=np.concatenate([example.tokens for example in examples]).astype(np.int64),
        positions_T=np.concatenate([np.arange(length) for length in lengths]).astype(np.int64),
        segments=[Segment(int(start), length) for start, length in zip(starts[:-1], lengths, strict=True)],
        source_S=np.arange(total),
        target_S=np.concatenate([example.targets for example in examples]).astype(np.int64),
        logprob_S=np.concatenate([example.sampling_logprobs for example in examples]).astype(np.float32),
        advantage_S=np.concatenate([example.coefficients for example in examples]).astype(np.float32),
        weight_S=np.concatenate([example.mask for example in examples]).astype(np.float32),
        owners=[(str(number), 0, length) for (number, _), length in zip(members, lengths, strict=True)],
    )

"""Samples become packed rows, dealt out evenly over data-parallel ranks.

What samples share comes once: a group's prompt, and what branches of a rollout have in common (prefix_tree.py). Each
part is a segment, which sees those that it goes on from and itself (models/layers/attention.py). The last token of a
sample is only ever a target, so it is left out of the row. Weights are worked out over the whole batch here, once, so
that no layout can change a loss. A rollout weighs the same whatever number of branches it is in; where they come to lie
in several rows, these say so, and the trainer puts the whole together (trainer/objective/whole_rollouts.py).

Dimensions: T tokens of a row or a sample, S trained tokens of a row.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from titan_rl.data.batches.prefix_tree import Node, Tree, places, prefix_tree, ranges
from titan_rl.data.images import PlacedImage, rope_positions
from titan_rl.data.numbers import all_zero
from titan_rl.data.storage.decoding import PenalizedSample
from titan_rl.data.storage.routed_experts import joined_experts
from titan_rl.data.storage.sampling_mask import SamplingMask, joined
from titan_rl.data.types import OUTCOME_COLUMNS, TASK_COLUMN, Batch, Row, Sample, Segment, is_model, num_model_tokens


@dataclass(frozen=True)
class Unit:
    """Packing unit: samples of one row that share a prefix, or one without."""

    samples: list[Sample]
    shares: list["Share"]
    tree: Tree

    @property
    def num_tokens(self) -> int:
        return self.tree.num_tokens


class Share(NamedTuple):
    """Share of a sample in the batch."""

    weight: float
    """Of each of its trained tokens."""
    outcome_weight: float
    """Of each of them, in a mean over rollouts of something of the whole one."""
    branch: tuple[int, int]
    """The number of its rollout in the batch, and its own in that."""


def rollout_numbers(samples: Iterable[Sample]) -> list[int]:
    """Rollout number of each sample; branches of a rollout follow each other."""
    return list(accumulate(int(sample.branch == 0) for sample in samples))


def _rollout_counts(samples: list[Sample]) -> tuple[list[int], int]:
    """Of each sample, the trained tokens of its whole rollout; and the number of rollouts that have any."""
    numbers, counts = rollout_numbers(samples), Counter[int]()
    for number, sample in zip(numbers, samples, strict=True):
        counts[number] += num_model_tokens(sample.provenance)
    return [counts[number] for number in numbers], sum(count > 0 for count in counts.values())


def token_weights(samples: list[Sample], aggregation: str, max_new_tokens: int) -> list[float]:
    """The weight of each sample's trained tokens; with ``token`` and ``sequence`` the batch's weights sum to 1.

    With ``sequence`` and ``constant`` the mean is over rollouts, each of which counts once whatever number of branches
    (samples) it is in. One without a trained token does not count.
    """
    counts, num_rollouts = _rollout_counts(samples)
    match aggregation:
        case "token":
            total = sum(num_model_tokens(sample.provenance) for sample in samples)
            return [1 / max(total, 1)] * len(samples)
        case "sequence":
            return [1 / (max(num_rollouts, 1) * max(count, 1)) for count in counts]
        case "constant":
            return [1 / (max(num_rollouts, 1) * max_new_tokens)] * len(samples)
    raise AssertionError(aggregation)


def _shares(samples: list[Sample], weights: list[float]) -> list[Share]:
    counts, num_rollouts = _rollout_counts(samples)
    numbers = rollout_numbers(samples)
    return [
        Share(weight, 1 / (max(num_rollouts, 1) * max(count, 1)), (number, sample.branch))
        for weight, count, number, sample in zip(weights, counts, numbers, samples, strict=True)
    ]


def _units(
    group: list[Sample], shares: list[Share], row_tokens: int, share_prefix: bool, keep_together: bool
) -> list[Unit]:
    group_unit = Unit(group, shares, prefix_tree(group, share=share_prefix))
    if keep_together or len(group) == 1 or (group_unit.tree.is_shared and group_unit.num_tokens <= row_tokens):
        return [group_unit]
    if not group_unit.tree.is_shared:
        return _roots(group_unit, row_tokens)
    return _cut(group_unit, row_tokens)


def _roots(group_unit: Unit, row_tokens: int) -> list[Unit]:
    """One for each of the tree's first nodes."""
    of_root: dict[int, list[int]] = {}
    for place, last in enumerate(group_unit.tree.last):
        of_root.setdefault(group_unit.tree.path(last)[0], []).append(place)
    parts = [([group_unit.samples[p] for p in own], [group_unit.shares[p] for p in own]) for own in of_root.values()]
    return [unit for part in parts for unit in _units(*part, row_tokens, True, False)]


def _cut(group_unit: Unit, row_tokens: int) -> list[Unit]:
    """As many samples in a row as it has room for, one after the other."""
    units: list[Unit] = []
    for sample, share in zip(group_unit.samples, group_unit.shares, strict=True):
        last = units[-1] if units else Unit([], [], Tree([], []))
        longer = Unit([*last.samples, sample], [*last.shares, share], prefix_tree([*last.samples, sample]))
        if units and longer.num_tokens <= row_tokens and longer.tree.is_shared:
            units[-1] = longer
        else:
            units.append(Unit([sample], [share], prefix_tree([sample])))
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


def _checked_advantage(sample: Sample, count: int) -> float | np.ndarray:
    if isinstance(sample.advantage, np.ndarray):
        assert sample.advantage.shape == (count,), "an array of advantages has one for each token that the model wrote"
    return sample.advantage


def _repeated(advantages: list[float | np.ndarray], counts: list[int]) -> np.ndarray:
    """Of each sample's trained tokens."""
    numbers = [advantage for advantage in advantages if not isinstance(advantage, np.ndarray)]
    if len(numbers) == len(advantages):
        return np.repeat(numbers, counts)
    return np.concatenate([np.broadcast_to(a, count) for a, count in zip(advantages, counts, strict=True)])


class _Trained(NamedTuple):
    """The trained tokens of a sample, as a row has them."""

    sample: Sample
    share: Share
    source_S: np.ndarray
    target_S: np.ndarray
    logprob_S: np.ndarray
    mask: SamplingMask | None
    penalized: PenalizedSample | None


def _penalized(sample: Sample, trained_S: np.ndarray, in_row: tuple[tuple[int, int], ...]) -> PenalizedSample | None:
    """``trained_S``: places of its trained tokens. Errors: ValueError for one before the sample's first answer."""
    if sample.penalties is None:
        return None
    if len(trained_S) and not any(start <= trained_S[0] for start in sample.starts):
        raise ValueError(f"token {trained_S[0]} was sampled with penalties, and no answer begins before it")
    return PenalizedSample(sample.penalties, in_row, sample.starts)


class _RowBuilder:
    def __init__(self) -> None:
        self.tokens: list[np.ndarray] = []
        self.positions: list[np.ndarray] = []
        self.routed_experts: list[np.ndarray | None] = []
        self.images: list[PlacedImage] = []
        self.segments: list[Segment] = []
        self.trained: list[_Trained] = []
        self.size = 0

    def _lay(self, unit: Unit) -> list[int]:
        """All its nodes; where each begins."""
        starts: list[int] = []
        for node in unit.tree.nodes:
            prefix = ranges(unit.tree, starts, node.parent)
            starts.append(self.size)
            if (length := node.end - node.begin) > 0:
                sample = unit.samples[node.sample]
                self.tokens.append(sample.tokens[node.begin : node.end])
                experts_TLK = sample.routed_experts
                self.routed_experts.append(None if experts_TLK is None else experts_TLK[node.begin : node.end])
                self.positions.append(_positions(sample, node))
                self.images += _images(sample, node, self.size)
                self.segments.append(Segment(self.size, length, prefix))
                self.size += length
        return starts

    def add(self, unit: Unit) -> None:
        starts = self._lay(unit)
        for sample, share, last in zip(unit.samples, unit.shares, unit.tree.last, strict=True):
            in_row = ranges(unit.tree, starts, last)
            place_T = places(in_row)  # of each of the sample's tokens but its last
            trained_S = np.flatnonzero(is_model(sample.provenance))
            assert not len(trained_S) or trained_S[0] > 0, "the model wrote a first token with nothing before it"
            columns = place_T[trained_S - 1], sample.tokens[trained_S], sample.logprobs[trained_S]
            mask = sample.mask and sample.mask.take(trained_S)
            self.trained.append(_Trained(sample, share, *columns, mask, _penalized(sample, trained_S, in_row)))

    def _in_rollouts(self) -> list[_Trained]:
        """Those of one rollout together, in the order in which the rollouts began."""
        order: dict[int, list[_Trained]] = {}
        for trained in self.trained:
            order.setdefault(trained.share.branch[0], []).append(trained)
        return [trained for own in order.values() for trained in own]

    def build(self, split: frozenset[int] = frozenset()) -> Row:
        """``split``: numbers of rollouts that are in several rows."""
        if not self.size:
            return dummy_row()
        samples, shares, source, target, logprob, masks, penalized = zip(*self._in_rollouts(), strict=True)
        counts = [len(target_S) for target_S in target]
        advantages = [_checked_advantage(sample, count) for sample, count in zip(samples, counts, strict=True)]
        branches, weights = [share.branch for share in shares], [share.weight for share in shares]
        return Row(
            tokens_T=np.concatenate(self.tokens).astype(np.int64),
            positions_T=_joined_positions(self.positions),
            segments=self.segments,
            source_S=np.concatenate(source).astype(np.int64),
            target_S=np.concatenate(target).astype(np.int64),
            logprob_S=np.concatenate(logprob).astype(np.float32),
            advantage_S=_repeated(advantages, counts).astype(np.float32),
            weight_S=np.repeat(weights, counts).astype(np.float32),
            owners=[(s.prompt_id, s.sample, count) for s, count in zip(samples, counts, strict=True)],
            role_columns=_outcomes(samples, shares, counts) | _tasks(samples, counts),
            rollouts=branches,
            split=split.intersection(number for number, _ in branches),
            mask=joined(masks, counts),
            penalized=list(penalized) if any(penalized) else [],
            routed_experts=joined_experts(self.routed_experts, list(map(len, self.tokens))),
            reprompts=_reprompts(samples),
            images=tuple(self.images),
        )


def _positions(sample: Sample, node: Node) -> np.ndarray:
    """Of a node's tokens: [T], or [T, 3] of a sample with images."""
    if not sample.images:
        return np.arange(node.begin, node.end)
    return rope_positions(len(sample.tokens), sample.images)[node.begin : node.end]


def _joined_positions(positions: list[np.ndarray]) -> np.ndarray:
    """int64: [T], or [T, 3] if any are; text has one position on all three axes."""
    width = max(each.ndim for each in positions)
    whole = [np.repeat(each[:, None], 3, axis=1) if each.ndim < width else each for each in positions]
    return np.concatenate(whole).astype(np.int64)


def _images(sample: Sample, node: Node, start: int) -> list[PlacedImage]:
    """Images of a node's tokens, which begin at ``start`` in the row."""
    own = [image for image in sample.images if node.begin <= image.start < node.end]
    assert all(image.stop <= node.end for image in own), "an image lies in two nodes"
    return [image.moved(start - node.begin) for image in own]


def _reprompts(samples: Sequence[Sample]) -> list[np.ndarray | None]:
    """Of each sample; empty where none has one."""
    reprompts = [sample.reprompt for sample in samples]
    return reprompts if any(each is not None for each in reprompts) else []


def _outcomes(samples: Sequence[Sample], shares: Sequence[Share], counts: list[int]) -> dict[str, np.ndarray]:
    """``OUTCOME_COLUMNS``, where samples have outcomes."""
    outcomes = [sample.outcome for sample in samples if sample.outcome is not None]
    if len(outcomes) < len(samples):
        return {}
    columns = outcomes, [share.outcome_weight for share in shares]
    return {
        name: np.repeat(column, counts).astype(np.float32)
        for name, column in zip(OUTCOME_COLUMNS, columns, strict=True)
    }


def _tasks(samples: Sequence[Sample], counts: list[int]) -> dict[str, np.ndarray]:
    """``TASK_COLUMN``, where samples have tasks."""
    tasks = [sample.task for sample in samples]
    return {TASK_COLUMN: np.repeat(tasks, counts).astype(np.int64)} if max(tasks) >= 0 else {}


def pack(
    groups: list[list[Sample]],
    *,
    num_ranks: int,
    row_tokens: int,
    share_prefix: bool,
    weigh: Callable[[list[Sample]], list[float]],
    row_multiple: int = 1,
    keep_together: bool = False,
    set_still_apart: bool = False,
) -> Batch:
    """Rows of at most ``row_tokens`` tokens for each rank, their number a multiple of ``row_multiple``.

    A rank here is a group of trainer ranks that take the same rows. A sample must fit into a row by itself; one
    without a trained token is left out.
    ``keep_together``: a group stands in one row, its samples one after the other; so the whole group must fit.
    ``set_still_apart``: samples that share something and have all the advantage 0 stand in rows with others like them,
    which are the last ones of every rank.

    Samples of different teachers stand in different rows, and rows of one number on all ranks have the same teacher: so
    each token goes through one of them, whatever the layout.
    """
    samples = [sample for group in groups for sample in group]
    assert all(len(s.tokens) - 1 <= row_tokens for s in samples), "a sample is longer than a row"
    shares = iter(_shares(samples, weigh(samples)))
    shared = [[(sample, next(shares)) for sample in group] for group in groups]
    if not keep_together:  # of pairs both are wanted
        shared = [
            [(sample, share) for sample, share in group if num_model_tokens(sample.provenance)] for group in shared
        ]
    units = [
        unit
        for group in shared
        if group
        for unit in _units(*map(list, zip(*group, strict=True)), row_tokens, share_prefix, keep_together)
    ]
    assert all(unit.num_tokens <= row_tokens for unit in units), "a group is longer than a row"
    parts = _by_signal(units) if set_still_apart else [units]
    of_teachers = [of_teacher for part in parts for of_teacher in _by_teacher(part)]
    dealt = [row for part in of_teachers for row in _deal(part, row_tokens, num_ranks * row_multiple)]
    split, rows = _in_several(dealt), []
    for row_units in dealt:
        builder = _RowBuilder()
        for unit in row_units:
            builder.add(unit)
        rows.append(builder.build(split))
    return Batch(
        rows=[rows[rank::num_ranks] for rank in range(num_ranks)],
        num_tokens=sum(unit.num_tokens for unit in units),
        num_trained_tokens=sum(num_model_tokens(sample.provenance) for sample in samples),
        has_signal=_has_signal(samples),
    )


def _in_several(rows: list[list[Unit]]) -> frozenset[int]:
    """Numbers of the rollouts that are in more rows than one."""
    count = Counter(n for units in rows for n in {share.branch[0] for unit in units for share in unit.shares})
    return frozenset(number for number, num_rows in count.items() if num_rows > 1)


def _has_signal(samples: list[Sample]) -> bool:
    return not all(all_zero(sample.advantage) for sample in samples)


def _by_teacher(units: list[Unit]) -> list[list[Unit]]:
    """Those of each teacher, which is one for all samples of a unit."""
    parts: dict[int, list[Unit]] = {}
    for unit in units:
        parts.setdefault(unit.samples[0].teacher, []).append(unit)
    return [parts[teacher] for teacher in sorted(parts)] or [[]]


def _by_signal(units: list[Unit]) -> list[list[Unit]]:
    """Those with one, and then those without, if there are any."""
    parts = [[unit for unit in units if _has_signal(unit.samples) == has] for has in (True, False)]
    return [part for part in parts if part] or [[]]


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
        positions_T=_joined_positions([row.positions_T, zeros]),
        segments=[*row.segments, *pieces],
        routed_experts=joined_experts([row.routed_experts, None], [start, missing]),
    )


def fit_rows(rows: list[Row], *, token_multiple: int, row_multiple: int, same_length: bool) -> list[Row]:
    """Rows as a layout needs them: sequence parallel cuts a row into equal parts, a pipeline wants one shape."""
    rows = [*rows, *(dummy_row() for _ in range(-len(rows) % row_multiple))]
    longest = max(len(row.tokens_T) for row in rows)
    lengths = [longest if same_length else len(row.tokens_T) for row in rows]
    return [_pad_row(row, length + -length % token_multiple) for row, length in zip(rows, lengths, strict=True)]

"""Prefix tree of tokens that samples share; each node's tokens stand once in a row.

    prompt ─┬─ sample 0
            ├─ its first answer ─┬─ one way on        branches of one rollout share what the model wrote, too
            │                    └─ another
            └─ sample 2

Samples of different rollouts share at most what stands before the model's first token in both, and only tokens that
went through the same experts. The last token of a sample is only ever a target, so it is in no node. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from titan_rl.data.types import Sample, is_model

_LEAST = 16
"""Tokens that are worth a node of their own, below the first: each node's queries gather all keys above it."""


@dataclass(frozen=True)
class Node:
    """Tokens [begin, end) of a sample, behind those of the parent."""

    sample: int
    begin: int
    end: int
    parent: int | None


@dataclass(frozen=True)
class Tree:
    nodes: list[Node]
    """Parents before their children; there may be several without one."""
    last: list[int]
    """Of each sample its last node."""

    @property
    def num_tokens(self) -> int:
        return sum(node.end - node.begin for node in self.nodes)

    @property
    def is_shared(self) -> bool:
        """Whether one node is above all."""
        return sum(node.parent is None for node in self.nodes) == 1

    def path(self, number: int | None) -> list[int]:
        """Path from the first node to this one."""
        above: list[int] = []
        while number is not None:
            above.append(number)
            number = self.nodes[number].parent
        return above[::-1]


def prefix_tree(samples: Sequence[Sample], *, share: bool = True) -> Tree:
    """Prefix tree of a group's samples. ``share``: whether anything is shared at all."""
    building = _Building(samples)
    if share:
        building.add(list(range(len(samples))), 0, None)
    else:
        for place in range(len(samples)):
            building.leaf(place, 0, None)
    return Tree(building.nodes, [building.last[place] for place in range(len(samples))])


class _Building:
    def __init__(self, samples: Sequence[Sample]):
        self.samples = samples
        self.heads = [int(is_model(sample.provenance).argmax()) for sample in samples]
        self.nodes: list[Node] = []
        self.last: dict[int, int] = {}

    def leaf(self, place: int, begin: int, parent: int | None) -> None:
        end = len(self.samples[place].tokens) - 1
        if end == begin and parent is not None:
            self.last[place] = parent
        else:
            self.last[place] = self._put(Node(place, begin, end, parent))

    def _put(self, node: Node) -> int:
        self.nodes.append(node)
        return len(self.nodes) - 1

    def add(self, places: list[int], begin: int, parent: int | None) -> None:
        """Samples that are alike up to ``begin``, the end of their parent."""
        if len(places) == 1:
            return self.leaf(places[0], begin, parent)
        end = self._common(places, begin)
        if end - begin >= (_LEAST if parent is not None else 1):
            begin, parent = end, self._put(Node(places[0], begin, end, parent))
        for alike in self._apart(places, end):
            self.add(alike, begin, parent)

    def _common(self, places: list[int], begin: int) -> int:
        """Where the first of them ends, may no longer share, or differs."""
        is_one = len({self._owner(place) for place in places}) == 1
        end = min(len(self.samples[place].tokens) - 1 if is_one else self.heads[place] for place in places)
        for place in places[1:]:
            is_other = _differ(self.samples[places[0]], self.samples[place], slice(begin, end))
            end = begin + int(is_other.argmax()) if is_other.any() else max(end, begin)
        return end

    def _apart(self, places: list[int], end: int) -> list[list[int]]:
        """By what comes next; by whose it is, where no two may share."""
        classes: dict[tuple, list[int]] = {}
        is_one = len({self._owner(place) for place in places}) == 1
        for place in places:
            sample = self.samples[place]
            may_share = end < (len(sample.tokens) - 1 if is_one else self.heads[place])
            key = ("next", *_next(sample, end)) if may_share else ("of", self._owner(place))
            classes.setdefault(key, []).append(place)
        return [alike for key, own in classes.items() for alike in self._once(key, own, is_one)]

    def _once(self, key: tuple, places: list[int], is_one: bool) -> list[list[int]]:
        """Samples of one rollout that have ended alike have nothing more to share."""
        return [[place] for place in places] if is_one and key[0] == "of" else [places]

    def _owner(self, place: int) -> tuple:
        sample = self.samples[place]
        return (sample.prompt_id, sample.sample) if sample.prompt_id else (place,)


def _differ(one: Sample, other: Sample, span: slice) -> np.ndarray:
    """Bool: whether each token of a span, or the experts that it went through, are others."""
    is_other = one.tokens[span] != other.tokens[span]
    if one.routed_experts is None or other.routed_experts is None:
        return is_other | (one.routed_experts is not other.routed_experts)
    return is_other | (one.routed_experts[span] != other.routed_experts[span]).any(axis=(1, 2))


def _next(sample: Sample, place: int) -> tuple[int, bytes]:
    """Token and the experts that it went through."""
    experts_TLK = sample.routed_experts
    return int(sample.tokens[place]), b"" if experts_TLK is None else experts_TLK[place].tobytes()


def ranges(tree: Tree, starts: Sequence[int], number: int | None) -> tuple[tuple[int, int], ...]:
    """Ranges (start, length) of a node's tokens and all above it in a row, in order. ``starts``: of the nodes."""
    nodes = [(starts[each], tree.nodes[each]) for each in tree.path(number)]
    return tuple((start, node.end - node.begin) for start, node in nodes if node.end > node.begin)


def places(ranges: Sequence[tuple[int, int]]) -> np.ndarray:
    """Places of ranges: int64."""
    parts = [np.arange(start, start + length) for start, length in ranges]
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)

"""The pull plan: which bytes of which trainer rank land in which generator rank. Pure arithmetic on boxes.

Trainer ranks *hold* boxes of Hugging Face tensors, generator ranks *need* boxes of them. Where the two meet is a
*piece*. Pieces with the same holders and the same readers make a *segment*: every holder stages it once, in the
same order, and every reader takes it once. A segment is cut into *blocks*, the unit of a read and of a checksum;
if several ranks hold it, each reader takes different blocks from different holders.

Tensors are grouped by layer (``unit``). Layers whose holders and readers look alike share one plan, so planning
does not grow with depth.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

BLOCK_BYTES = 8 << 20
"""Largest read, and what one checksum covers."""
_ALIGNMENT = 64
_PIECE_ALIGNMENT = 4
"""Of the widest dtype, and no more: what pads a piece is read as well."""

_UNIT = re.compile(r"(.*?\.\d+\.)(.+)")
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


class PlanError(ValueError):
    """Mismatch of a trainer layout and a generator layout."""


@dataclass(frozen=True)
class Box:
    """Indices [start, start + size) of each dimension of a tensor."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    def intersect(self, other: "Box") -> "Box | None":
        start = tuple(map(max, self.start, other.start))
        stop = (min(a + n, b + m) for a, n, b, m in zip(self.start, self.size, other.start, other.size, strict=True))
        size = tuple(e - s for s, e in zip(start, stop, strict=True))
        return Box(start, size) if all(n > 0 for n in size) else None

    @property
    def index(self) -> tuple[slice, ...]:
        """This box as an index into the whole tensor."""
        return tuple(slice(s, s + n) for s, n in zip(self.start, self.size, strict=True))

    def within(self, outer: "Box") -> tuple[slice, ...]:
        """This box as an index into a tensor that holds ``outer``."""
        return tuple(slice(s - o, s - o + n) for s, n, o in zip(self.start, self.size, outer.start, strict=True))


@dataclass(frozen=True)
class Holding:
    """Box of a trainer rank. ``name``: the tensor's name without its unit.

    ``dtype``: of what readers get of an adapter's matrix; of a weight they get what they store."""

    name: str
    box: Box
    dtype: str = ""


@dataclass(frozen=True)
class Need:
    """Box of a generator rank, with its stored dtype."""

    name: str
    box: Box
    dtype: str


Units = dict[str, tuple]
"""Unit ("model.layers.17.", or "" for what is in no layer) to its Holdings or Needs; equal ones are one object."""


DRAFTER = "drafter."
"""Begin of the names of a draft model's tensors, where it learns beside the policy."""


def split_name(name: str) -> tuple[str, str]:
    """``model.layers.17.mlp.up_proj.weight`` is ``mlp.up_proj.weight`` of unit ``model.layers.17.``."""
    match = _UNIT.fullmatch(name)
    return (match[1], match[2]) if match else ("", name)


WEIGHT, LORA_A, LORA_B = ".weight", ".lora_A.weight", ".lora_B.weight"
"""Ends of the names of a weight and of its adapter's matrices, A [rank, inputs] and B [outputs, rank]."""


@dataclass(frozen=True)
class AdapterForm:
    """Rank of an adapter's two matrices, and the dtype that readers get them in."""

    rank: int
    dtype: str


def adapted_weights(holdings: Iterable[Units]) -> dict[str, AdapterForm]:
    """Names of the weights whose adapters trainer ranks hold, with the adapters' forms."""
    forms: dict[str, AdapterForm] = {}
    for units in holdings:
        for unit, held in units.items():
            for holding in held:
                if holding.name.endswith(LORA_B):
                    name = f"{unit}{holding.name.removesuffix(LORA_B)}{WEIGHT}"
                    known = forms[name].rank if name in forms else 0
                    forms[name] = AdapterForm(max(known, holding.box.start[1] + holding.box.size[1]), holding.dtype)
    return forms


class Interner:
    """Makes equal tuples one object, so that alike layers are recognised by ``is``."""

    def __init__(self) -> None:
        self._known: dict[tuple, tuple] = {}

    def units(self, entries: Iterable[tuple[str, Holding | Need]]) -> Units:
        """Entries (unit, Holding or Need) by unit."""
        by_unit: dict[str, list] = defaultdict(list)
        for unit, entry in entries:
            by_unit[unit].append(entry)
        return {unit: self.intern(tuple(values)) for unit, values in by_unit.items()}

    def intern(self, values: tuple) -> tuple:
        return self._known.setdefault(values, values)

    def again(self, units: Units) -> Units:
        """Interned units, of units from another message."""
        return {unit: self.intern(values) for unit, values in units.items()}


@dataclass(frozen=True)
class Piece:
    """Intersection of a need and a holding."""

    name: str
    box: Box
    need: Box
    dtype: str

    @property
    def nbytes(self) -> int:
        return self.box.numel * _ITEM_BYTES[self.dtype]


def _aligned(nbytes: int, alignment: int) -> int:
    return -(-nbytes // alignment) * alignment


@dataclass(frozen=True)
class Part:
    """Pieces of one unit in a segment; ``pieces`` is shared by alike units."""

    unit: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Placed:
    """Piece with its offset in a segment."""

    name: str
    piece: Piece
    offset: int


@dataclass(frozen=True)
class Segment:
    """Pieces that the same trainer ranks hold and the same generator ranks need, in a row."""

    holders: tuple[int, ...]
    readers: tuple[int, ...]
    parts: tuple[Part, ...]

    @staticmethod
    def _part_bytes(pieces: tuple[Piece, ...]) -> int:
        return sum(_aligned(piece.nbytes, _PIECE_ALIGNMENT) for piece in pieces)

    @cached_property
    def nbytes(self) -> int:
        sizes = {id(part.pieces): part.pieces for part in self.parts}
        size = {key: self._part_bytes(pieces) for key, pieces in sizes.items()}
        return sum(size[id(part.pieces)] for part in self.parts)

    def placed(self) -> Iterator[Placed]:
        offset = 0
        for part in self.parts:
            for piece in part.pieces:
                yield Placed(part.unit + piece.name, piece, offset)
                offset += _aligned(piece.nbytes, _PIECE_ALIGNMENT)

    @cached_property
    def blocks(self) -> list[tuple[int, int]]:
        """[start, stop) of each block: at least as many as there are holders, if there are bytes for it."""
        size = min(BLOCK_BYTES, _aligned(-(-self.nbytes // len(self.holders)), _ALIGNMENT))
        return [(start, min(start + size, self.nbytes)) for start in range(0, self.nbytes, size)]

    def holder_of(self, block: int, reader: int, replica: int) -> int:
        """The rank that a reader takes a block from: readers and replicas begin at different holders."""
        return self.holders[(block + self.readers.index(reader) + replica) % len(self.holders)]


@dataclass(frozen=True)
class SlotLayout:
    """Segments that a trainer rank stages for one version, with offsets."""

    segments: tuple[tuple[int, Segment], ...]
    """(offset in the slot, segment)."""
    nbytes: int

    @cached_property
    def blocks(self) -> list[tuple[int, int]]:
        """[start, stop) in the slot, in the order of their checksums."""
        return [(base + start, base + stop) for base, segment in self.segments for start, stop in segment.blocks]


@dataclass(frozen=True)
class Read:
    """One block: ``nbytes`` at ``offset`` of a holder's slot go to ``into`` of the reader's buffer."""

    holder: int
    block: int
    """Its place among the holder's blocks."""
    offset: int
    nbytes: int
    into: int


@dataclass(frozen=True)
class ReadPlan:
    """Reads of one generator rank for a version."""

    reads: tuple[Read, ...]
    segments: tuple[tuple[int, Segment], ...]
    """(offset in the reader's buffer, segment)."""
    nbytes: int

    @property
    def holders(self) -> list[int]:
        return sorted({read.holder for read in self.reads})


class Plan:
    """Transfer plan between a trainer layout and a generator layout, shared by all replicas."""

    def __init__(self, holdings: list[Units], needs: list[Units]):
        """``holdings[rank]`` and ``needs[reader]``. Errors: PlanError if a need is not covered exactly once."""
        self.num_holders, self.num_readers = len(holdings), len(needs)
        shared: dict[tuple, list[tuple[tuple[int, ...], tuple[int, ...], tuple[Piece, ...]]]] = {}
        parts: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Part]] = defaultdict(list)
        for unit in dict.fromkeys(unit for units in needs for unit in units):
            holdings_by_rank = [(rank, units[unit]) for rank, units in enumerate(holdings) if unit in units]
            needs_by_reader = [(reader, units[unit]) for reader, units in enumerate(needs) if unit in units]
            # holders are told apart by position, so that the layers of two pipeline stages may look alike
            key = (
                tuple(id(values) for _, values in holdings_by_rank),
                tuple((reader, id(values)) for reader, values in needs_by_reader),
            )
            if key not in shared:
                shared[key] = _unit_pieces(unit, [values for _, values in holdings_by_rank], needs_by_reader)
            for places, readers, pieces in shared[key]:
                holders = tuple(holdings_by_rank[place][0] for place in places)
                parts[holders, readers].append(Part(unit, pieces))
        self.num_shared = len(shared)
        self.segments = [Segment(*key, tuple(parts[key])) for key in sorted(parts)]
        self._slots = self._lay_out()
        self._first_block = {
            (rank, index): first
            for rank, slot in self._slots.items()
            for index, first in zip(
                self._segments_of[rank],
                _running(len(segment.blocks) for _, segment in slot.segments),
                strict=True,
            )
        }

    def _lay_out(self) -> dict[int, SlotLayout]:
        self._segments_of: dict[int, list[int]] = defaultdict(list)
        for index, segment in enumerate(self.segments):
            for holder in segment.holders:
                self._segments_of[holder].append(index)
        self._offset: dict[tuple[int, int], int] = {}
        slots = {}
        for rank, indices in self._segments_of.items():
            offsets = list(_running(_aligned(self.segments[i].nbytes, _ALIGNMENT) for i in indices))
            self._offset |= {(rank, index): offset for index, offset in zip(indices, offsets, strict=True)}
            last = self.segments[indices[-1]]
            placed = tuple((offset, self.segments[index]) for index, offset in zip(indices, offsets, strict=True))
            slots[rank] = SlotLayout(placed, offsets[-1] + _aligned(last.nbytes, _ALIGNMENT))
        return slots

    def slot(self, rank: int) -> SlotLayout:
        return self._slots.get(rank, SlotLayout((), 0))

    @cached_property
    def _segments_for(self) -> dict[int, list[int]]:
        indices: dict[int, list[int]] = defaultdict(list)
        for index, segment in enumerate(self.segments):
            for reader in segment.readers:
                indices[reader].append(index)
        return indices

    def reads(self, reader: int, replica: int) -> ReadPlan:
        """Reads of tensor-parallel rank ``reader`` of a replica, with their holders."""
        reads: list[Read] = []
        placed, base = [], 0
        for index in self._segments_for[reader]:
            segment = self.segments[index]
            for block, (start, stop) in enumerate(segment.blocks):
                holder = segment.holder_of(block, reader, replica)
                source = self._offset[holder, index] + start
                reads.append(Read(holder, self._first_block[holder, index] + block, source, stop - start, base + start))
            placed.append((base, segment))
            base += _aligned(segment.nbytes, _ALIGNMENT)
        return ReadPlan(tuple(reads), tuple(placed), base)


def _running(sizes: Iterable[int]) -> Iterator[int]:
    """Where each part begins when parts of these sizes follow each other."""
    total = 0
    for size in sizes:
        yield total
        total += size


def _unit_pieces(
    unit: str, holdings_by_place: list[tuple[Holding, ...]], needs_by_reader: list[tuple[int, tuple[Need, ...]]]
) -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[Piece, ...]]]:
    """(places in ``holdings_by_place``, readers, pieces) of one unit."""
    holders: dict[str, dict[Box, list[int]]] = defaultdict(lambda: defaultdict(list))
    for place, holdings in enumerate(holdings_by_place):
        for holding in holdings:
            holders[holding.name][holding.box].append(place)
    readers: dict[tuple[str, Box, str], list[int]] = defaultdict(list)
    for reader, needs in needs_by_reader:
        for need in needs:
            reading_ranks = readers[need.name, need.box, need.dtype]
            if reader not in reading_ranks[-1:]:  # one tensor may be loaded into two parameters of a rank
                reading_ranks.append(reader)
    pieces_by_ranks: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Piece]] = defaultdict(list)
    for (name, box, dtype), reading in readers.items():
        covered = 0
        for held_box, places in holders[name].items():
            if (common := held_box.intersect(box)) is not None:
                pieces_by_ranks[tuple(places), tuple(reading)].append(Piece(name, common, box, dtype))
                covered += common.numel
        if covered != box.numel:
            times = "not" if covered < box.numel else "more than once"
            raise PlanError(f"{unit}{name}: {box} is needed by generator rank {reading[0]}, and {times} held in whole")
    return [(places, reading, tuple(pieces)) for (places, reading), pieces in pieces_by_ranks.items()]

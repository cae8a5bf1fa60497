"""The pull plan moves every needed byte once, from whoever holds it, between any two layouts."""

import math
from itertools import product

import numpy as np
import pytest

from titan_rl.mesh.channel.plan import BLOCK_BYTES, Box, Holding, Interner, Need, Plan, PlanError, split_name

TENSORS = {
    "embed.weight": (12, 6),
    **{f"layers.{n}.wide.weight": (8, 6) for n in range(3)},
    **{f"layers.{n}.norm.weight": (6,) for n in range(3)},
}


def cut(shape: tuple[int, ...], dim: int | None, index: int, count: int) -> Box | None:
    """The part of a tensor that torch.chunk would give; None of a dimension is the whole."""
    if dim is None or dim >= len(shape):
        return Box((0,) * len(shape), shape)
    size = math.ceil(shape[dim] / count)
    start = min(index * size, shape[dim])
    stop = min(start + size, shape[dim])
    box = Box(
        tuple(start if d == dim else 0 for d in range(len(shape))),
        tuple(stop - start if d == dim else n for d, n in enumerate(shape)),
    )
    return box if box.numel else None


def trainer(ranks: int, dim: int | None, interner: Interner, stages: int = 1) -> list:
    """Holdings of ``ranks`` a stage; with several stages layer n is at stage n % stages, the rest at the first."""
    units = []
    for stage, rank in product(range(stages), range(ranks)):
        entries = []
        for name, shape in TENSORS.items():
            unit, short = split_name(name)
            here = int(unit.split(".")[1]) % stages == stage if unit else stage == 0
            if here and (box := cut(shape, dim, rank, ranks)) is not None:
                entries.append((unit, Holding(short, box)))
        units.append(interner.units(entries))
    return units


def generator(ranks: int, dim: int | None, interner: Interner) -> list:
    return [
        interner.units(
            (unit, Need(short, box, "float32"))
            for name, shape in TENSORS.items()
            for unit, short in [split_name(name)]
            if (box := cut(shape, dim if len(shape) > 1 else None, rank, ranks)) is not None
        )
        for rank in range(ranks)
    ]


def values(name: str) -> np.ndarray:
    shape = TENSORS[name]
    return (1000 * list(TENSORS).index(name) + np.arange(math.prod(shape), dtype=np.float32)).reshape(shape)


def carry_out(plan: Plan, reader: int, replica: int) -> dict[tuple[str, Box], np.ndarray]:
    """Lay slots down, follow the reads, take the pieces out again."""
    slots = {}
    for rank in range(plan.num_holders):
        layout = plan.slot(rank)
        slots[rank] = np.full(layout.nbytes, 255, np.uint8)
        for base, segment in layout.segments:
            for placed in segment.placed():
                box = placed.piece.box
                whole = tuple(slice(s, s + n) for s, n in zip(box.start, box.size, strict=True))
                data = np.ascontiguousarray(values(placed.name)[whole]).view(np.uint8).ravel()
                slots[rank][base + placed.offset :][: data.size] = data
    reads = plan.reads(reader, replica)
    buffer = np.full(reads.nbytes, 255, np.uint8)
    seen = np.zeros(reads.nbytes, int)
    for read in reads.reads:
        assert plan.slot(read.holder).blocks[read.block] == (read.offset, read.offset + read.nbytes)
        buffer[read.into : read.into + read.nbytes] = slots[read.holder][read.offset : read.offset + read.nbytes]
        seen[read.into : read.into + read.nbytes] += 1
    assert seen.max() == 1, "a byte was read twice"
    got: dict[tuple[str, Box], np.ndarray] = {}
    for base, segment in reads.segments:
        for placed in segment.placed():
            piece = placed.piece
            data = buffer[base + placed.offset :][: piece.nbytes].view(np.float32).reshape(piece.box.size)
            into = got.setdefault((placed.name, piece.need), np.full(piece.need.size, np.nan, np.float32))
            into[piece.box.within(piece.need)] = data
    return got


@pytest.mark.parametrize("trainer_dim, generator_dim", list(product([None, 0, 1], [None, 0, 1])))
@pytest.mark.parametrize("ranks, stages, readers", [(1, 1, 1), (2, 1, 2), (3, 1, 2), (2, 2, 3), (1, 3, 2)])
def test_every_reader_gets_what_it_needs(trainer_dim, generator_dim, ranks, stages, readers):
    interner = Interner()
    needs = generator(readers, generator_dim, interner)
    plan = Plan(trainer(ranks, trainer_dim, interner, stages), needs)
    for reader, replica in product(range(readers), range(2)):
        got = carry_out(plan, reader, replica)
        wanted = {(unit + need.name, need.box) for unit, entries in needs[reader].items() for need in entries}
        assert set(got) == wanted
        for (name, box), array in got.items():
            whole = tuple(slice(s, s + n) for s, n in zip(box.start, box.size, strict=True))
            np.testing.assert_array_equal(array, values(name)[whole])


def test_bytes_read_are_bytes_needed():
    interner = Interner()
    plan = Plan(trainer(2, 0, interner), generator(2, 1, interner))
    for reader, units in enumerate(generator(2, 1, interner)):
        needed = sum(4 * need.box.numel for needs in units.values() for need in needs)
        assert sum(read.nbytes for read in plan.reads(reader, 0).reads) == needed


def test_alike_layers_share_one_plan():
    """Also those of different pipeline stages."""
    interner = Interner()
    plan = Plan(trainer(2, 0, interner, stages=3), generator(2, 1, interner))
    assert plan.num_shared == 2  # the embedding, and any layer


def test_replicas_spread_their_reads_over_holders():
    interner = Interner()
    plan = Plan(trainer(4, None, interner), generator(1, None, interner))
    taken = [[read.holder for read in plan.reads(0, replica).reads] for replica in range(4)]
    assert all(sorted(holders) == [0, 1, 2, 3] for holders in taken), "one replica reads from everyone"
    assert all(len(set(block)) == 4 for block in zip(*taken, strict=True)), "and no two ask the same one for a block"


def test_blocks_are_bounded():
    interner = Interner()
    big = Box((0,), (BLOCK_BYTES,))
    plan = Plan([interner.units([("", Holding("w", big))])], [interner.units([("", Need("w", big, "bfloat16"))])])
    assert [read.nbytes for read in plan.reads(0, 0).reads] == [BLOCK_BYTES, BLOCK_BYTES]


@pytest.mark.parametrize("held, word", [([(0, 4)], "not held"), ([(0, 6), (4, 8)], "more than once")])
def test_what_nobody_or_too_many_hold_is_refused(held, word):
    interner = Interner()
    holdings = [interner.units([("", Holding("w", Box((a,), (b - a,))))]) for a, b in held]
    with pytest.raises(PlanError, match="w") as error:
        Plan(holdings, [interner.units([("", Need("w", Box((0,), (8,)), "float32"))])])
    assert word.split()[0] in str(error.value)


def test_one_tensor_in_two_parameters_travels_once():
    interner = Interner()
    box = Box((0,), (8,))
    needs = interner.units([("", Need("w", box, "float32")), ("", Need("w", box, "float32"))])
    plan = Plan([interner.units([("", Holding("w", box))])], [needs])
    assert sum(read.nbytes for read in plan.reads(0, 0).reads) == 32


def test_units_are_the_outermost_layers():
    assert split_name("model.layers.3.mlp.experts.7.up_proj.weight") == (
        "model.layers.3.",
        "mlp.experts.7.up_proj.weight",
    )
    assert split_name("lm_head.weight") == ("", "lm_head.weight")

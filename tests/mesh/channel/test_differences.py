"""Versions that come as differences between hosts: the same bits in fewer bytes, and whole blocks where they would be
no fewer."""

import asyncio

import numpy as np
import pytest
import torch
from test_relay import CPU, World

from titan_rl.mesh.channel.plan import Box, Interner, Need, Plan
from titan_rl.mesh.channel.tcp.differences import (
    WrongDifference,
    apply_difference,
    difference,
    longest_difference,
)
from titan_rl.mesh.channel.writer import WeightWriter, holdings

RANDOM = np.random.default_rng(1)


def changed(old: np.ndarray, share: float) -> np.ndarray:
    new = old.copy()
    places = RANDOM.choice(len(old), round(share * len(old)), replace=False)
    new[places] ^= RANDOM.integers(1, 1 << 16, len(places), dtype=np.uint16)
    return new


@pytest.mark.parametrize("share", [0.0, 1e-5, 0.01, 0.2])
@pytest.mark.parametrize("count", [1, 7, 1 << 16, (1 << 16) + 1, 3 * (1 << 16) - 5])
def test_a_difference_makes_the_new_block_of_the_old_one(count, share):
    old = RANDOM.integers(0, 1 << 16, count, dtype=np.uint16)
    new = changed(old, share)
    data = difference(old.data.cast("B"), new.data.cast("B"))
    assert data is not None and len(data) <= 4 * (1 + count // (1 << 16)) + 4 * round(share * count)
    assert len(data) <= longest_difference(2 * count)
    block = bytearray(old.tobytes())
    apply_difference(data, memoryview(block))
    assert block == new.tobytes()


def test_the_longest_difference_is_sent_and_taken():
    count = 3 << 16
    old = RANDOM.integers(0, 1 << 16, count, dtype=np.uint16)
    new = old.copy()
    new[::4] ^= 1
    data = difference(old.data.cast("B"), new.data.cast("B"))
    assert data is not None and len(data) == longest_difference(2 * count)
    new[1] ^= 1
    assert difference(old.data.cast("B"), new.data.cast("B")) is None


@pytest.mark.parametrize(("count", "share"), [(100_000, 0.3), (100_000, 1.0), (10, 0.9)])
def test_blocks_that_changed_too_much_have_none(count, share):
    old = RANDOM.integers(0, 1 << 16, count, dtype=np.uint16)
    assert difference(old.data.cast("B"), changed(old, share).data.cast("B")) is None
    assert difference(memoryview(b"abc"), memoryview(b"abd")) is None


@pytest.mark.parametrize("cut", [0, 1, 3, 4, 6, -1])
def test_bytes_that_are_no_difference_change_nothing(cut):
    old = RANDOM.integers(0, 1 << 16, 1000, dtype=np.uint16)
    data = difference(old.data.cast("B"), changed(old, 0.01).data.cast("B"))
    block = bytearray(old.tobytes())
    wrong = [data[:cut], data + bytes(4), bytes(4) + data]
    beyond = np.array([1], "<u4").tobytes() + np.array([1000, 5], "<u2").tobytes()
    for each in (*wrong, beyond):
        with pytest.raises(WrongDifference):
            apply_difference(each, memoryview(block))
    assert block == old.tobytes()


SHAPES = {"embed": (64, 32), "norm": (3,), "cube": (8, 30, 16)}


class SmallSteps(World):
    """Weights stored in bfloat16, of which each version changes a few."""

    share = 0.03

    def __init__(self, hosts: list[str]):
        super().__init__(hosts)
        interner = Interner()
        needs = interner.units(
            ("", Need(name, Box((0,) * len(shape), shape), "bfloat16")) for name, shape in SHAPES.items()
        )
        self.plan = Plan([holdings(held, interner) for held in self.shards], [needs])
        self.writers = [
            WeightWriter(rank, self.shards[rank], self.plan.slot(rank), CPU, epoch=self.epoch)
            for rank in range(self.ranks)
        ]
        self.readers = [self.reader(number, self.epoch) for number in range(len(hosts))]

    def publish(self, version: int, ranks=None) -> None:
        torch.manual_seed(version)
        for values in self.parameters.values():
            values.copy_(torch.where(torch.rand_like(values) < self.share, torch.randn_like(values), values))
        for writer in self.writers:
            writer.stage(version)
            writer.wait()

    def check(self, version: int, of=None) -> None:
        for reader in self.readers:
            assert reader.held == version
            for name, need, box, values in reader.pieces():
                assert torch.equal(values, self.parameters[name].bfloat16()[box.within(need)])

    @property
    def sent(self) -> int:
        return self.sent_by_trainers + sum(
            self.bytes_sent(reader.relay) for reader in self.readers if reader.relay is not None
        )


def run(world: World, versions) -> list[int]:
    """Bytes between hosts of each version, whose bits are checked."""
    sent = [0]
    for version in versions:
        world.publish(version)
        asyncio.run(world.fetch(version))
        world.check(version)
        sent.append(world.sent)
    return np.diff(sent).tolist()


@pytest.mark.parametrize("hosts", [["a"], ["a", "b", "c"], ["a", "a", "b", "b", "c"]])
def test_versions_come_as_differences_from_trainers_and_from_other_hosts(hosts):
    whole, *rest = run(SmallSteps(hosts), range(1, 6))
    assert all(sent < 0.25 * whole for sent in rest)


def test_the_bits_are_equal_after_five_hundred_versions():
    whole, *rest = run(SmallSteps(["a", "b"]), range(500))
    assert sum(rest) < 0.25 * whole * len(rest)


def test_who_is_behind_or_has_nothing_gets_whole_versions():
    world = SmallSteps(["a"])
    whole, _ = run(world, [1, 2])
    world.publish(3)  # nobody fetches it
    assert run(world, [4])[0] >= whole
    world.readers[0].let_go()
    assert run(world, [5])[0] >= whole


def test_a_large_step_is_sent_whole():
    world = SmallSteps(["a"])
    world.share = 1.0
    first, second = run(world, [1, 2])
    assert second == first


def test_a_difference_that_is_damaged_is_read_again_whole(monkeypatch):
    world = SmallSteps(["a"])
    run(world, [1])
    applied, calls = apply_difference, []

    def damaged(data, block):
        applied(data, block)
        if not calls:
            block[0] ^= 1
        calls.append(len(data))

    monkeypatch.setattr("titan_rl.mesh.channel.tcp.client.apply_difference", damaged)
    run(world, [2])
    assert calls


def test_where_a_relay_is_gone_trainers_give_what_is_missing():
    world = SmallSteps(["a", "b", "c"])
    run(world, [1])
    routes = world.routes()
    world.publish(2)
    asyncio.run(world.fetch(2, of=[0], routes=routes))
    world.readers[0].close()
    fetched = asyncio.run(world.fetch(2, of=[1, 2], routes=routes))
    assert any(one.fallbacks for one in fetched)
    world.check(2)

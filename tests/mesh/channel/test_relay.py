"""Versions that generator ranks hand on to each other. One process plays all hosts, over real sockets and mappings."""

import asyncio
import dataclasses
import threading
import time

import pytest
import torch

from titan_rl.mesh.channel import plan as plan_module
from titan_rl.mesh.channel.memory.region import stamp_of
from titan_rl.mesh.channel.plan import Box, Interner, Need, Plan
from titan_rl.mesh.channel.reader import ReaderSetup, WeightReader
from titan_rl.mesh.channel.relay import memory as memory_module
from titan_rl.mesh.channel.relay.gathering import Parent, Route
from titan_rl.mesh.channel.relay.trees import parents_of, parents_of_a_late_one
from titan_rl.mesh.channel.sources import TornRead
from titan_rl.mesh.channel.tcp import client as client_module
from titan_rl.mesh.channel.tcp.server import block_server
from titan_rl.mesh.channel.writer import WeightWriter, holdings
from titan_rl.models.weights.shards import Shard

CPU = torch.device("cpu")
SHAPES = {"embed": (64, 32), "norm": (3,), "cube": (8, 30, 16)}
TOTAL = sum(4 * torch.Size(shape).numel() for shape in SHAPES.values())


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(plan_module, "BLOCK_BYTES", 512)


@pytest.fixture
def impatient(monkeypatch):
    """Nobody waits long for one who has not begun, or is silent."""
    for module in (client_module, memory_module):
        monkeypatch.setattr(module, "IDLE_SECONDS", 0.3)
    monkeypatch.setattr(client_module, "SILENCE_SECONDS", 0.3)


def values_of(version: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(version)
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


class World:
    """Trainer ranks that split tensors by rows, and a reader for each of ``hosts``, whose id that is."""

    def __init__(self, hosts: list[str], ranks: int = 2, epoch: int = 1):
        self.hosts, self.ranks, self.epoch = hosts, ranks, epoch
        self.parameters, interner = values_of(0), Interner()
        self.shards = [self.rows(rank) for rank in range(ranks)]
        needs = interner.units(
            ("", Need(name, Box((0,) * len(shape), shape), "float32")) for name, shape in SHAPES.items()
        )
        self.plan = Plan([holdings(held, interner) for held in self.shards], [needs])
        self.writers = [self.writer(rank, epoch) for rank in range(ranks)]
        self.readers = [self.reader(number, epoch) for number in range(len(hosts))]

    def rows(self, rank: int) -> list[Shard]:
        found = []
        for name, shape in SHAPES.items():
            parts = self.parameters[name].chunk(self.ranks)
            if rank < len(parts):
                start = sum(len(part) for part in parts[:rank])
                found.append(Shard(name, shape, (start,) + (0,) * (len(shape) - 1), parts[rank]))
        return found

    def writer(self, rank: int, epoch: int) -> WeightWriter:
        return WeightWriter(rank, self.shards[rank], self.plan.slot(rank), CPU, epoch=epoch)

    def reader(self, number: int, epoch: int) -> WeightReader:
        handles = [writer.region.handle(over_rdma=False, over_tcp=True) for writer in self.writers]
        plan = self.plan.reads(0, number)
        setup = ReaderSetup(plan, handles, ["tcp"] * self.ranks, epoch, f"generator {number}")
        return WeightReader(setup, CPU)

    def publish(self, version: int, ranks: list[int] | None = None) -> None:
        for name, values in values_of(version).items():
            self.parameters[name].copy_(values)
        for rank in range(self.ranks) if ranks is None else ranks:
            self.writers[rank].stage(version)
            self.writers[rank].wait()

    def parent(self, child: int, place: int | None) -> Parent | None:
        if place is None:
            return None
        return Parent(self.readers[place].relay, "shared_memory" if self.hosts[place] == self.hosts[child] else "tcp")

    def routes(self) -> list[Route]:
        return [
            Route(self.epoch, tuple(self.parent(child, place) for place in places))
            for child, places in enumerate(parents_of(self.hosts))
        ]

    async def fetch(self, version: int, timeout: float = 20.0, of: list[int] | None = None, routes=None) -> list:
        routes = routes or self.routes()
        numbers = range(len(self.readers)) if of is None else of
        works = (self.readers[number].fetch(version, timeout, routes[number]) for number in numbers)
        return await asyncio.gather(*works)

    def check(self, version: int, of: list[int] | None = None) -> None:
        for number in range(len(self.readers)) if of is None else of:
            reader = self.readers[number]
            assert reader.held == version
            got = {name: torch.full(shape, float("nan")) for name, shape in SHAPES.items()}
            for name, need, box, values in reader.pieces():
                got[name][box.within(need)] = values
            assert all(torch.equal(got[name], values) for name, values in values_of(version).items())

    def bytes_sent(self, handle) -> int:
        return block_server().bytes_sent[handle.tcp.region]

    @property
    def sent_by_trainers(self) -> int:
        return sum(self.bytes_sent(w.region.handle(over_rdma=False, over_tcp=True)) for w in self.writers)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
def test_trainers_send_a_version_once_whatever_the_number_of_hosts(count):
    world = World([f"host {number}" for number in range(count)])
    for version in (1, 2, 3):
        before = world.sent_by_trainers
        world.publish(version)
        fetched = asyncio.run(world.fetch(version))
        world.check(version)
        assert sum(one.bytes_from_trainers for one in fetched) == world.sent_by_trainers - before == TOTAL
        assert sum(one.bytes_from_generators for one in fetched) == (count - 1) * TOTAL
        assert not any(one.fallbacks for one in fetched)
    assert all(world.bytes_sent(reader.relay) <= 3 * TOTAL * 1.1 for reader in world.readers)


def test_processes_of_one_host_take_it_from_one_of_them_without_the_network():
    world = World(["a", "a", "b", "a", "b"])
    world.publish(1)
    fetched = asyncio.run(world.fetch(1))
    world.check(1)
    assert sum(one.bytes_from_trainers for one in fetched) == TOTAL
    assert [one.bytes_from_generators for one in fetched][1::2] == [0, 0] and fetched[4].bytes_from_generators == 0


def test_blocks_are_handed_on_while_others_are_still_to_come():
    """What one trainer rank has staged is at the last host before the other has staged anything."""
    world = World(["a", "b", "c"])

    async def run():
        world.publish(1, ranks=[0])
        fetching = asyncio.ensure_future(world.fetch(1))
        first = stamp_of(1, 1)
        end = time.monotonic() + 20
        while not all(reader._relay.has(0, first) for reader in world.readers):
            assert time.monotonic() < end
            await asyncio.sleep(0.01)
        assert not fetching.done() and world.readers[2].held is None
        world.publish(1, ranks=[1])
        return await fetching

    fetched = asyncio.run(run())
    world.check(1)
    assert sum(one.bytes_from_trainers for one in fetched) == TOTAL


@pytest.mark.parametrize("same_host", [False, True])
def test_who_waits_for_one_that_never_begins_takes_it_from_the_trainers(impatient, same_host):
    world = World(["a", "a" if same_host else "b"])
    world.publish(1)
    route = Route(1, (world.parent(1, 0),))
    [fetched] = asyncio.run(world.fetch(1, of=[1], routes=[None, route]))
    world.check(1, of=[1])
    assert fetched.bytes_from_trainers == TOTAL and "generator 0 was left" in fetched.fallbacks[0]


def test_who_waits_for_one_that_fails_takes_it_from_the_trainers():
    world = World(["a", "b"])
    world.publish(1)
    world.readers[0]._relay.begin(stamp_of(1, 1))
    fail = threading.Timer(0.3, world.readers[0]._relay.fail, [stamp_of(1, 1)])
    fail.start()
    [fetched] = asyncio.run(world.fetch(1, of=[1], routes=[None, Route(1, (world.parent(1, 0),))]))
    fail.join()
    world.check(1, of=[1])
    assert "gone" in fetched.fallbacks[0]


def test_a_cut_link_is_left_in_the_middle_and_what_has_come_is_kept(impatient, monkeypatch):
    """The parent's server falls silent after some blocks."""
    world = World(["a", "b"])
    world.publish(1)
    asyncio.run(world.fetch(1, of=[0], routes=[Route(1)]))
    server, number, seen = block_server(), world.readers[0].relay.tcp.region, []
    send = server.send_block

    def cut(stream, region: int, block) -> None:
        if region == number:
            seen.append(block)
            if len(seen) > 8:
                time.sleep(1.0)
                raise ConnectionError("cut")
        send(stream, region, block)

    monkeypatch.setattr(server, "send_block", cut)
    [fetched] = asyncio.run(world.fetch(1, of=[1], routes=[None, Route(1, (world.parent(1, 0),))]))
    world.check(1, of=[1])
    assert 0 < fetched.bytes_from_generators < TOTAL and len(fetched.fallbacks) == 1
    assert fetched.bytes_from_trainers + fetched.bytes_from_generators == TOTAL


def test_a_block_that_was_spoilt_on_its_way_is_taken_from_the_trainers():
    world = World(["a", "b", "c"])
    world.publish(1)
    asyncio.run(world.fetch(1, of=[0], routes=[Route(1)]))
    world.readers[0].buffer[5] ^= 1
    route = Route(1, (world.parent(1, 0),))
    [fetched] = asyncio.run(world.fetch(1, of=[1], routes=[None, route]))
    world.check(1, of=[1])
    assert "WrongBlock" in fetched.fallbacks[0] and 0 < fetched.bytes_from_trainers < TOTAL


def test_a_late_one_takes_the_live_version_from_those_who_have_it():
    world = World(["a", "b", "c"])
    for version in (1, 2):
        world.publish(version)
        asyncio.run(world.fetch(version, of=[0, 1], routes=[Route(1)] * 2))
    world.publish(3)
    parents = parents_of_a_late_one("c", ["a", "b"], 2)
    route = Route(1, tuple(world.parent(2, place) for place in parents))
    [fetched] = asyncio.run(world.fetch(2, of=[2], routes=[None, None, route]))
    world.check(2, of=[2])
    assert fetched.bytes_from_trainers == 0 and fetched.bytes_from_generators == TOTAL


def test_a_trainer_that_cannot_be_reached_for_a_while_is_asked_again():
    world = World(["a"])
    world.publish(1)
    reader = world.readers[0]
    sources = list(reader._sources.values())
    true = sources[1].client.address
    sources[1].client.address = dataclasses.replace(true, port=1)
    heal = threading.Timer(0.7, setattr, (sources[1].client, "address", true))
    heal.start()
    asyncio.run(world.fetch(1))
    heal.join()
    world.check(1)


def test_what_is_let_go_comes_again_and_nobody_is_served_by_one_that_was_closed(impatient):
    world = World(["a", "b"])
    world.publish(1)
    asyncio.run(world.fetch(1))
    for reader in world.readers:
        reader.let_go()
        assert reader.held is None and not reader.buffer.any()
    asyncio.run(world.fetch(1))
    world.check(1)
    parent = world.parent(1, 0)
    world.readers[0].close()
    [fetched] = asyncio.run(world.fetch(1, of=[1], routes=[None, Route(1, (parent,))]))
    assert fetched.bytes_from_trainers == 0, "it has them all"
    world.readers[1].let_go()
    [fetched] = asyncio.run(world.fetch(1, of=[1], routes=[None, Route(1, (parent,))]))
    world.check(1, of=[1])
    assert "unknown" in fetched.fallbacks[0] and fetched.bytes_from_trainers == TOTAL


# fencing


def test_a_trainer_that_was_declared_lost_publishes_nothing_that_anybody_takes():
    """It lives on behind a cut, and stages a later version than its replacement; one generator knows only it."""
    world = World(["a", "b"])
    world.publish(1)
    asyncio.run(world.fetch(1))
    lost, cut_off = world.writers, world.readers[1]
    world.writers = [world.writer(rank, 2) for rank in range(world.ranks)]
    world.readers[0] = world.reader(0, 2)
    for writer in lost:
        writer.stage(3)
        writer.wait()
    world.publish(2)
    asyncio.run(world.fetch(2, of=[0], routes=[Route(2)]))
    world.check(2, of=[0])
    with pytest.raises(TornRead, match="of epoch 2, and the trainers known here are of 1"):
        asyncio.run(cut_off.fetch(3, 5.0, Route(2)))
    cut_off.epoch = 2  # and even if it took the word, but not the regions, of the new epoch
    with pytest.raises(TornRead, match="failed to stage version 3, or began anew"):
        asyncio.run(cut_off.fetch(3, 5.0, Route(2)))
    assert cut_off.held is None


def test_who_is_of_an_earlier_epoch_hands_nothing_on(impatient):
    world = World(["a", "b"])
    world.publish(1)
    asyncio.run(world.fetch(1, of=[0], routes=[Route(1)]))
    stale = world.parent(1, 0)
    world.writers = [world.writer(rank, 2) for rank in range(world.ranks)]
    world.readers[1] = world.reader(1, 2)
    world.publish(1)
    [fetched] = asyncio.run(world.fetch(1, of=[1], routes=[None, Route(2, (stale,))]))
    world.check(1, of=[1])
    assert fetched.bytes_from_trainers == TOTAL and len(fetched.fallbacks) == 1


def test_a_rank_refuses_to_publish_for_another_epoch():
    world = World(["a"])
    with pytest.raises(ValueError, match="asked for in epoch 2, and this rank is in 1"):
        world.writers[0].stage(1, 2)


def test_regions_that_were_withdrawn_end_all_waits_at_once():
    world = World(["a", "b", "c"])

    async def run():
        fetching = asyncio.ensure_future(asyncio.wait_for(world.fetch(1, timeout=60), 20))
        await asyncio.sleep(0.3)
        for writer in world.writers:
            writer.withdraw()
        with pytest.raises(TornRead, match="began anew"):
            await fetching

    asyncio.run(run())

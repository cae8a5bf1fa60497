"""A weight version is read whole or not at all. One process plays both sides, over the mapping that two would share."""

import asyncio
import mmap
from dataclasses import replace

import pytest
import torch

from titan_rl.mesh.channel import (
    RegionHandle,
    TornRead,
    WeightReader,
    WeightVersion,
    WeightWriter,
    choose_transport,
)

DTYPES = [torch.float32, torch.bfloat16]


def parameters_of(seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {"embed": torch.randn(7, 5), "norm": torch.randn(3), "cube": torch.randn(2, 3, 4)}


class Channel:
    """One trainer rank and one reader; each version holds other values."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        self.parameters = parameters_of(0)
        self.writer = WeightWriter(0, self.parameters, dtype)
        self.handle = self.writer.handle("shared_memory")
        self.reader = WeightReader([self.handle], "shared_memory")

    def publish(self, number: int) -> WeightVersion:
        for name, values in parameters_of(number).items():
            self.parameters[name].copy_(values)
        return WeightVersion(number, (self.writer.publish(number),))

    def fetch(self, version: WeightVersion) -> dict[str, torch.Tensor]:
        asyncio.run(self.reader.fetch(version, timeout=5))
        return {name: tensor.clone() for name, tensor in self.reader.tensors(version)}


def assert_same(got: dict[str, torch.Tensor], number: int, dtype: torch.dtype = torch.float32) -> None:
    wanted = parameters_of(number)
    assert set(got) == set(wanted)
    for name, tensor in wanted.items():
        assert got[name].dtype == dtype and torch.equal(got[name], tensor.to(dtype)), name


def flip_byte(handle: RegionHandle, slot: int, offset: int) -> None:
    with open(f"/proc/{handle.pid}/fd/{handle.fd}", "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[mmap.PAGESIZE + slot * handle.slot_bytes + offset] ^= 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_arrive_as_they_were_cast(dtype):
    channel = Channel(dtype)
    for number in range(4):
        version = channel.publish(number)
        assert_same(channel.fetch(version), number, dtype)
        channel.reader.confirm(version)


def test_version_stays_readable_until_the_one_after_the_next():
    channel = Channel()
    first = channel.publish(1)
    channel.publish(2)
    assert_same(channel.fetch(first), 1)
    channel.reader.confirm(first)
    channel.publish(3)
    with pytest.raises(TornRead, match="holds version 3 where 1 was announced"):
        channel.fetch(first)


def test_overwriting_while_it_is_applied_is_noticed_at_the_end():
    channel = Channel()
    first = channel.publish(1)
    channel.fetch(first)
    channel.publish(3)
    with pytest.raises(TornRead):
        channel.reader.confirm(first)


@pytest.mark.parametrize("offset", [0, 7 * 5 * 4 - 1, 192 + 2 * 3 * 4 * 4 - 1])
def test_corrupted_byte_fails_the_checksum(offset):
    channel = Channel()
    first, second = channel.publish(1), channel.publish(2)
    assert_same(channel.fetch(first), 1)
    flip_byte(channel.handle, first.slot, offset)
    with pytest.raises(TornRead, match="version 1 .*rank 0.* checksum"):
        channel.fetch(first)
    assert_same(channel.fetch(second), 2)


def test_announced_version_that_was_never_written_is_not_read():
    channel = Channel()
    with pytest.raises(TornRead):
        channel.fetch(WeightVersion(0, (0,)))
    version = channel.publish(1)
    with pytest.raises(TornRead):
        channel.fetch(WeightVersion(3, version.checksums))


def test_shards_of_two_ranks_are_put_together_whatever_the_order():
    """Two writers of plain tensors stand for two ranks; their handles are told what the shards are part of."""
    whole = torch.arange(20.0).view(5, 4)
    rows = {1: slice(3, 5), 0: slice(0, 3)}
    writers = [WeightWriter(rank, {"w": whole[part].clone()}, torch.float32) for rank, part in rows.items()]
    handles = []
    for writer, part in zip(writers, rows.values(), strict=True):
        handle = writer.handle("shared_memory")
        handles.append(replace(handle, chunks=[replace(handle.chunks[0], shape=(5, 4), row=part.start)]))
    reader = WeightReader(handles, "shared_memory")
    version = WeightVersion(0, tuple(writer.publish(0) for writer in writers))
    asyncio.run(reader.fetch(version, timeout=5))
    [(name, tensor)] = reader.tensors(version)
    assert name == "w" and torch.equal(tensor, whole)

    flip_byte(handles[1], version.slot, 0)
    with pytest.raises(TornRead, match="rank 0"):
        asyncio.run(reader.fetch(version, timeout=5))


def test_one_rank_behind_makes_the_version_invisible():
    writers = [WeightWriter(rank, {f"w{rank}": torch.ones(2)}, torch.float32) for rank in range(2)]
    reader = WeightReader([writer.handle("shared_memory") for writer in writers], "shared_memory")
    version = WeightVersion(1, (writers[0].publish(1), 0))
    with pytest.raises(TornRead, match="rank 1"):
        asyncio.run(reader.fetch(version, timeout=5))


def test_transport_follows_the_hosts_unless_it_is_set():
    assert choose_transport("auto", "a", "a") == "shared_memory"
    assert choose_transport("auto", "a", "b") == "rdma"
    assert choose_transport("rdma", "a", "a") == "rdma"

"""Staging: bytes, checksums and error bounds of both implementations; check_* run in Triton's interpreter."""

import pytest
import torch
from kernel_checks import poison, run_interpreted

from titan_rl.kernels.pack_cast import Staging, checksum

SHAPES = [(1,), (130, 576), (7, 33), (256, 128), (5, 3, 2), (64,), (1, 16), (129, 144)]
"""Odd sizes, one value, shards larger than a block, rows that FP8 cannot take, three dimensions."""
IN_FP8 = {(130, 576), (256, 128), (1, 16), (129, 144)}


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    poison(monkeypatch)


def shards_of(shapes) -> list[torch.Tensor]:
    """Magnitudes over many orders, zeros, and a block of zeros."""
    torch.manual_seed(0)
    shards = [torch.randn(shape) * torch.randn(shape).mul(3).exp() for shape in shapes]
    for shard in shards:
        shard[0] = 0
        if len(shard) > 128:
            shard[128:] = 0
    return shards


def sum_by_hand(buffer: torch.Tensor) -> int:
    words = buffer.view(torch.int32).tolist()
    total = sum(word * ((index + 1) * -7046029254386353131 | 1) for index, word in enumerate(words))
    return (total + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("fp8", [False, True])
def test_there_and_back(fp8):
    shards, staging = shards_of(SHAPES), Staging(SHAPES, fp8=fp8)
    buffer, sent = staging.pack(shards)
    assert buffer.nbytes == staging.num_bytes and int(sent) == sum_by_hand(buffer)
    found, received = staging.unpack(buffer)
    assert received == sent
    assert {place.shape for place in staging.places if place.fp8} == (IN_FP8 if fp8 else set())
    for shard, back, place in zip(shards, found, staging.places, strict=True):
        if place.fp8:
            scale = shard.new_zeros(shard.shape)
            for row in range(0, shard.shape[0], 128):
                for column in range(0, shard.shape[1], 128):
                    block = slice(row, row + 128), slice(column, column + 128)
                    scale[block] = shard[block].abs().max() / 448
            bound = torch.maximum(2**-4 * shard.abs(), 2**-10 * scale) * (1 + 2**-20) + 2**-120
            assert ((back - shard).abs() <= bound).all()
        else:
            assert torch.equal(back, shard.bfloat16().float())


def test_the_largest_value_of_a_block_keeps_its_size():
    shard = torch.zeros(128, 128)
    shard[3, 5] = -1e-30
    staging = Staging([(128, 128)], fp8=True)
    assert staging.unpack(staging.pack([shard])[0])[0][0][3, 5] == pytest.approx(-1e-30, rel=1e-6)


@pytest.mark.parametrize("wrong", ["flipped", "swapped"])
def test_a_changed_buffer_has_another_checksum(wrong):
    staging = Staging([(40,)])
    buffer, sent = staging.pack([torch.randn(40)])
    words = buffer.view(torch.int32)
    if wrong == "flipped":
        buffer[17] ^= 1
    else:
        words[[2, 5]] = words[[5, 2]]
    assert checksum(buffer) != sent


@pytest.mark.parametrize("fp8", [False, True])
def check_triton_writes_the_references_bytes(fp8):
    shards = shards_of(SHAPES)
    expected, sent = Staging(SHAPES, fp8=fp8).pack(shards)
    staging = Staging(SHAPES, fp8=fp8, implementation="triton")
    buffer, found = staging.pack(shards)
    assert torch.equal(buffer, expected) and found == sent
    back, received = staging.unpack(buffer)
    assert received == sent
    for mine, other in zip(back, Staging(SHAPES, fp8=fp8).unpack(buffer)[0], strict=True):
        assert torch.equal(mine, other)


def check_shards_that_are_not_aligned():
    shard = torch.randn(101)[1:]
    buffer, found = Staging([(100,)], implementation="triton").pack([shard])
    assert torch.equal(buffer[:200].view(torch.bfloat16), shard.bfloat16()) and found == checksum(buffer)


def test_no_shards():
    buffer, sent = Staging([]).pack([])
    assert len(buffer) == 0 and sent == 0


def test_triton_in_its_interpreter():
    run_interpreted(__file__)

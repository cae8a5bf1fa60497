"""block_sums against Python's whole numbers, and against what the staging buffer's checksum gives of one block."""

import numpy as np
import pytest
import torch
from kernel_checks import poison, run_interpreted

from titan_rl.kernels import pack_cast
from titan_rl.kernels.block_sums import block_sums

BLOCKS = [
    [(0, 4)],
    [(0, 64), (64, 128)],
    [(0, 4096), (4096, 4100), (8192, 8192 + 2052)],
    [(512, 512), (16, 20)],
    [],
]
"""The interpreter's programs take 512 words, and those of one block are added up."""


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    poison(monkeypatch)


def by_whole_numbers(data: torch.Tensor) -> int:
    words = np.frombuffer(data.numpy().tobytes() + bytes(-len(data) % 4), "<i4").tolist()
    total = sum(word * ((index + 1) * -7046029254386353131 | 1) for index, word in enumerate(words))
    return (total + 2**63) % 2**64 - 2**63


def compare(implementation: str, blocks: list[tuple[int, int]]) -> None:
    data = torch.randint(0, 256, (10300,), dtype=torch.uint8, generator=torch.Generator().manual_seed(len(blocks)))
    found = block_sums(data, blocks, implementation=implementation)
    assert found.dtype == torch.int64
    assert found.tolist() == [by_whole_numbers(data[start:stop]) for start, stop in blocks]


@pytest.mark.parametrize("blocks", [*BLOCKS, [(0, 7), (16, 29)]])
def test_reference(blocks):
    compare("reference", blocks)


@pytest.mark.parametrize("blocks", BLOCKS)
def check_triton(blocks):
    compare("triton", blocks)


def test_triton_interpreted():
    run_interpreted(__file__)


def test_any_word_s_change_and_any_swap_are_seen():
    data = torch.arange(1004, dtype=torch.int32).view(torch.uint8).clone()
    [first] = block_sums(data, [(0, len(data))])
    for place in (0, 1, 500, len(data) - 1):
        data[place] += 1
        assert block_sums(data, [(0, len(data))])[0] != first
        data[place] -= 1
    swapped = data.clone()
    swapped[:4], swapped[4:8] = data[4:8], data[:4]
    assert block_sums(swapped, [(0, len(data))])[0] != first == block_sums(data, [(0, len(data))])[0]


def test_it_is_the_staging_buffer_s_sum():
    """A version that was packed by pack_cast has its checksum already."""
    data = torch.randint(0, 256, (2**20 * 4 + 64,), dtype=torch.uint8)
    assert block_sums(data, [(0, len(data))])[0] == pack_cast.checksum(data)

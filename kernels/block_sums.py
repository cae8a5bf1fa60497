"""Checksums of many blocks of one buffer, in one launch and one tensor: bytes on a GPU stay there.

Of each block the sum of its little-endian int32 words, the i-th (from 0) times ``(i + 1) * _WEYL | 1``, modulo 2**64:
integers, so the order of addition does not matter, and a block has the same sum wherever it lies, on whatever device.
A Weyl sequence's neighbours differ in most bits, so swapped words change the sum. Left out: any hold against those who
choose the bytes.

Dimensions: N blocks.
"""

import os
from typing import TYPE_CHECKING, Any, Literal

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # the reference does without
    if TYPE_CHECKING:
        raise
    triton = None

_WEYL = -7046029254386353131
_BLOCK = 64 if os.environ.get("TRITON_INTERPRET") == "1" else 4096
_ROUNDS = 8
"""Times _BLOCK words of one program: 32 numbers a block of 4 MiB are added up atomically."""
_AT_ONCE = 2**18
"""Words that the reference takes at a time: what it makes of them stays in a CPU's cache."""


def block_sums(
    buffer: torch.Tensor,
    blocks: list[tuple[int, int]],
    *,
    implementation: Literal["reference", "triton"] = "reference",
) -> torch.Tensor:
    """Checksums of byte blocks [start, stop) of uint8 ``buffer``: int64 [N] on its device.

    Starts are multiples of 16, and for ``triton`` lengths of 4; else what lacks of the last word counts as zeros.
    """
    if implementation == "reference" or not blocks:
        sums = [_reference_sum(buffer[start:stop]) for start, stop in blocks]
        return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64, device=buffer.device)
    assert all(start % 16 == 0 and (stop - start) % 4 == 0 for start, stop in blocks) and buffer.data_ptr() % 16 == 0
    table = torch.tensor([(start, (stop - start) // 4) for start, stop in blocks], dtype=torch.int64)
    sums_N = torch.zeros(len(blocks), dtype=torch.int64, device=buffer.device)
    most = max((stop - start) // 4 for start, stop in blocks)
    grid = (len(blocks), max(1, triton.cdiv(most, _BLOCK * _ROUNDS)))
    settings: dict[str, Any] = dict(BLOCK=_BLOCK, ROUNDS=_ROUNDS, num_warps=8)
    _sum_kernel[grid](buffer, table.to(buffer.device), sums_N, **settings)
    return sums_N


def _reference_sum(data: torch.Tensor) -> torch.Tensor:
    words = torch.nn.functional.pad(data, (0, -data.numel() % 4)).view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for start in range(0, len(words), _AT_ONCE):
        part = words[start : start + _AT_ONCE].long()
        total += (part * (torch.arange(start + 1, start + 1 + len(part), device=data.device) * _WEYL | 1)).sum()
    return total


if TYPE_CHECKING or triton is not None:
    _FACTOR = tl.constexpr(_WEYL)

    @triton.jit
    def _sum_kernel(buffer, table, sums, BLOCK: tl.constexpr, ROUNDS: tl.constexpr):
        """BLOCK * ROUNDS words of one block. ``table``: of each its start, and how many words it has."""
        block = tl.program_id(0)
        start = tl.multiple_of(tl.load(table + 2 * block), 16)
        num_words = tl.load(table + 2 * block + 1)
        words = tl.multiple_of((buffer + start).to(tl.pointer_type(tl.int32)), 16)
        first = tl.program_id(1).to(tl.int64) * (BLOCK * ROUNDS)
        total = tl.zeros((BLOCK,), tl.int64)
        for turn in range(ROUNDS):
            index = first + turn * BLOCK + tl.arange(0, BLOCK)
            values = tl.load(words + index, mask=index < num_words, other=0)
            total += values.to(tl.int64) * ((index + 1) * _FACTOR | 1)
        tl.atomic_add(sums + block, tl.sum(total, 0), sem="relaxed")

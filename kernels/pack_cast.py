"""Many fp32 shards into one contiguous staging buffer, in bfloat16 or in FP8 with a scale a block, and back.

The buffer's checksum is taken on the way in both directions, so that bytes that travelled are known to be those that
were sent. FP8 is e4m3 with an fp32 scale for each block of 128 x 128, as DeepSeek-V3's (arXiv 2412.19437, section 3.3);
shards of one dimension, or whose rows are no multiple of 16 bytes, stay bfloat16 there too.

Dimensions: R rows and C columns of a shard. Bytes of a shard: its values, and in FP8 then the scales, row after row;
each begins at a multiple of 16, and what lies between is zero.
"""

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # the reference does without
    if TYPE_CHECKING:
        raise
    triton = None

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_SIDE = 128
_LARGEST = 448.0
"""Of e4m3."""
_SMALLEST = 2.0**-100
"""What a block's largest magnitude is taken for if it is smaller, zero for one: its scale is a normal number."""
_WEYL = -7046029254386353131
_BLOCK = 1024 if _INTERPRETED else 4096


def checksum(buffer: torch.Tensor) -> torch.Tensor:
    """Checksum of uint8 bytes, a multiple of 4: an int64 on their device.

    The sum of the little-endian int32 words, the i-th (from 0) times ``(i + 1) * _WEYL | 1``, modulo 2**64: integers,
    so the order of addition does not matter. It is that of block_sums.py, of one block.
    """
    words = buffer.view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=buffer.device)
    for start in range(0, len(words), 2**20):
        part = words[start : start + 2**20].long()
        total += (part * (torch.arange(start + 1, start + 1 + len(part), device=buffer.device) * _WEYL | 1)).sum()
    return total


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 16) * 16


class _Place:
    """Where a shard's bytes lie."""

    def __init__(self, shape: tuple[int, ...], fp8: bool, start: int):
        self.shape, self.start, self.size = shape, start, math.prod(shape)
        assert self.size < 2**31
        self.fp8 = fp8 and len(shape) == 2 and shape[1] % 16 == 0
        blocks = [-(-side // _SIDE) for side in shape] if self.fp8 else []
        self.scales_shape = tuple(blocks)
        self.num_blocks = math.prod(blocks) if self.fp8 else -(-self.size // _BLOCK)
        self.scales_start = start + _aligned(self.size)
        self.stop = self.scales_start + _aligned(4 * self.num_blocks) if self.fp8 else start + _aligned(2 * self.size)

    def values(self, buffer: torch.Tensor) -> torch.Tensor:
        width, dtype = (1, torch.float8_e4m3fn) if self.fp8 else (2, torch.bfloat16)
        return buffer[self.start : self.start + width * self.size].view(dtype).view(self.shape)

    def scales(self, buffer: torch.Tensor) -> torch.Tensor:
        stop = self.scales_start + 4 * self.num_blocks
        return buffer[self.scales_start : stop].view(torch.float32).view(self.scales_shape)


class Staging:
    """Layout of a staging buffer for shards of fixed shapes, with packing and unpacking.

    Numerics: bfloat16 rounds to the nearest, ties to even: |error| <= 2**-9 |x|. FP8: x * (448 / largest of the block),
    rounded likewise: |error| <= max(2**-4 |x|, 2**-10 * scale) (1 + 2**-20), scale being the largest / 448. Both
    implementations write the same bytes. Shards must be finite.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        *,
        fp8: bool = False,
        device: torch.device | str = "cpu",
        implementation: Literal["reference", "triton"] = "reference",
    ):
        self.device, self._on_triton = torch.device(device), implementation == "triton"
        self.places: list[_Place] = []
        self.num_bytes = 0
        for shape in shapes:
            self.places.append(_Place(tuple(shape), fp8, self.num_bytes))
            self.num_bytes = self.places[-1].stop
        if self._on_triton:
            self._tables = [self._table(on_fp8) for on_fp8 in (False, True)]

    def pack(self, shards: list[torch.Tensor], buffer: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Pack shards into the buffer; returns it, uint8 [num_bytes], and its checksum."""
        shards = [shard.contiguous() for shard in shards]
        self._check(shards)
        if buffer is None:
            buffer = torch.empty(self.num_bytes, dtype=torch.uint8, device=self.device)
        if self._on_triton:
            return buffer, self._launch(shards, buffer, packing=True)
        buffer.zero_()
        for place, shard in zip(self.places, shards, strict=True):
            if place.fp8:
                _quantize(shard, place.values(buffer), place.scales(buffer))
            else:
                place.values(buffer).copy_(shard)
        return buffer, checksum(buffer)

    def unpack(
        self, buffer: torch.Tensor, shards: list[torch.Tensor] | None = None
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Unpack shards in fp32; returns them and the buffer's checksum."""
        if shards is None:
            shards = [torch.empty(place.shape, device=self.device) for place in self.places]
        self._check(shards)
        if self._on_triton:
            return shards, self._launch(shards, buffer, packing=False)
        for place, shard in zip(self.places, shards, strict=True):
            if place.fp8:
                scale = place.scales(buffer).repeat_interleave(_SIDE, 0).repeat_interleave(_SIDE, 1)
                torch.mul(place.values(buffer).float(), scale[: shard.shape[0], : shard.shape[1]], out=shard)
            else:
                shard.copy_(place.values(buffer))
        return shards, checksum(buffer)

    def _check(self, shards: list[torch.Tensor]) -> None:
        for shard, place in zip(shards, self.places, strict=True):
            assert shard.dtype == torch.float32 and shard.shape == place.shape and shard.is_contiguous()

    def _table(self, on_fp8: bool) -> torch.Tensor | None:
        """Of each program: its shard's number, its block in the shard, and the shard's start, rows and columns."""
        rows = [
            (
                index,
                block,
                place.start,
                place.size // place.shape[1] if on_fp8 else 1,
                place.shape[1] if on_fp8 else place.size,
            )
            for index, place in enumerate(self.places)
            if place.fp8 == on_fp8
            for block in range(place.num_blocks)
        ]
        return torch.tensor(rows, dtype=torch.int64).to(self.device) if rows else None

    def _launch(self, shards: list[torch.Tensor], buffer: torch.Tensor, packing: bool) -> torch.Tensor:
        addresses = [shard.data_ptr() for shard in shards]
        assert buffer.data_ptr() % 16 == 0
        addresses_N = torch.tensor(addresses, dtype=torch.int64).to(self.device, non_blocking=True)
        total = torch.zeros((), dtype=torch.int64, device=self.device)
        aligned = all(address % 16 == 0 for address in addresses)
        settings: dict[str, Any] = dict(PACKING=packing, ALIGNED=aligned, num_warps=8)
        for table, kernel, block in zip(self._tables, (_bfloat16_kernel, _fp8_kernel), (_BLOCK, _SIDE), strict=True):
            if table is not None:
                settings["BLOCK"] = block
                kernel[(len(table),)](addresses_N, table, buffer, total, **settings)
        return total


def _quantize(shard_RC: torch.Tensor, values_RC: torch.Tensor, scales: torch.Tensor) -> None:
    """Row of blocks by row of blocks, so that no second copy of the shard is made."""
    num_columns = shard_RC.shape[1]
    for row_of_blocks, scales_row in zip(range(0, len(shard_RC), _SIDE), scales, strict=True):
        part = shard_RC[row_of_blocks : row_of_blocks + _SIDE]
        by_column = torch.nn.functional.pad(part.abs().amax(0), (0, -num_columns % _SIDE)).view(-1, _SIDE)
        largest = by_column.amax(1).clamp(min=_SMALLEST)
        scales_row.copy_(largest / _LARGEST)
        inverse = (_LARGEST / largest).repeat_interleave(_SIDE)[:num_columns]
        values_RC[row_of_blocks : row_of_blocks + _SIDE] = (part * inverse).to(torch.float8_e4m3fn)


if TYPE_CHECKING or triton is not None:
    # the interpreter truncates where the hardware rounds to the nearest
    _ROUND = tl.constexpr(_INTERPRETED)
    _FACTOR, _TOP, _BOTTOM = tl.constexpr(_WEYL), tl.constexpr(_LARGEST), tl.constexpr(_SMALLEST)

    # triton's constexpr has no annotations for what its compiler does with integers
    @triton.jit
    def _nearest(values, DROPPED: tl.constexpr):
        """Rounded to a mantissa with ``DROPPED`` bits less, ties to even."""
        bits = values.to(tl.int32, bitcast=True)
        bits += (1 << (DROPPED - 1)) - 1 + ((bits >> DROPPED) & 1)  # pyright: ignore[reportOperatorIssue]
        return (bits & -(1 << DROPPED)).to(tl.float32, bitcast=True)  # pyright: ignore[reportOperatorIssue]

    @triton.jit
    def _weighed(words, index):
        """The checksum's part of int32 words, which are the buffer's ``index``-th."""
        return words.to(tl.int64) * ((index + 1) * _FACTOR | 1)

    @triton.jit
    def _shard_at(addresses, table, ALIGNED: tl.constexpr):
        """Pointer, and the table's other columns, for this program."""
        row = table + tl.program_id(0).to(tl.int64) * 5
        shard = tl.load(addresses + tl.load(row)).to(tl.pointer_type(tl.float32))
        if ALIGNED:
            shard = tl.multiple_of(shard, 16)
        start = tl.multiple_of(tl.load(row + 2), 16)
        # positions in a shard fit into 32 bits, and take half of the registers so
        return shard, tl.load(row + 1).to(tl.int32), start, tl.load(row + 3).to(tl.int32), tl.load(row + 4).to(tl.int32)

    @triton.jit
    def _bfloat16_kernel(
        addresses, table, buffer, total, BLOCK: tl.constexpr, PACKING: tl.constexpr, ALIGNED: tl.constexpr
    ):
        """BLOCK values of one shard; the last block also writes the zeros behind."""
        shard, block, start, _, size = _shard_at(addresses, table, ALIGNED)
        first = tl.multiple_of(block * BLOCK, 16)
        at = first + tl.arange(0, BLOCK)
        is_whole = first + BLOCK <= size  # then no mask keeps the compiler from reading 16 bytes at a time
        inside, padded = at < size, at < (size + 7) // 8 * 8
        staged = tl.multiple_of((buffer + start).to(tl.pointer_type(tl.bfloat16)), 16) + at
        if PACKING:
            values = tl.load(shard + at) if is_whole else tl.load(shard + at, mask=inside, other=0.0)
            if _ROUND:
                values = _nearest(values, 16)  # pyright: ignore[reportArgumentType]
            values = values.to(tl.bfloat16)
            tl.store(staged, values, mask=padded)
        else:
            values = tl.load(staged, mask=padded, other=0.0)
            if is_whole:
                tl.store(shard + at, values.to(tl.float32))
            else:
                tl.store(shard + at, values.to(tl.float32), mask=inside)
        halves = values.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        words = tl.sum(tl.reshape(halves << (16 * (at % 2)), (BLOCK // 2, 2)), 1)
        index = (start // 4 + first // 2) + tl.arange(0, BLOCK // 2)
        tl.atomic_add(total, tl.sum(_weighed(words, index), 0), sem="relaxed")

    @triton.jit
    def _fp8_kernel(addresses, table, buffer, total, BLOCK: tl.constexpr, PACKING: tl.constexpr, ALIGNED: tl.constexpr):
        """A block of 128 x 128 of one shard and its scale; the last block also writes the zeros behind the scales.

        Columns are a multiple of 16, so there are none behind the values.
        """
        shard, block, start, num_rows, num_columns = _shard_at(addresses, table, ALIGNED)
        num_columns = tl.multiple_of(num_columns, 16)
        across = tl.cdiv(num_columns, BLOCK)
        num_blocks = tl.cdiv(num_rows, BLOCK) * across
        rows_R = block // across * BLOCK + tl.arange(0, BLOCK)
        first_column = tl.multiple_of(block % across * BLOCK, 16)
        columns_C = first_column + tl.arange(0, BLOCK)
        at = rows_R[:, None] * num_columns + columns_C[None, :]
        inside = (rows_R < num_rows)[:, None] & (columns_C < num_columns)[None, :]
        staged = tl.multiple_of((buffer + start).to(tl.pointer_type(tl.float8e4nv)), 16) + at
        scales_start = start + num_rows * num_columns
        scales = (buffer + scales_start).to(tl.pointer_type(tl.float32))
        if PACKING:
            values = tl.load(shard + at, mask=inside, other=0.0)
            largest = tl.maximum(tl.max(tl.max(tl.abs(values), 1), 0), _BOTTOM)
            scale = tl.math.div_rn(largest, _TOP)
            values *= tl.math.div_rn(_TOP, largest)
            if _ROUND:
                # below 2**-6 the step is 2**-9 whatever the exponent: that of fp32 at 2**14
                small = tl.abs(values) + 24576.0 - 24576.0
                small = tl.where(values < 0, -small, small)
                values = tl.where(tl.abs(values) < 0.015625, small, _nearest(values, 20))  # pyright: ignore[reportArgumentType]
            quantized = values.to(tl.float8e4nv)
            tl.store(staged, quantized, mask=inside)
            tl.store(scales + block, scale)
            behind = num_blocks + tl.arange(0, 4)
            stop = tl.where(block == num_blocks - 1, (num_blocks + 3) // 4 * 4, 0)
            tl.store(scales + behind, tl.zeros((4,), tl.float32), mask=behind < stop)
        else:
            quantized = tl.load(staged, mask=inside, other=0.0)
            scale = tl.load(scales + block)
            tl.store(shard + at, quantized.to(tl.float32) * scale, mask=inside)
        quarters = tl.where(inside, quantized.to(tl.uint8, bitcast=True).to(tl.int32), 0)
        quarters = quarters << (8 * (tl.arange(0, BLOCK) % 4))[None, :]
        words = tl.sum(tl.reshape(quarters, (BLOCK, BLOCK // 4, 4)), 2)
        words_at = rows_R[:, None] * (num_columns // 4) + (first_column // 4 + tl.arange(0, BLOCK // 4))[None, :]
        part = tl.sum(tl.sum(_weighed(words, start // 4 + words_at), 1), 0)
        part += _weighed(scale.to(tl.int32, bitcast=True), scales_start // 4 + block)
        tl.atomic_add(total, part, sem="relaxed")

"""What the header of a safetensors file says, checked against the file: which bytes are which tensor."""

import os
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from titan_rl.config.io.bounded_files import RefusedFile, each_once, open_file, parse_json

ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
"""The dtypes of weights that can be trained. What else there is (FP8, INT8, packed bits) is quantized."""
_MAX_HEADER_BYTES = 16 << 20
"""A hundred thousand tensors. The safetensors library takes six times as much."""

_MOST_DIMENSIONS, _LARGEST = 16, 1 << 63


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, from byte ``start`` up to ``stop``."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a file by name. Errors: ValueError for a file that is cut short or does not hold what it says."""
    try:
        with open_file(file) as opened:
            size = os.fstat(opened.fileno()).st_size
            [length] = struct.unpack("<Q", opened.read(8).ljust(8, b"\xff"))
            if length > size - 8:
                raise ValueError(f"its {size} bytes end before its header does")
            if length > _MAX_HEADER_BYTES:
                raise ValueError(f"its header of {length:,} bytes is longer than {_MAX_HEADER_BYTES >> 20} MiB")
            header = parse_json(opened.read(length), pairs=each_once)
        if not isinstance(header, dict):
            raise ValueError("its header is no table")
        header.pop("__metadata__", None)
        tensors = {name: _stored(file, name, entry, 8 + length) for name, entry in header.items()}
        _check_bytes(tensors, 8 + length, size)
    except RefusedFile:
        raise
    except OSError as error:
        raise ValueError(f"cannot read {file.name}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file.name} is damaged or no safetensors file: {error}; copy it again") from None
    return tensors


def _stored(file: Path, name: str, entry: Any, begin: int) -> StoredTensor:
    try:
        dtype, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise ValueError(f"{name} has no dtype, shape and data_offsets") from None
    numbers = (*shape, start, stop)
    are_sizes = len(shape) <= _MOST_DIMENSIONS and all(type(size) is int and 0 <= size < _LARGEST for size in numbers)
    if not isinstance(dtype, str) or not are_sizes:
        raise ValueError(f"{name} has a dtype, shape or data_offsets that cannot be")
    if dtype in ITEM_BYTES and stop - start != prod(shape) * ITEM_BYTES[dtype]:
        raise ValueError(f"{name} of {dtype} {shape} has {stop - start} bytes")
    return StoredTensor(file, dtype, shape, begin + start, begin + stop)


def _check_bytes(tensors: dict[str, StoredTensor], begin: int, size: int) -> None:
    """Every byte belongs to one tensor. Errors: ValueError."""
    end = begin
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if tensor.start != end or tensor.stop < tensor.start:
            raise ValueError(f"{name} begins at byte {tensor.start}, and what is before it ends at byte {end}")
        end = tensor.stop
    if end != size:
        raise ValueError(f"it has {size} bytes, and its header describes {end}")

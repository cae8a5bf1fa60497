"""Sizes of a Parquet file's columns, from its footer: ``FileMetaData`` in Thrift's compact protocol.

pyarrow's own view of a column's metadata ends the process where another size in it is wrong, so it is of no use for
files that somebody else may have made. Sources: parquet-format's parquet.thrift; Thrift's specification of the compact
protocol.
"""

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import IO, Any

import pyarrow as pa

_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT, _UUID = range(1, 14)
_FIXED = {_BYTE: 1, _DOUBLE: 8, _UUID: 16}
_MAX_FOOTER_BYTES = 32 << 20
_MAX_DEPTH = 16
_MAX_VARINT_BYTES = 10

Read = Callable[[bytes, int], tuple[Any, int]]
"""Reader of a value that begins at a place of the data. Gives the value and the place behind it. Errors: IndexError
behind the data's end; pyarrow.ArrowInvalid."""


@dataclass(frozen=True)
class ColumnChunk:
    """A column within a group of rows."""

    column: int
    """Place of the column among the schema's leaves."""
    num_values: int
    num_bytes: int
    """Without compression."""


def column_chunks(file: IO[bytes], num_columns: int) -> list[ColumnChunk]:
    """Columns of all groups of rows. ``num_columns``: leaves of the schema. Errors: pyarrow.ArrowInvalid."""
    file.seek(-8, 2)
    length, magic = struct.unpack("<I4s", file.read(8))
    if magic != b"PAR1":
        raise pa.ArrowInvalid("it does not end as Parquet files do")
    if length > _MAX_FOOTER_BYTES:
        raise pa.ArrowInvalid(f"its footer has {length:,} bytes, more than {_MAX_FOOTER_BYTES:,}")
    file.seek(-8 - length, 2)
    try:
        [groups], _ = _FILE(file.read(length), 0)
    except IndexError:
        raise pa.ArrowInvalid("its footer is cut short") from None
    if any(len(columns) != num_columns for [columns] in groups):
        raise pa.ArrowInvalid(f"a group of its rows has another number of columns than its schema, {num_columns}")
    chunks = [ColumnChunk(column, *sizes) for [columns] in groups for column, [sizes] in enumerate(columns)]
    if any(min(chunk.num_values, chunk.num_bytes) < 0 for chunk in chunks):
        raise pa.ArrowInvalid("a size in its footer is negative")
    return chunks


def _struct_of(wanted: Mapping[tuple[int, int], Read]) -> Read:
    """Reader of a struct's wanted fields, by their id and type: a field of another type is none, as for Thrift."""

    def read(data: bytes, place: int) -> tuple[list[Any], int]:
        values, number = {}, 0
        while head := data[place]:
            kind, place = head & 15, place + 1
            if head > 15:
                number += head >> 4
            else:
                number, place = _integer(data, place)
            if (field := wanted.get((number, kind))) is None:
                place = _skip(data, place, kind)
            elif (number, kind) in values:
                raise pa.ArrowInvalid(f"field {number} stands twice in its footer")
            else:
                values[number, kind], place = field(data, place)
        if len(values) < len(wanted):
            raise pa.ArrowInvalid("its footer lacks a field")
        return [values[key] for key in wanted], place + 1

    return read


def _list_of(item: Read) -> Read:
    """Reader of a list of structs."""

    def read(data: bytes, place: int) -> tuple[list[Any], int]:
        size, kind, place = _list_head(data, place)
        if kind != _STRUCT:
            raise pa.ArrowInvalid("a list in its footer holds values of another type")
        values = []
        for _ in range(size):
            value, place = item(data, place)
            values.append(value)
        return values, place

    return read


def _list_head(data: bytes, place: int) -> tuple[int, int, int]:
    """Size, type of the items, and the place of the first."""
    size, kind = data[place] >> 4, data[place] & 15
    if size < 15:
        return size, kind, place + 1
    size, place = _varint(data, place + 1)
    return size, kind, place


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = 0
    for count in range(_MAX_VARINT_BYTES):
        byte = data[place + count]
        value |= (byte & 127) << 7 * count
        if byte < 128:
            return value, place + count + 1
    raise pa.ArrowInvalid("a number in its footer is too long")


def _integer(data: bytes, place: int) -> tuple[int, int]:
    """Of a zigzag varint."""
    value, place = _varint(data, place)
    return value >> 1 ^ -(value & 1), place


def _skip(data: bytes, place: int, kind: int, depth: int = 0) -> int:
    """Place behind a value. Errors: as a reader's."""
    if kind in (_TRUE, _FALSE):  # the type of a field says it all
        return place
    if kind in (_I16, _I32, _I64):
        while data[place] > 127:
            place += 1
        return place + 1
    if kind == _BINARY:
        size, place = _varint(data, place)
        return place + size
    if kind in _FIXED:
        return place + _FIXED[kind]
    if depth >= _MAX_DEPTH:
        raise pa.ArrowInvalid("its footer is nested too deeply")
    if kind == _STRUCT:
        while head := data[place]:
            place = _skip(data, place + 1 if head > 15 else _skip(data, place + 1, _I16), head & 15, depth + 1)
        return place + 1
    if kind in (_LIST, _SET):
        size, item, place = _list_head(data, place)
        items = [item]
    elif kind == _MAP:
        size, place = _varint(data, place)
        items = [data[place] >> 4, data[place] & 15] if size else []
        place += bool(size)
    else:
        raise pa.ArrowInvalid("its footer holds a value of no type")
    for _ in range(size):
        for item in items:
            place = place + 1 if item in (_TRUE, _FALSE) else _skip(data, place, item, depth + 1)
        if place > len(data):
            raise IndexError
    return place


_CHUNK = _struct_of({(3, _STRUCT): _struct_of({(5, _I64): _integer, (6, _I64): _integer})})
_FILE = _struct_of({(4, _LIST): _list_of(_struct_of({(1, _LIST): _list_of(_CHUNK)}))})

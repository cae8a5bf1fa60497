"""Parquet and Arrow files that somebody else may have made: what they become in memory, before they are read.

A few kilobytes may hold gigabytes: values that are alike are stored once, and the rest is compressed. So a table may
take a number of times its file's own size, and a small one as much as does no harm. Whoever wants more writes the
file without compression.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from titan_rl.config.io.bounded_files import RefusedFile, open_file
from titan_rl.data.storage.parquet_footer import column_chunks

RATIO, _SMALL = 64, 128 << 20
"""Bytes in memory for each byte of the file; and what is never too many."""
_ROW_BYTES, _VALUE_BYTES = 64, 40
"""Of a row and of a value as Python has them, besides text."""
_TEXT = "BYTE_ARRAY"


def check_table(
    path: Path, columns: Iterable[str] | None = None, *, with_text: bool = True, ratio: int = RATIO
) -> None:
    """Check of a Parquet file's size in memory.

    ``columns``: all by default. ``with_text``: whether texts are counted as they are written out, for which they are
    read once. Errors: RefusedFile for a Parquet file that would become too large; pyarrow.ArrowException; OSError.
    """
    with open_file(path) as opened, pq.ParquetFile(opened) as file:
        most = _Most(path, os.fstat(opened.fileno()).st_size, ratio)
        leaves = _leaves(file.schema, None if columns is None else set(columns))
        chunks = [chunk for chunk in column_chunks(opened, len(file.schema)) if chunk.column in leaves]
        most.check(sum(chunk.num_bytes for chunk in chunks))
        values = sum(chunk.num_values for chunk in chunks)
        size = file.metadata.num_rows * _ROW_BYTES + values * _VALUE_BYTES
        most.check(size)
    texts = list(dict.fromkeys(leaf.path for leaf in leaves.values() if leaf.physical_type == _TEXT))
    if not (texts and with_text):
        return
    with pq.ParquetFile(path, read_dictionary=texts) as file:
        for text in texts:
            for batch in file.iter_batches(columns=[text]):
                size += _text_bytes(batch.column(0))
                most.check(size)


def read_table(path: Path, schema: pa.Schema, columns: Iterable[str] | None = None, **where: Any) -> pa.Table:
    """Rows of a Parquet file, as a schema says. pyarrow's function of this name imports pandas for half a second.

    ``schema``: columns that the file lacks are null, and others are left out. ``columns``: all of these by default.
    ``where``: values of columns; other rows are left out. Errors: pyarrow.ArrowException; OSError.
    """
    fields = [schema.field(name) for name in columns or schema.names]
    with pq.ParquetFile(path) as file:
        own = file.schema_arrow.names
        if (twice := next((name for name in own if own.count(name) > 1), None)) is not None:
            raise pa.ArrowInvalid(f"column {twice!r} stands twice in it")
        table = file.read([field.name for field in fields if field.name in own])
    arrays = [
        table.column(field.name).cast(field.type) if field.name in own else pa.nulls(len(table), field.type)
        for field in fields
    ]
    table = pa.table(arrays, pa.schema(fields))
    for name, value in where.items():
        table = table.filter(pc.call_function("equal", [table.column(name), pa.scalar(value)]))
    return table


def _leaves(schema: pq.ParquetSchema, columns: set[str] | None) -> dict[int, Any]:
    """Leaves of the schema that are of these columns, by their place."""
    leaves = {place: schema.column(place) for place in range(len(schema))}
    return {place: leaf for place, leaf in leaves.items() if columns is None or leaf.path.partition(".")[0] in columns}


def check_batch(path: Path, batch: pa.RecordBatch, size: int) -> int:
    """Size in bytes after an Arrow file's next batch, ``size`` before it. Errors: RefusedFile for too many bytes."""
    size += batch.nbytes + batch.num_rows * (_ROW_BYTES + batch.num_columns * _VALUE_BYTES)
    size += sum(_text_bytes(column) for column in batch.columns)
    _Most(path, path.stat().st_size, RATIO).check(size)
    return size


@dataclass(frozen=True)
class _Most:
    """What a file may take."""

    path: Path
    file_bytes: int
    ratio: int

    def check(self, size: int) -> None:
        """Errors: RefusedFile."""
        if size > (most := max(_SMALL, self.ratio * self.file_bytes)):
            raise RefusedFile(
                f"{self.path} would take more than {most >> 20} MiB of memory, and has {self.file_bytes:,} bytes: it "
                f"is damaged, or made to fill the memory; if it is what you want, write it without compression and "
                f"dictionaries"
            )


def _text_bytes(column: pa.Array) -> int:
    """Of values that stand in a dictionary, written out, however deep in lists they are."""
    while not pa.types.is_dictionary(column.type):
        if pa.types.is_struct(column.type):
            return sum(_text_bytes(column.field(number)) for number in range(column.type.num_fields))
        if not _is_list(column.type):
            return _sum(_lengths(column))
        column = column.flatten()
    lengths = _lengths(column.dictionary)
    return _sum(None if lengths is None else lengths.take(column.indices))


def _is_list(kind: pa.DataType) -> bool:
    kinds = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list, pa.types.is_map)
    return any(is_kind(kind) for is_kind in kinds)


def _sum(lengths: Any) -> int:
    return 0 if lengths is None else int(pc.call_function("sum", [lengths]).as_py() or 0)


def _lengths(column: pa.Array) -> Any:
    """Of each text; None if there are none in it."""
    kind = column.type
    is_text = any(is_kind(kind) for is_kind in (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary))
    return pc.call_function("binary_length", [column]).cast(pa.int64()) if is_text else None

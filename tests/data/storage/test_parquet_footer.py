"""Sizes in a Parquet file's footer: those that pyarrow tells, and one error for whatever is damaged or forged."""

from contextlib import suppress
from io import BytesIO
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from titan_rl.config.io.bounded_files import RefusedFile
from titan_rl.data.storage.parquet_footer import ColumnChunk, column_chunks
from titan_rl.data.storage.tables import check_table

NESTED = pa.table({"question": ["4,6=", "6,9="], "answer": [2, 3], "part": [{"a": [1]}, None]})
ALL_KINDS = pa.table(
    {f"c{number}": np.arange(500) for number in range(20)}
    | {"text": ["a", None] * 250, "lists": [[1, 2, 3]] * 500, "flag": [True] * 500, "nothing": pa.nulls(500)}
    | {"map": pa.array([[("a", 1)]] * 500, pa.map_(pa.string(), pa.int8()))}
)


def written(table: pa.Table, **settings) -> bytes:
    pq.write_table(table, file := BytesIO(), **settings)
    return file.getvalue()


@pytest.mark.parametrize("table", [NESTED, ALL_KINDS, ALL_KINDS.slice(0, 0)], ids=["nested", "all", "empty"])
@pytest.mark.parametrize("settings", [{}, {"row_group_size": 7, "write_statistics": False}, {"compression": "zstd"}])
def test_sizes_are_those_that_pyarrow_tells(table, settings):
    data = written(table, **settings)
    metadata = pq.ParquetFile(BytesIO(data)).metadata
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    columns = [(place, group.column(place)) for group in groups for place in range(metadata.num_columns)]
    told = [ColumnChunk(place, column.num_values, column.total_uncompressed_size) for place, column in columns]
    assert column_chunks(BytesIO(data), metadata.num_columns) == told


def test_no_change_of_a_footers_byte_ends_the_process(tmp_path: Path):
    """pyarrow's own view of a column aborts for some of these: histograms of another length than their column's."""
    data = written(NESTED)
    start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    for place in range(start, len(data)):
        for change in (1, 16):
            changed = data[:place] + bytes([data[place] ^ change]) + data[place + 1 :]
            (path := tmp_path / "rows.parquet").write_bytes(changed)
            with suppress(pa.ArrowException, OSError, RefusedFile):
                check_table(path)
                pq.ParquetFile(path).read()


def file_of(footer: str) -> BytesIO:
    data = bytes.fromhex(footer)
    return BytesIO(b"PAR1" + data + len(data).to_bytes(4, "little") + b"PAR1")


COLUMN = "3c 56 04 16 06 00 00"
"""Field 3, the column's metadata: field 5, the integer 2; field 6, the integer 3."""


def test_a_footer_is_read_field_by_field():
    assert column_chunks(file_of(f"49 1c 19 1c {COLUMN} 00 00"), 1) == [ColumnChunk(0, 2, 3)]
    behind_others = f"15 02 26 04 09 08 1c 19 1c {COLUMN} 00 00"  # the number 4 of the list is written out
    assert column_chunks(file_of(behind_others), 1) == [ColumnChunk(0, 2, 3)]


@pytest.mark.parametrize(
    ("footer", "why"),
    [
        (f"49 1c 19 1c {COLUMN} 00", "cut short"),
        (f"49 1c 19 2c {COLUMN} {COLUMN} 00 00", "another number of columns than its schema, 1"),
        ("49 1c 19 0c 00 00", "another number of columns than its schema, 1"),
        ("49 1c 19 1c 3c 56 03 16 06 00 00 00 00", "negative"),
        ("49 1c 19 1c 3c 56 04 00 00 00 00", "lacks a field"),
        ("00", "lacks a field"),
        ("45 02 00", "lacks a field"),
        ("49 1c 19 1c 3c 56 04 16 06 06 0a 02 00 00 00 00", "stands twice"),
        ("49 15 02 00", "values of another type"),
        ("16 " + "ff " * 11 + "00", "cut short"),
        ("49 1c 19 1c 3c 56 " + "ff " * 11 + "00", "too long"),
        ("1c " * 40 + "00", "nested too deeply"),
        ("19 " + "19 " * 40, "nested too deeply"),
        ("19 f3 ff ff ff ff 0f", "cut short"),
        ("1e 00", "of no type"),
    ],
)
def test_a_forged_footer_is_refused(footer, why):
    with pytest.raises(pa.ArrowInvalid, match=why):
        column_chunks(file_of(footer), 1)

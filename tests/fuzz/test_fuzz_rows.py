"""Data files: whatever is in one is rows, or one line that names the place."""

import json
import tempfile
from functools import cache
from io import BytesIO
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from fuzzing import ANY_TEXT, VALUES, as_json, assert_one_line, fuzz, lists_of, mutated, spoilt
from hypothesis import strategies as st

from titan_rl.config.load import ConfigError
from titan_rl.data.rows.file_sources import Source
from titan_rl.data.rows.row_files import read_raw_rows
from titan_rl.data.rows.row_shapes import FORMATS, read_row
from titan_rl.environments.prompts.row_files import parse_row, read_rows

ASKED, SAID = {"role": "user", "content": "4,6="}, {"role": "assistant", "content": "2"}
ROWS = [
    {"question": "4,6=", "answer": 2.0, "level": 1},
    {"prompt": "4,6=", "completion": "2"},
    {"messages": [ASKED, SAID, ASKED]},
    {"messages": [ASKED, SAID]},
    {"text": "4,6=2"},
    {"prompt": [ASKED], "chosen": [SAID], "rejected": [SAID | {"content": "3"}], "margin": 0.5},
    {"chosen": "4,6= 2", "rejected": "4,6= 3"},
    {"prompt": "4,6=", "completion": "2", "label": True},
]
ROW = st.sampled_from(ROWS).flatmap(spoilt)
LINES = lists_of(ROW.map(as_json) | VALUES.map(as_json) | ANY_TEXT)


def read(name: str, data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (path := Path(folder, name)).write_bytes(data)
        try:
            for row in read_rows([Source(name, (path,))], parse_row):
                json.dumps(row.columns)
                assert row.text.strip() and row.text.encode() and (row.answer or "").encode() is not None
        except ConfigError as error:
            assert_one_line(error)
        for kind in FORMATS:
            try:
                for place, columns in read_raw_rows(path):
                    asked = read_row(place, columns, kind, "auto")
                    json.dumps([asked.prompt, asked.answers], ensure_ascii=False).encode()
            except (ConfigError, OSError) as error:
                assert_one_line(error)


@fuzz(lines=LINES, ends=st.sampled_from(["\n", "\r\n", "\n\n", "\u2028"]), is_bytes=st.booleans())
def test_lines_are_rows_or_one_line(lines, ends, is_bytes):
    read("rows.jsonl", ends.join(lines).encode("utf-8", "surrogatepass"))


@fuzz(data=st.just("\n".join(map(json.dumps, ROWS)).encode()).flatmap(mutated))
def test_bytes_are_lines_or_one_line(data):
    read("rows.jsonl", data)


@cache
def parquet() -> bytes:
    table = pa.table({"question": ["4,6=", "6,9="], "answer": [2, 3], "when": [1, 2], "part": [{"a": [1]}, None]})
    table = table.append_column("map", pa.array([[("a", 1)], []], pa.map_(pa.string(), pa.int8())))
    pq.write_table(table, file := BytesIO())
    return file.getvalue()


@fuzz(data=st.builds(parquet).flatmap(mutated))
def test_bytes_are_parquet_or_one_line(data):
    read("rows.parquet", data)


TYPES = st.sampled_from(
    [pa.int64(), pa.float32(), pa.string(), pa.binary(), pa.bool_(), pa.null(), pa.decimal128(30, 4), pa.date64()]
    + [pa.timestamp("ns"), pa.timestamp("us", "UTC"), pa.time64("ns"), pa.duration("s"), pa.large_string()]
    + [pa.dictionary(pa.int8(), pa.string()), pa.list_(pa.int8()), pa.struct([("a", pa.string())])]
    + [pa.map_(pa.string(), pa.int8()), pa.float16(), pa.list_(pa.struct([("role", pa.string())]))]
)
NAMES = st.sampled_from(["question", "prompt", "answer", "messages", "completion", "label"]) | st.text(max_size=4)


@st.composite
def column(draw: st.DrawFn) -> pa.Array:
    kind = draw(TYPES)
    if pa.types.is_map(kind):  # of which pyarrow makes none from an item that is None: it ends the process
        return pa.array(draw(st.permutations([[("a", 1), ("b", None)], None, []])), kind)
    values = draw(lists_of(VALUES.filter(lambda value: value is not None), min_size=3))[:3]
    for given in ([*values], [str(value) for value in values], [b"\xff", "a", 1], [1 << 40, -(1 << 62), 0]):
        try:
            return pa.array(given, kind)
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            continue
    return pa.nulls(3, kind)


@fuzz(columns=st.lists(st.tuples(NAMES, column()), min_size=1, max_size=4))
def test_columns_of_any_type_are_rows_or_one_line(columns):
    arrays = [array for _, array in columns]
    table = pa.table([array[: min(map(len, arrays))] for array in arrays], names=[name for name, _ in columns])
    try:
        pq.write_table(table, file := BytesIO())
    except (pa.ArrowException, UnicodeError):
        return
    read("rows.parquet", file.getvalue())

"""Rows that lie in a temporary file: each is what it would be in memory, and little of them is there."""

import gc
import hashlib
import json
import os
import resource
import tracemalloc
from dataclasses import fields, replace
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from row_tasks import write

from titan_rl.config.load import ConfigError, load_config
from titan_rl.config.sections.schema import DataConfig
from titan_rl.data.rows import row_files
from titan_rl.data.rows.datasets import Dataset, make_dataset, read_files, read_rows, store_rows
from titan_rl.data.rows.examples import Example, label_of, make_example
from titan_rl.data.rows.file_sources import locate_sources
from titan_rl.data.rows.row_files import read_raw_rows
from titan_rl.data.rows.row_shapes import ParsedRow, read_row
from titan_rl.data.rows.splits import key, question_of, split_by_file, split_by_share
from titan_rl.data.rows.stored_rows import Joined
from titan_rl.data.storage import record_file
from titan_rl.data.storage.record_file import RecordFile
from titan_rl.mesh.processes import parallel_map
from titan_rl.models.builtin.tokenizer import character_tokenizer

TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}:{{ m['content'] }}{{ thinking }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
LENGTHS = (1, 2, 700, 1, 30_000, 5, 3_000, 1)


def chat_tokenizer():
    tokenizer = character_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def messages(number: int) -> list[dict]:
    return [{"role": "user", "content": f"q{number}"}, {"role": "assistant", "content": "a" * (number + 1)}]


ROWS = {
    "demonstrations": [
        *({"prompt": f"q{n}", "completion": "a" * (n % 7 + 1)} for n in range(9)),
        *({"messages": messages(n), "chat_template_kwargs": {"thinking": f"x{n}"}} for n in range(5)),
        {"text": "all of it is learned"},
    ],
    "pairs": [{"prompt": f"q{n}", "chosen": "aa", "rejected": "b", "margin": n / 3} for n in range(9)],
    "labels": [{"prompt": f"q{n}", "completion": "aa", "label": n % 3 == 0} for n in range(9)],
}


def dataset_of(folder, kind: str, row_tokens: int = 100_000, map_rows=map, **settings) -> Dataset:
    data = DataConfig(**{"file": "data.jsonl"} | settings)
    limits = dict(row_tokens=row_tokens, sample_tokens=row_tokens, max_held_out=1000, map_rows=map_rows)
    return make_dataset(read_files(data, kind, [str(folder)]), data, chat_tokenizer(), **limits)


def eager_rows(folder, kind: str) -> list[ParsedRow]:
    return [read_row(place, columns, kind, "auto") for place, columns in read_raw_rows(folder / "data.jsonl")]


def assert_same(one: object, other: object) -> None:
    """Alike to the types, the bits and what may be written to."""
    assert type(one) is type(other)
    if isinstance(one, np.ndarray):
        assert one.dtype == other.dtype and one.tobytes() == other.tobytes()
        assert one.flags.writeable and one.flags.aligned and one.flags.owndata
    elif isinstance(one, tuple | list):
        assert len(one) == len(other)
        for part, other_part in zip(one, other, strict=True):
            assert_same(part, other_part)
    elif hasattr(one, "__dataclass_fields__"):
        for field in fields(one):
            assert_same(getattr(one, field.name), getattr(other, field.name))
    else:
        assert one == other


# each row


@pytest.mark.parametrize("kind", ROWS)
def test_each_row_is_what_it_would_be_in_memory(tmp_path, kind):
    write(tmp_path, ROWS[kind], "data.jsonl")
    eager = eager_rows(tmp_path, kind)
    sources = locate_sources("data.file", "data.jsonl", [str(tmp_path)])
    assert list(read_rows(sources, DataConfig(file="data.jsonl"), kind)) == eager
    tokenizer, dataset = chat_tokenizer(), dataset_of(tmp_path, kind)
    split = split_by_share(eager, DataConfig().held_out_share, "data")
    for side, rows in ((dataset.train, split.train), (dataset.held_out, split.held_out)):
        expected = [make_example(row, tokenizer, as_chat=False) for row in rows]
        assert len(side) == len(expected) > 0
        for place, example in enumerate(expected):
            assert_same(side[place], example)
            assert_same(side[place - len(side)], example)
        assert side.num_tokens_R.tolist() == [example.num_tokens for example in expected]
        assert side.labels_R.tolist() == [label_of(example) for example in expected]
        assert side.largest_R.tolist() == [max(int(s.tokens.max()) for s in each.samples) for each in expected]


def test_a_row_with_tools_calls_and_numbers_comes_back_whole():
    schema = {"type": "function", "function": {"name": "add", "parameters": {"a": [1, 2.5, 1e300, None, True, 2**70]}}}
    call = {"type": "function", "function": {"name": "add", "arguments": {"ä\u2028\x00": "\U0001f600", "n": 0.1}}}
    columns = {
        "messages": [{"role": "user", "content": "ü"}, {"role": "assistant", "content": None, "tool_calls": [call]}],
        "tools": [schema],
        "chat_template_kwargs": {"date": "2026"},
    }
    row = replace(read_row("här line 1", columns, "demonstrations", "auto"), source=3)
    [again] = store_rows([row])
    assert_same(again, row)
    assert json.dumps(vars(again)) == json.dumps(vars(row)), "keys keep their order"


def test_rows_of_very_different_lengths_are_taken_in_any_order(tmp_path):
    write(tmp_path, [{"prompt": f"q{n}", "completion": "a" * length} for n, length in enumerate(LENGTHS)], "data.jsonl")
    write(tmp_path, [{"prompt": "held", "completion": "a"}], "held.jsonl")
    train = dataset_of(tmp_path, "demonstrations", held_out_file="held.jsonl").train
    lengths = [length + 3 for length in LENGTHS]
    assert [len(example.samples[0].tokens) for example in train] == lengths
    assert [len(example.samples[0].tokens) for example in reversed(train)] == lengths[::-1]
    assert [len(example.samples[0].tokens) for example in train[1:6:2]] == lengths[1:6:2]
    assert [len(example.samples[0].tokens) for example in train[1:][::-2]] == lengths[1:][::-2]
    with pytest.raises(IndexError):
        train[len(LENGTHS)]


def test_what_is_done_to_a_taken_row_is_not_done_to_the_row(tmp_path):
    write(tmp_path, ROWS["labels"], "data.jsonl")
    dataset = dataset_of(tmp_path, "labels")
    taken = dataset.train[0].samples[0]
    before = taken.tokens.copy()
    taken.tokens[:] = 0
    assert np.array_equal(dataset.train[0].samples[0].tokens, before)


def test_forked_processes_make_the_same_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(parallel_map, "_ALONE_SECONDS", 0.0)
    monkeypatch.setattr(parallel_map, "_WORTH_SECONDS", 0.0)
    monkeypatch.setattr(parallel_map, "available_cores", lambda: 2)
    write(tmp_path, [{"prompt": f"q{n}", "completion": "a" * (n % 9 + 1)} for n in range(700)], "data.jsonl")
    write(tmp_path, [{"prompt": f"q{n}", "completion": "a"} for n in range(600, 1300)], "held.jsonl")
    by_processes = partial(parallel_map.parallel_map, what="tokenizing rows")
    datasets = [
        dataset_of(tmp_path, "demonstrations", map_rows=map_rows, held_out_file="held.jsonl")
        for map_rows in (map, by_processes)
    ]
    for one, other in zip(*((*each.train, *each.held_out) for each in datasets), strict=True):
        assert_same(one, other)
    assert [len(datasets[1].train), len(datasets[1].held_out), datasets[1].num_overlapping] == [600, 700, 100]


def test_rows_behind_others_are_one_sequence():
    joined = Joined(list("abc"), list("de"))
    assert "".join(joined) == "abcde" and joined[-1] == "e" and len(joined) == 5
    assert all(list(joined[start:stop]) == list("abcde")[start:stop] for start in range(7) for stop in range(7))
    assert list(joined[2:][1:]) == ["d", "e"]


# which rows there are


def test_rows_are_held_out_by_the_digest_of_their_question_as_by_its_words():
    """The share is measured as it always was, by a digest of six bytes."""
    rows = [ParsedRow(f"line {n}", f" q{n % 50}  {n % 3}", ["a"]) for n in range(400)]
    split = split_by_share(rows, 0.3, "data")
    keys = {key(row.text) for row in rows}
    digests = {each: hashlib.blake2b(each.encode(), digest_size=6).digest() for each in keys}
    expected = {each for each in keys if int.from_bytes(digests[each], "big") / 2**48 < 0.3}
    assert split.held_out == [row for row in rows if key(row.text) in expected] and 0 < len(expected) < len(keys)
    assert split.train == [row for row in rows if key(row.text) not in expected]
    assert split.held_out_questions == {question_of(each) for each in expected}
    parted = split_by_file(rows, rows[:20], "data")
    assert parted.held_out == rows[:20] and len(parted.train) == 340 and parted.num_overlapping == 60


def test_no_row_and_one_row(tmp_path):
    assert list(store_rows([])) == [] and not store_rows([]).have_messages
    write(tmp_path, [""], "data.jsonl")
    with pytest.raises(ConfigError, match="holds no rows"):
        dataset_of(tmp_path, "demonstrations")
    write(tmp_path, [{"prompt": "q", "completion": "a"}], "data.jsonl")
    with pytest.raises(ConfigError, match="holds one question only, data.jsonl line 1"):
        dataset_of(tmp_path, "demonstrations")
    write(tmp_path, [{"prompt": "held", "completion": "a"}], "held.jsonl")
    dataset = dataset_of(tmp_path, "demonstrations", held_out_file="held.jsonl")
    assert [example.place for example in (*dataset.train, *dataset.held_out)] == [
        "data.jsonl line 1",
        "held.jsonl line 1",
    ]
    assert [example.place for example in dataset.draw(5, 3, seed=1)] == ["data.jsonl line 1"] * 3


def test_a_row_that_cannot_be_tokenized_is_told_before_one_that_is_too_long(tmp_path):
    rows = [{"prompt": f"q{n}", "completion": {2: "a" * 99, 6: "ä", 8: "a" * 99}.get(n, "a")} for n in range(40)]
    write(tmp_path, rows, "data.jsonl")
    with pytest.raises(ConfigError, match=r"^data.jsonl line 7: .*'ä'"):
        dataset_of(tmp_path, "demonstrations", row_tokens=64)
    write(tmp_path, [*rows[:6], *rows[7:]], "data.jsonl")
    with pytest.raises(ConfigError, match=r"^data.jsonl line 3: 101 tokens do not fit"):
        dataset_of(tmp_path, "demonstrations", row_tokens=64)
    dataset = dataset_of(tmp_path, "demonstrations", row_tokens=64, too_long="skip")
    assert sorted(row.place for row in dataset.too_long) == ["data.jsonl line 3", "data.jsonl line 8"]
    assert len(dataset.train) + len(dataset.held_out) == 37


def test_a_table_is_read_part_by_part_as_it_stands(tmp_path, monkeypatch):
    monkeypatch.setattr(row_files, "_ROWS_AT_ONCE", 4)
    rows = [{"prompt": f"q{n}", "completion": "a", "share": n / 10} for n in range(11)]
    table = pa.Table.from_pylist(
        rows, pa.schema({"prompt": pa.string(), "completion": pa.string(), "share": pa.float32()})
    )
    pq.write_table(table, tmp_path / "data.parquet", row_group_size=3)
    assert list(read_raw_rows(tmp_path / "data.parquet")) == [(f"data.parquet row {n + 1}", rows[n]) for n in range(11)]
    twice = pa.table([pa.array([], pa.string())] * 2, ["a", "a"])
    pq.write_table(twice, tmp_path / "twice.parquet")
    with pytest.raises(ConfigError, match="two columns have the name 'a'"):
        list(read_raw_rows(tmp_path / "twice.parquet"))


# memory and disk


def test_little_of_a_row_is_in_memory(tmp_path):
    count = 1000
    write(tmp_path, [{"prompt": f"q{n} " + "b" * 200, "completion": "a" * 400} for n in range(count)], "data.jsonl")
    dataset_of(tmp_path, "demonstrations")  # what is made once, whatever the rows
    gc.collect()
    tracemalloc.start()
    try:
        dataset = dataset_of(tmp_path, "demonstrations")
        gc.collect()
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 100 * count, "of some 7 KB that a row's objects take"
    assert peak < 3 << 20
    assert not [each for each in gc.get_objects() if type(each) in (Example, ParsedRow)]
    assert len(dataset.train) + len(dataset.held_out) == count


def test_the_file_has_no_name_and_ends_with_its_rows(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    file = RecordFile()
    for record in (b"", b"abc", b"", b"d" * (3 << 20), b"e"):
        file.append(record)
    file.flush()
    assert [len(file.read(number)) for number in range(len(file))] == [0, 3, 0, 3 << 20, 1]
    assert list(tmp_path.iterdir()) == []
    descriptor = file._file.fileno()
    del file
    with pytest.raises(OSError):
        os.fstat(descriptor)


@pytest.mark.parametrize("room", [0, 50_000, 350_000])
def test_a_full_disk_is_told_in_one_line(tmp_path, monkeypatch, room):
    """In the last case the rows as they are read have room, and the first tokenized ones."""
    from titan_rl.controller.preflight.checks import check

    monkeypatch.setattr(record_file, "_BLOCK_BYTES", 100_000)
    write(tmp_path, [{"prompt": f"q{n}", "completion": "a" * 200} for n in range(600)], "data.jsonl")
    config = load_config(
        None,
        {
            "algorithm": {"name": "sft"},
            "training": {"seq_len": 256},
            "data": {"file": "data.jsonl"},
            "run": {"plugin_path": [str(tmp_path)]},
        },
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        with pytest.raises(ConfigError) as caught:
            check(config)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    [line] = str(caught.value).splitlines()
    assert "temporary file, and the disk is full: " in line and line.endswith("set TMPDIR to a folder with room")

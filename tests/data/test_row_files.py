"""Data files are read and checked before anything starts: every mistake is one line with its place."""

import json
from base64 import b64encode
from decimal import Context, Decimal, localcontext

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from row_tasks import mistake, rows_task, sums, write

from titan_rl.config.load import ConfigError
from titan_rl.config.sections.schema import TaskConfig
from titan_rl.data.rows.file_sources import Source, locate_sources
from titan_rl.data.rows.row_files import _rows, read_raw_rows
from titan_rl.environments.prompts.row_files import DataRow, parse_row, read_rows
from titan_rl.environments.prompts.stream import held_out_prompts
from titan_rl.environments.registry import make_task
from titan_rl.environments.rollout.prompt_checks import training_prompts


def rows_of(path) -> list[DataRow]:
    return read_rows([Source(path.name, (path,))], parse_row)


def test_the_folder_of_a_user_who_has_none_is_one_line():
    with pytest.raises(ConfigError, match="^data.file = '~nobody_of_that_name/a.jsonl': .*give the whole path$"):
        locate_sources("data.file", "~nobody_of_that_name/a.jsonl", [])


@pytest.mark.parametrize("column", ["prompt", "question"])
def test_rows_become_prompts_with_answers(tmp_path, column):
    write(tmp_path, [{column: f"q{n}", "answer": n, "level": n % 3} for n in range(10)])
    task = rows_task(tmp_path)
    prompts = [*training_prompts(task, 1), *held_out_prompts(task, 100)]
    assert sorted((p.text, p.answer, task.messages(p)) for p in prompts) == [
        (f"q{n}", str(n), f"q{n}") for n in range(10)
    ]
    first = prompts[0]
    number = int(first.answer)
    assert task.row(first) == {column: f"q{number}", "answer": number, "level": number % 3}
    assert first.entry["place"] == f"questions.jsonl line {number + 1}"
    assert task.score(first, ["0", f" {number}\n"]) == {"exact": 1.0} and task.score(first, [f"{number}."]) == {
        "exact": 0.0
    }


def test_parquet_is_read_like_json_lines(tmp_path):
    rows = [{"question": f"q{n}", "answer": n, "tags": ["a", "b"], "more": {"x": None}} for n in range(20)]
    write(tmp_path, rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "questions.parquet")
    lines, table = rows_task(tmp_path), rows_task(tmp_path, file="questions.parquet")
    for ours, theirs in zip(training_prompts(lines, 1), training_prompts(table, 1), strict=True):
        assert (ours.id, ours.text, ours.answer, lines.row(ours)) == (
            theirs.id,
            theirs.text,
            theirs.answer,
            table.row(theirs),
        )
        json.dumps(theirs.entry)


def test_what_json_cannot_hold_becomes_text_or_is_refused(tmp_path):
    table = pa.table({"prompt": ["a", "b"], "answer": ["1", "2"], "day": pa.array([0, 1], pa.date32())})
    pq.write_table(table, tmp_path / "days.parquet")
    prompt = held_out_prompts(rows_task(tmp_path, file="days.parquet"), 1)[0]
    assert prompt.entry["row"]["day"] in ("1970-01-01", "1970-01-02")
    pq.write_table(table.append_column("sound", pa.array([b"x", b"y"])), tmp_path / "bytes.parquet")
    assert mistake(tmp_path, file="bytes.parquet").startswith("bytes.parquet row 1: column 'sound' holds bytes")


def test_images_are_bytes_of_a_table_or_data_uris_and_no_paths(tmp_path):
    columns = {"prompt": ["a", "b"], "answer": ["1", "2"]}
    struct = [[{"bytes": b"x", "path": None}], [{"bytes": b"y", "path": "y.png"}, {"bytes": b"z", "path": None}]]
    pq.write_table(pa.table(columns | {"images": struct}), tmp_path / "structs.parquet")
    pq.write_table(pa.table(columns | {"image": pa.array([b"x", b"y"])}), tmp_path / "bytes.parquet")
    uri = "data:image/png;base64," + b64encode(b"x").decode()
    write(tmp_path, [{"prompt": "a", "answer": "1", "image": uri}, {"prompt": "b", "answer": "2"}])
    shown = {
        file: {prompt.text: prompt.images for prompt in rows_task(tmp_path, file=file).every_prompt()}
        for file in ("structs.parquet", "bytes.parquet", "questions.jsonl")
    }
    assert shown["structs.parquet"] == {"a": (b"x",), "b": (b"y", b"z")}
    assert shown["bytes.parquet"] == {"a": (b"x",), "b": (b"y",)}
    assert shown["questions.jsonl"] == {"a": (b"x",), "b": ()}
    assert not {"image", "images"} & rows_task(tmp_path, file="structs.parquet").every_prompt()[0].entry["row"].keys()
    for value in ("http://there/x.png", "x.png", {"path": "x.png"}, 1, "data:image/png;base64,%"):
        write(tmp_path, [{"prompt": "a", "answer": "1", "image": value}])
        assert "line 1: 'image' holds" in mistake(tmp_path)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        ("72.0", "72"),
        ("-0.0", "0"),
        ("1e3", "1000"),
        ("0.5", "0.5"),
        ("2.50", "2.5"),
        ("1e-7", "0.0000001"),
        ("12", "12"),
    ],
)
def test_a_number_is_an_answer_as_one_would_write_it(tmp_path, number, text):
    (tmp_path / "questions.jsonl").write_text("".join(f'{{"prompt": "q{n}", "answer": {number}}}\n' for n in range(9)))
    task = rows_task(tmp_path)
    prompt = next(iter(training_prompts(task, 1)))
    assert prompt.answer == text and task.score(prompt, [text]) == {"exact": 1.0}


def test_integers_beside_a_missing_cell_stay_integers_in_parquet(tmp_path):
    """pandas has no missing integer: the column becomes one of floats. Some library rounds all decimals, as here."""
    with localcontext(Context(prec=2)):
        check_numbers(tmp_path)


def check_numbers(tmp_path) -> None:
    floats = pa.array([72.0, 7.5, None] * 9, pa.float64())
    decimals = pa.array([Decimal("72.00"), Decimal("7.50"), None] * 9, pa.decimal128(9, 2))
    for name, column in (("floats", floats), ("decimals", decimals)):
        questions = [f"q{n}" for n in range(27)]
        pq.write_table(pa.table({"question": questions, "answer": column}), tmp_path / f"{name}.parquet")
        assert {row.answer for row in rows_of(tmp_path / f"{name}.parquet")} == {"72", "7.5", None}


@pytest.mark.parametrize("kind", [pa.float16(), pa.float32(), pa.float64()])
def test_a_number_is_the_shortest_decimal_of_its_own_precision(tmp_path, kind):
    numbers = np.array([0.1, 72, -2.5, 1e-5], kind.to_pandas_dtype())
    columns = {
        "answer": pa.array(numbers, kind),
        "list": pa.array([[number, None] for number in numbers], pa.list_(kind)),
        "table": pa.array(
            [None, *({"x": number, "y": "z"} for number in numbers[1:])], pa.struct([("x", kind), ("y", pa.string())])
        ),
    }
    pq.write_table(pa.table({"question": ["a", "b", "c", "d"]} | columns), tmp_path / "narrow.parquet")
    rows = rows_of(tmp_path / "narrow.parquet")
    assert [row.answer for row in rows] == ["0.1", "72", "-2.5", "0.00001"]
    assert [row.columns["list"] for row in rows] == [[0.1, None], [72.0, None], [-2.5, None], [1e-5, None]]
    assert [row.columns["table"] for row in rows] == [None, *({"x": x, "y": "z"} for x in (72.0, -2.5, 1e-5))]


def test_of_a_number_with_a_rounding_error_of_its_own_precision_nobody_knows_what_was_meant(tmp_path):
    numbers = pa.array(np.array([1 / 3, 1], np.float64), pa.float64())
    pq.write_table(pa.table({"question": ["a", "b"], "answer": numbers}), tmp_path / "third.parquet")
    assert "'answer': 0.3333333333333333 is a number with a rounding error" in mistake(tmp_path, file="third.parquet")


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_number_that_no_reward_can_compute_with_is_named_by_its_row(tmp_path, number, nested):
    rows = [
        {"prompt": f"q{n}", "answer": n, "level": [{"x": 1.0 if n < 2 else number}] if nested else 1} for n in (0, 1, 2)
    ]
    rows = rows if nested else [row | {"level": 1.0 if row["answer"] < 2 else number} for row in rows]
    write(tmp_path, rows)
    said = f"column 'level' holds {number}: give a number or null, or leave the column out"
    assert mistake(tmp_path) == f"questions.jsonl line 3: {said}"
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert mistake(tmp_path, file="rows.parquet") == f"rows.parquet row 3: {said}"


def test_two_columns_of_a_name_are_refused(tmp_path):
    twice = pa.Table.from_arrays(
        [pa.array(["a"]), pa.array(["1"]), pa.array(["2"])], names=["prompt", "answer", "answer"]
    )
    pq.write_table(twice, tmp_path / "twice.parquet")
    said = "two columns have the name 'answer': rename one of them, or leave it out"
    assert mistake(tmp_path, file="twice.parquet").endswith(f"twice.parquet: {said}")
    with pytest.raises(ConfigError, match=said):
        _rows(tmp_path, twice)


def test_a_value_that_python_has_not_is_one_line(tmp_path):
    times = pa.table({"question": ["q"], "answer": ["a"], "at": pa.array([10**14], pa.timestamp("s"))})
    pq.write_table(times, tmp_path / "times.parquet")
    assert "times.parquet holds a value that cannot be read" in mistake(tmp_path, file="times.parquet")
    text = pa.StringArray.from_buffers(1, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff"))
    with pytest.raises(ConfigError, match="holds a value that cannot be read"):
        _rows(tmp_path, pa.table({"question": text}))


def test_blank_lines_a_byte_order_mark_and_extra_columns_are_taken(tmp_path):
    (tmp_path / "data.json").write_bytes(
        b'\xef\xbb\xbf{"prompt": "a", "answer": 1}\n\n  \r\n'
        b'{"prompt": "b", "answer": "2", "messages": null, "x": [1]}\n\n'
    )
    assert rows_task(tmp_path, file="data.json").size == (1, 1)


NO_PROMPT = "no 'prompt', 'question' or 'messages'"
NO_ANSWER = "no 'answer', which an exact match needs unless task.reward is set"
GOOD = '{"prompt": "good", "answer": 1}'


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"promt": "a", "answer": 1}', f"{NO_PROMPT}; it has 'promt', 'answer'"),
        ('{"prompt": null, "answer": 1}', f"{NO_PROMPT}; it has 'prompt', 'answer', but 'prompt' is null"),
        ("{}", f"{NO_PROMPT}; it is empty"),
        ('{"prompt": "a", "question": "a", "answer": 1}', "'prompt' and 'question': keep one"),
        ('{"prompt": 7, "answer": 1}', "'prompt' is 7: give text"),
        ('{"prompt": "  ", "answer": 1}', "'prompt' is empty"),
        ('{"prompt": "a", "anwser": 1}', f"{NO_ANSWER}; it has 'anwser', 'prompt'"),
        ('{"prompt": "a", "answer": null}', "no 'answer'"),
        ('{"prompt": "a", "answer": " "}', "an empty 'answer' would pay for saying nothing"),
        ('{"prompt": "a", "answer": true}', "'answer' is true: give text or a number"),
        ('{"prompt": "a", "answer": [1]}', "'answer' is [1]: give text or a number"),
        ('{"prompt": "a\\ud800", "answer": 1}', "'prompt' holds half a character"),
        ('{"prompt": "a", "answer": "1\\ud800"}', "'answer' holds half a character (a lone surrogate) at 1"),
        ('{"prompt": "a", ', "not JSON: Expecting property name enclosed in double quotes at character "),
        ('{"prompt": "a", "prompt": "b", "answer": 1}', "the key 'prompt' stands there twice: keep one"),
        ('{"prompt": "a", "x": [{"y": 1, "y": 1}], "answer": 1}', "the key 'y' stands there twice: keep one"),
        ('{"prompt": "a", "answer": NaN}', "'answer': nan is no answer: give text, or a number"),
        ('{"prompt": "a", "answer": -Infinity}', "'answer': -inf is no answer"),
        ('{"prompt": "a", "answer": 1e400}', "'answer': inf is no answer"),
        ('{"prompt": "a", "answer": 0.30000000000000004}', "'answer': 0.30000000000000004 is a number with a rounding"),
        ('{"prompt": "a", "answer": 1e300}', "'answer': 1e+300 is a number"),
        ('["prompt"]', "of type list: each line must be one JSON object"),
        ("[" * 100_000, "not JSON"),
    ],
)  # fmt: skip
def test_a_bad_row_is_named_by_its_line(tmp_path, line, words):
    write(tmp_path, [GOOD, GOOD.replace("good", "better"), line, GOOD])
    assert mistake(tmp_path).startswith(f"questions.jsonl line 3: {words}")


def test_bytes_that_are_no_text_are_named_by_their_line(tmp_path):
    (tmp_path / "questions.jsonl").write_bytes(GOOD.encode() + b'\n{"prompt": "\xff"}\n')
    assert mistake(tmp_path).startswith("questions.jsonl line 2: not JSON")


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ("hello", "'messages' is \"hello\""),
        ([], "'messages' is []"),
        (["hello"], "message 1 is \"hello\""),
        ([{"role": "user"}], "message 1 has no content"),
        ([{"content": "a"}], "message 1 has 'content': give role and content"),
        ([{"role": "user", "content": "a", "nam": "x"}], "message 1 has 'nam', which no message has"),
        ([{"role": "usr", "content": "a"}], "message 1: role 'usr' is unknown: did you mean 'user'?"),
        ([{"role": "user", "content": 3}], "message 1: 'content' is 3"),
        ([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "the last of 'messages'"),
    ],
)  # fmt: skip
def test_bad_messages_are_named(tmp_path, messages, words):
    write(tmp_path, [{"messages": messages, "answer": 1}])
    assert mistake(tmp_path, style="chat").startswith(f"questions.jsonl line 1: {words}")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(file="question.jsonl"), ["task.options.file", "question.jsonl", "did you mean 'questions.jsonl'?"]),
        (dict(file="questions.txt"), ["task.options.file", ".jsonl", ".parquet"]),
        (dict(held_out_file="nowhere.jsonl"), ["task.options.held_out_file", "nowhere.jsonl"]),
        (dict(held_out_file="questions.jsonl"), ["task.options.file", "nothing to train on"]),
        (dict(held_out_file="a.jsonl", held_out_share=0.1), ["held_out_file", "held_out_share", "exclude"]),
        (dict(held_out_share=0.0), ["task.options.held_out_share", "greater than 0"]),
        (dict(held_out_share=1), ["task.options.held_out_share", "less than 1"]),
        (dict(held_out_share="0.2"), ["task.options.held_out_share"]),
        (dict(file=3), ["task.options.file = 3"]),
        (dict(fiel="x"), ["task.options.fiel", "'file'"]),
    ],
)
def test_mistakes_in_the_options_are_told(tmp_path, options, words):
    write(tmp_path, sums(10))
    line = mistake(tmp_path, **options)
    assert all(word in line for word in words), line


def test_a_file_must_be_named_and_hold_rows_of_more_than_one_question(tmp_path):
    with pytest.raises(ConfigError, match="needs task.options.file"):
        make_task(TaskConfig(name="jsonl"), [])
    write(tmp_path, ["", ""])
    assert mistake(tmp_path).endswith("questions.jsonl holds no rows")
    write(tmp_path, [GOOD, GOOD])
    assert "one question only, questions.jsonl line 1" in mistake(tmp_path)
    (tmp_path / "bad.parquet").write_text("no")
    assert "bad.parquet is not Parquet" in mistake(tmp_path, file="bad.parquet")


def test_files_are_looked_for_in_the_folders_in_turn(tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, [{"prompt": f"{name} {n}", "answer": 1} for n in range(4)])
    folders = [str(tmp_path / name) for name in ("none", "first", "second")]
    for file, expected in (("questions.jsonl", "first"), (str(tmp_path / "second" / "questions.jsonl"), "second")):
        task = make_task(TaskConfig(name="jsonl", options={"file": file}), folders)
        assert held_out_prompts(task, 1)[0].text.startswith(expected)


def test_two_columns_without_a_name_are_one_line(tmp_path):
    columns = [pa.array([None, None], pa.float32()), pa.array(["a", "b"])]
    pq.write_table(pa.table(columns, ["", ""]), tmp_path / "rows.parquet")
    with pytest.raises(ConfigError, match="two columns have the name ''"):
        list(read_raw_rows(tmp_path / "rows.parquet", "rows.parquet"))

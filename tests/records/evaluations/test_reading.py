"""Evaluations that are read back: as they were written, and files that nobody's program wrote."""

import json
import time
from pathlib import Path

import forged_files
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from titan_rl.records.evaluations import reading
from titan_rl.records.evaluations.files import SCHEMA, write_result
from titan_rl.records.evaluations.reading import (
    EvaluationError,
    evaluation_names,
    read_answers,
    read_record,
    stamp_of,
    suite_names,
)
from titan_rl.records.evaluations.results import Answer, Question, SuiteResult

STEP, SUITE = "step-000020", "gsm8k"


def result(name: str = SUITE) -> SuiteResult:
    answers = [Answer(n, f"so\n{n}", None if n else "0", not n, 1.0 - n, "ok", 3, {"flexible": True}) for n in range(2)]
    questions = [Question(f"eval/{name}/0", "1 - 1?", "0", answers)]
    return SuiteResult(name, 2, 2, True, questions, {f"eval/{name}/1": "the engine died"}, {"task": name}, left_out=4)


@pytest.fixture
def folder(tmp_path) -> Path:
    write_result(tmp_path / "evaluations" / STEP, result())
    return tmp_path / "evaluations"


def test_what_was_written_is_read(folder):
    record, written = read_record(folder, STEP, SUITE), result()
    assert (record.num_questions, record.num_samples, record.left_out) == (1, 2, 4)
    assert record.estimates == written.estimates and record.unscored == written.unscored
    assert record.settings == {"task": SUITE} and (record.truncated, record.response_length) == (0.0, 3.0)
    assert read_answers(folder, STEP, SUITE).equals(pq.read_table(folder / STEP / f"{SUITE}.parquet"))


def test_a_suite_without_a_scored_question_is_read(folder):
    write_result(folder / STEP, SuiteResult("none", 1, 1, False, [], {"eval/none/0": "it died"}, {}))
    assert read_record(folder, STEP, "none").estimates == {} and read_record(folder, STEP, "none").truncated is None
    assert len(read_answers(folder, STEP, "none")) == 0


def test_evaluations_are_in_order_and_links_are_passed_over(folder, tmp_path):
    for name in ("step-000100", "step-1000000", "model-20260101-000000", "a\nb", "x" * 151):
        (folder / name).mkdir()
    (folder / "step-000030").symlink_to(folder / STEP)
    (folder / "step-000040").touch()
    assert evaluation_names(folder) == ["model-20260101-000000", STEP, "step-000100", "step-1000000"]
    write_result(folder / STEP, result("b.c"))
    (folder / STEP / "evaluation.json").write_text("{}")  # of an evaluation alone: no suite
    (folder / STEP / "x.json").symlink_to(folder / STEP / f"{SUITE}.json")
    (folder / STEP / "y.json").mkdir()
    assert suite_names(folder, STEP) == ["b.c", SUITE] and suite_names(folder, "step-000100") == []
    (tmp_path / "link").symlink_to(folder)
    assert evaluation_names(tmp_path / "link") == evaluation_names(tmp_path / "nowhere") == []


def test_as_many_are_named_as_can_be_shown(folder, monkeypatch):
    monkeypatch.setattr(reading, "MOST_NAMES", 2)
    for step in (30, 40):
        (folder / f"step-{step:06d}").mkdir()
    assert evaluation_names(folder) == ["step-000030", "step-000040"]


def test_a_stamp_tells_another_file(folder):
    before = stamp_of(folder, STEP, SUITE)
    path = folder / STEP / f"{SUITE}.json"
    path.write_text(path.read_text() + " ")
    after = stamp_of(folder, STEP, SUITE)
    assert None not in before and after[0] != before[0] and after[1] == before[1]
    assert stamp_of(folder, STEP, "none") == (None, None)


# forged


def changed(**values):
    return forged_files.changed(**values)


RECORDS = {
    **forged_files.KINDS,
    "a folder": forged_files.folder,
    "a link to a good one": lambda path: path.replace(path.parent.parent / "good") and path.symlink_to("../good"),
    "nothing": lambda path: path.unlink(),
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-20]),
    "deep": forged_files.content(forged_files.DEEP),
    "no UTF-8": forged_files.content(b"\xff\xfe"),
    "too long": forged_files.content(b" " * (17 << 20)),
    "a list": forged_files.content(b"[]"),
    "no metrics": changed(metrics=None),
    "an estimate that is none": changed(metrics={"avg@1": {"value": float("nan"), "interval_95": [0, 1]}}),
    "an interval of three": changed(metrics={"avg@1": {"value": 0.5, "interval_95": [0, 1, 2]}}),
    "a number of a thousand digits": changed(questions=10**1000),
    "a text for a number": changed(samples="<b>"),
    "settings of text": changed(settings="x"),
    "unscored of a list": changed(unscored=["x"]),
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_forged_record_is_one_line(folder, name):
    path = folder / STEP / f"{SUITE}.json"
    RECORDS[name](path)
    with pytest.raises(EvaluationError) as error:
        read_record(folder, STEP, SUITE)
    assert f"{SUITE}.json" in str(error.value) and str(error.value).isprintable() and len(str(error.value)) < 600


def table(**columns: pa.Array):
    """Forges some columns of the answers; the others have their first row's value."""

    def forge(path: Path) -> None:
        rows, count = pq.read_table(path), len(next(iter(columns.values())))
        same = pa.array(np.zeros(count, np.int64))
        whole = {name: columns[name] if name in columns else rows[name].take(same) for name in rows.column_names}
        pq.write_table(pa.table(whole | columns), path, compression="zstd")

    return forge


def without(name: str):
    def forge(path: Path) -> None:
        pq.write_table(pq.read_table(path).drop_columns([name]), path)

    return forge


def no_utf_8(path: Path) -> None:
    data = pa.array([b"\xff\xfe", b"ok"], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 2, data.buffers())
    table(answer=text)(path)


ANSWERS = {
    **forged_files.KINDS,
    "a folder": forged_files.folder,
    "a link to a good one": lambda path: path.replace(path.parent.parent / "good") and path.symlink_to("../good"),
    "nothing": lambda path: path.unlink(),
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-20]),
    "the end alone": forged_files.content(b"\xff\xff\xff\x7fPAR1"),
    "no Parquet": forged_files.content(b"<b>" * 99),
    "no UTF-8": no_utf_8,
    "a text for many rows": table(answer=forged_files.alike(40_000, 20_000)()),
    "rows of nothing": forged_files.no_columns,
    "millions of rows that are alike": table(answer=forged_files.alike(2_000_000, 1)()),
    "texts for verdicts": table(correct=pa.array(["x", "y"])),
    "numbers beyond 32 bits": table(sample=pa.array([1 << 40, 2])),
    "verdicts that are missing": table(correct=pa.array([True, None])),
    "no names": without("question_id"),
    "no verdicts": without("correct"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_forged_answers_are_one_line_soon_and_in_bounded_memory(folder, name):
    path = folder / STEP / f"{SUITE}.parquet"
    ANSWERS[name](path)
    Path("/proc/self/clear_refs").write_text("5")  # the largest memory is counted anew
    before, begun = memory("VmRSS"), time.process_time()
    with pytest.raises(EvaluationError) as error:
        read_answers(folder, STEP, SUITE)
    assert f"{SUITE}.parquet" in str(error.value) and str(error.value).isprintable() and len(str(error.value)) < 600
    assert time.process_time() - begun < 5 and memory("VmHWM") - before < 600 << 10


def memory(name: str) -> int:
    """KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def test_more_than_can_be_held_is_refused_however_large_its_file_is(folder, monkeypatch):
    monkeypatch.setattr(reading, "MOST_BYTES", 1 << 10)
    with pytest.raises(EvaluationError, match="too large to be shown here"):
        read_answers(folder, STEP, SUITE)


def test_a_column_that_is_not_there_is_null_and_others_are_left_out(folder):
    path = folder / STEP / f"{SUITE}.parquet"
    rows = pq.read_table(path).drop_columns(["readings", "final"])
    pq.write_table(rows.append_column("more", pa.array([1, 2])), path)
    found = read_answers(folder, STEP, SUITE)
    assert found.schema.names == SCHEMA.names and found["final"].null_count == found["readings"].null_count == 2


def test_a_link_in_the_place_of_an_evaluation_is_not_followed(folder, tmp_path):
    (folder / STEP).rename(tmp_path / "elsewhere")
    (folder / STEP).symlink_to(tmp_path / "elsewhere")
    for read in (read_record, read_answers):
        with pytest.raises(EvaluationError, match="is a link"):
            read(folder, STEP, SUITE)


def test_what_a_message_quotes_is_one_printable_line(folder):
    path = folder / STEP / f"{SUITE}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"samples": "\x1b[2J\n\ud800"}))
    with pytest.raises(EvaluationError) as error:
        read_record(folder, STEP, SUITE)
    assert str(error.value).isprintable()

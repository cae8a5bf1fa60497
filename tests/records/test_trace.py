"""Spans, the trace that a run directory keeps of them, and what the trainer gave each token."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest

from titan_rl.cli import main
from titan_rl.data.spans import Span, Spans
from titan_rl.data.types import Batch, Group, Rollout, Row, Segment, Turn
from titan_rl.mesh.telemetry.step_record import RankReport, StepRecord, join_results
from titan_rl.records.steps import trace
from titan_rl.records.steps.trace import ActorSpan, as_chrome, lanes, read_trace, write_trace
from titan_rl.records.steps.trained import in_order, pieces, read_trained, write_trained


def test_spans_that_go_on_are_one_and_there_are_never_many():
    spans = Spans()
    for number in range(10_000):
        spans.add("generate", 0.02 * number, 0.005)
    taken = spans.take()
    assert len(taken) <= 64 and taken[0].begin == 0 and taken[-1].end == pytest.approx(0.02 * 9999 + 0.005)
    assert spans.take() == []


def test_a_step_record_is_taken_once():
    record = StepRecord()
    told = RankReport([Span("optimizer", 1.0, 0.5)], 1, [{0: np.ones((1, 2), np.float32)}])
    record.trained({"trainer rank 0": told, "critic rank 0": RankReport()}, ["trainer rank 0"])
    assert record.take_spans() == [ActorSpan("trainer rank 0", "optimizer", 1.0, 0.5)] and not record.take_spans()
    assert list(record.take_results()[0]) == [(1, 0)] and not record.take_results()
    assert join_results([RankReport(results=[{}, {}])]) == [{}, {}]


def test_a_trace_is_read_as_it_was_written(tmp_path):
    write_trace(tmp_path, 1, [("b", "x", 2.0, 1.0), ("a", "y", 1.0, 0.5)])
    write_trace(tmp_path, 2, [("a", "y", 5.0, 0.5)])
    with open(tmp_path / "trace.jsonl", "a") as file:
        file.write('{"step": 3, "spans": [["a"]]}\n[1]\n{"step": 4, "spa')
    assert read_trace(tmp_path)[1] == [ActorSpan("a", "y", 1.0, 0.5), ActorSpan("b", "x", 2.0, 1.0)]
    assert list(read_trace(tmp_path, 2, 2)) == [2]


def test_a_trace_stays_small(tmp_path, monkeypatch):
    monkeypatch.setattr(trace, "LARGEST", 20_000)
    for step in range(20):
        write_trace(tmp_path, step, [("a", "x", float(n), float(n % 500)) for n in range(1000)])
    assert max(map(len, read_trace(tmp_path).values())) == trace.MOST_SPANS
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 80_000
    assert list(read_trace(tmp_path))[-1] == 19


def test_what_is_side_by_side_has_lanes_of_its_own():
    spans = [ActorSpan("a", "x", 0.0, 2.0), ActorSpan("a", "x", 1.0, 2.0), ActorSpan("a", "x", 2.0, 1.0)]
    assert lanes(spans) == [0, 1, 0]
    events = as_chrome({1: spans})["traceEvents"]
    assert [(e["ts"], e["dur"], e["tid"]) for e in events if e["ph"] == "X"] == [
        (0, 2e6, 0),
        (1e6, 2e6, 1),
        (2e6, 1e6, 0),
    ]


def test_the_export_takes_steps(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    for step in (1, 2, 3):
        write_trace(tmp_path / "run", step, [("trainer rank 0", "optimizer", float(step), 0.5)])
    assert main(["trace", str(tmp_path / "run"), "--steps", "2:3"]) == 0
    events = json.loads(capsys.readouterr().out)["traceEvents"]
    assert {event["args"]["step"] for event in events if event["ph"] == "X"} == {2, 3}
    for wrong in (["--steps", "x"], ["--steps", "8:9"], ["--out", str(tmp_path / "no" / "file")]):
        assert main(["trace", str(tmp_path / "run"), *wrong]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1
    assert main(["trace", str(tmp_path / "run"), "--steps", "3:2"]) == 2
    assert "give 2:3" in capsys.readouterr().err


def rollout(branches: list[int], logprobs: list[float], provenance: list[int]) -> Rollout:
    count = len(logprobs)
    columns = np.zeros(count, np.int32), np.array(provenance, np.int8), np.array(logprobs, np.float32)
    return Rollout("p", 0, *columns, np.zeros(count, np.int32), [Turn(1, 2, "stop")], "ok", branches=branches)


def row(logprobs: list[float], count: int) -> Row:
    zeros, values = np.zeros(2, np.int64), np.array(logprobs, np.float32)
    return Row(
        *(zeros, zeros, [Segment(0, 2)], zeros, zeros, values, values * 0 + 0.5, values),
        owners=[("p", 0, count)],
    )


def test_spans_that_all_overlap_have_a_lane_each_without_looking_at_all_others():
    spans = [ActorSpan("a", "b", float(number), 1e8) for number in range(100_000)]
    assert lanes(spans) == list(range(100_000))


def test_branches_are_put_in_their_order_whatever_rows_they_stand_in(tmp_path):
    one = rollout([0, 2], [0, -1, 0, -2, -3], [0, 1, 0, 1, 1])
    batch = Batch([[row([-2, -3], 2)], [row([-1], 1)]], 4, 3, True)
    found = [{(0, 0): np.array([[-2.5, -3]], np.float32), (1, 0): np.array([[-1.5], [2.0]], np.float32)}]
    write_trained(tmp_path / "trained", 4, [Group("p", [one])], [batch], found)
    told = read_trained(tmp_path / "trained", 4, "p", 0)
    assert told["trainer_logprobs"] == [-1.5, -2.5, -3.0] and told["advantages"] == [2.0, 0.5, 0.5]
    assert told["disagreement"] == pytest.approx(1 / 3) and read_trained(tmp_path / "trained", 4, "p", 1) is None


def test_what_does_not_fit_is_left_out(tmp_path):
    one = rollout([], [0, -1], [0, 1])
    known = pieces([Batch([[row([-9], 1)]], 2, 1, True)], [{(0, 0): np.zeros((1, 1), np.float32)}])
    assert in_order(one, known[("p", 0)]) is None
    write_trained(tmp_path / "trained", 1, [Group("p", [one])], [], [])
    assert not (tmp_path / "trained").exists()


@pytest.mark.slow
def test_a_run_keeps_a_trace_and_what_the_trainer_gave(finished_run):
    kept = read_trace(finished_run)
    names = {(span.actor.split()[0], span.name) for spans in kept.values() for span in spans}
    wanted = {("trainer", "forward and backward"), ("trainer", "optimizer"), ("trainer", "publish")}
    wanted |= {("generator", "generate"), ("generator", "fetch"), ("generator", "take the weights")}
    wanted |= {("verifier", "episode"), ("verifier", "scoring"), ("controller", "train")}
    assert wanted <= names
    for step in kept:
        rows = pq.read_table(finished_run / "trained" / f"step-{step:06d}.parquet").to_pylist()
        assert rows and max(row["disagreement"] for row in rows) < 1e-3

"""What a step measured: written once, read back once, and shown in plain lines where there is no terminal."""

import json
import os
import subprocess
import sys
from io import StringIO
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from titan_rl.config.sections.schema import AlgorithmConfig, Config, GeneratorConfig, RolloutConfig
from titan_rl.controller.console.display import Display
from titan_rl.controller.console.step_table import Sample, duration, headline, panel, sample_of
from titan_rl.controller.loop.reporting import Reporter
from titan_rl.data.types import Group, Rollout, StepMetrics
from titan_rl.records.metrics import (
    MetricsLog,
    MetricsReader,
    mean_metrics,
    read_metrics,
    sampling_metrics,
    speeds,
    trained_metrics,
)
from titan_rl.records.run_directory.rundir import RunDir


@pytest.fixture(autouse=True)
def no_forced_terminal(monkeypatch):
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


def log_of(root, *records) -> None:
    log = MetricsLog(root)
    for record in records:
        log.write(record)
    log.close()


def test_records_read_back_in_order(tmp_path):
    records = [{"step": step, "reward": step / 3, "entropy": 1e-30} for step in (1, 2, 3)]
    log_of(tmp_path, *records)
    assert list(read_metrics(tmp_path)) == records


def test_who_asks_again_is_told_what_was_added(tmp_path):
    """A line that is being written counts once it is whole; a step that is done again, the last time."""
    reader, path = MetricsReader(tmp_path), tmp_path / "metrics.jsonl"
    assert reader.records_after(-1) == []
    log_of(tmp_path, {"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0})
    assert [record["step"] for record in reader.records_after(1)] == [2]
    with open(path, "a") as file:
        file.write('{"step": 3, "loss')
        file.flush()
        assert [record["step"] for record in reader.records_after(-1)] == [1, 2]
        file.write('": 3.0}\n')
    log_of(tmp_path, {"step": 2, "loss": 4.0})
    assert [record["loss"] for record in reader.records_after(-1)] == [1.0, 4.0, 3.0]
    assert reader.records_after(-1) == list(read_metrics(tmp_path))


def test_no_run_has_no_records(tmp_path):
    assert list(read_metrics(tmp_path)) == []


def test_resumed_steps_count_once_the_last_time(tmp_path):
    log_of(tmp_path, {"step": 1, "reward": 0.1}, {"step": 2, "reward": 0.2}, {"step": 3, "reward": 0.3})
    log_of(tmp_path, {"step": 2, "reward": 0.5}, {"step": 3, "reward": 0.6})
    assert [record["reward"] for record in read_metrics(tmp_path)] == [0.1, 0.5, 0.6]


def test_evaluation_joins_the_record_of_its_step(tmp_path):
    log_of(tmp_path, {"step": 1, "reward": 0.1}, {"step": 1, "held_out_accuracy": 0.5})
    assert list(read_metrics(tmp_path)) == [{"step": 1, "reward": 0.1, "held_out_accuracy": 0.5}]


def test_written_records_survive_a_process_that_does_not_close(tmp_path):
    MetricsLog(tmp_path).write({"step": 1})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1}


def test_metrics_of_several_updates():
    one, two = StepMetrics(loss=1, agreement_max=3, num_trained_tokens=5), StepMetrics(loss=2, num_trained_tokens=6)
    one.loss_metrics, two.loss_metrics = {"ratio_max": 0.25}, {"ratio_max": 0.75}
    merged = mean_metrics([one, two])
    assert (merged.loss, merged.agreement_max, merged.num_trained_tokens) == (1.5, 3, 11)
    assert merged.loss_metrics == {"ratio_max": 0.5}  # a mean over tokens, whatever it is called


@pytest.mark.parametrize(("staleness", "says"), [(0, 1), (1, 0)])
def test_disagreement_is_said_once_whatever_the_updates(tmp_path, staleness, says):
    config = Config(
        algorithm=AlgorithmConfig(updates_per_batch=4),
        rollout=RolloutConfig(max_staleness=staleness),
        generator=GeneratorConfig(dtype="float32"),
    )
    lines: list[str] = []
    display: Any = SimpleNamespace(log=lines.append)
    others: Any = (MetricsLog(tmp_path), display, None, lambda *arguments, **fields: None)
    reporter = Reporter(config, RunDir(tmp_path), *others, agreement_limit=1.001)
    for step, mean in enumerate((1.0, 1.01, 1.02), 1):
        reporter._warn_of_disagreement(step, StepMetrics(agreement_mean=mean))
    assert [line.partition(":")[0] for line in lines] == ["step 2"][:says]


def test_what_a_loss_counts_reaches_the_record_by_its_name():
    record = trained_metrics(StepMetrics(loss=2.0, loss_metrics={"clip_fraction": 0.125}))
    assert (record["loss"], record["clip_fraction"]) == (2.0, 0.125) and "loss_metrics" not in record


def rollout_of(reward: float, status: str, version: int, num_tokens: int = 2) -> Rollout:
    return Rollout(
        "a",
        0,
        np.arange(1 + num_tokens),
        np.array([0] + [1] * num_tokens, np.int8),
        np.zeros(1 + num_tokens, np.float32),
        np.array([-1] + [version] * num_tokens),
        [],
        status,
        reward,
    )


def test_sampling_metrics_leave_failures_out_of_reward_and_lag():
    groups = [
        Group("a", [rollout_of(1.0, "ok", 4), rollout_of(0.5, "truncated", 3, 6), rollout_of(0.0, "timeout", 0)]),
        Group("b", [rollout_of(1.0, "ok", 4), rollout_of(1.0, "ok", 4), rollout_of(0.0, "infra_error", 0)]),
    ]
    metrics = sampling_metrics(groups, version=5)
    assert metrics == pytest.approx(
        {
            "reward": 3.5 / 4,
            "reward_min": 0.5,
            "reward_max": 1.0,
            "effective_answers": 1.0,
            "accuracy": 3 / 4,
            "response_length": 16 / 6,
            "truncated": 1 / 6,
            "groups_with_signal": 0.5,
            "staleness_mean": 5 / 4,
            "staleness_max": 2,
        }
    )


def record_of(step: int, **loss_metrics: float) -> dict[str, float]:
    seconds = dict.fromkeys(
        ["generate", "score", "wait", "forward_backward", "optimizer", "weight_sync", "generator_pause", "step"], 0.5
    )
    rollouts = [rollout_of(float(reward), "ok", step - 1) for reward in (0, 1)]
    record = {
        "step": step,
        **sampling_metrics([Group("a", rollouts)], step - 1),
        **trained_metrics(StepMetrics(loss_metrics=loss_metrics)),
    }
    return record | {f"seconds_{name}": value for name, value in seconds.items()} | speeds(seconds, 10, 20)


def show(monkeypatch, num_steps: int, seconds_per_step: float, log=None) -> None:
    clock = count(1000.0, seconds_per_step / 3)  # asked three times a step at most
    monkeypatch.setattr("titan_rl.controller.console.display.time", SimpleNamespace(monotonic=lambda: next(clock)))
    with Display(num_steps, log) as display:
        for step in range(1, num_steps + 1):
            display.step(record_of(step))


def test_plain_lines_where_there_is_no_terminal(tmp_path, capsys, monkeypatch):
    show(monkeypatch, 12, seconds_per_step=600, log=tmp_path / "log.txt")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == [f"{step}/12" for step in range(1, 13)]
    assert all("reward 0.500" in line and "accuracy 50.0%" in line for line in lines)
    assert "\x1b" not in "".join(lines)
    assert (tmp_path / "log.txt").read_text().splitlines() == lines


def test_supervised_steps_have_a_line_now_and_then(capsys, monkeypatch):
    clock = count(1000.0, 1.0)
    monkeypatch.setattr("titan_rl.controller.console.display.time", SimpleNamespace(monotonic=lambda: next(clock)))
    with Display(25) as display:
        for step in range(1, 10):
            display.sft_step(9, step, 4.6625 / step)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[2] for line in lines] == ["1/9", "4/9", "7/9"]
    assert lines[0] == "SFT step    1/9  loss 4.6625"


def test_a_line_tells_of_drafts_where_there_are_any(capsys):
    with Display(1) as display:
        display.step(record_of(1))
        display.step(record_of(1) | {"draft_acceptance_rate": 0.354, "drafter_loss": 1.25})
    without, drafting = capsys.readouterr().out.splitlines()
    assert "draft" not in without
    assert "  draft_acceptance_rate 35%  drafter_loss 1.2500  0.50 s" in drafting


def test_fast_steps_show_the_first_and_the_last_and_few_between(capsys, monkeypatch):
    show(monkeypatch, 1000, seconds_per_step=0.1)
    steps = [int(line.split()[1].partition("/")[0]) for line in capsys.readouterr().out.splitlines()]
    assert steps[0] == 1 and steps[-1] == 1000 and 5 < len(steps) < 100


def test_remarks_are_printed_as_they_are(tmp_path, capsys):
    remark = "a [bold]remark[/bold] of 12 " + 200 * "x"
    with Display(25, tmp_path / "log.txt") as display:
        display.log(remark)
    assert capsys.readouterr().out.splitlines() == [remark] == (tmp_path / "log.txt").read_text().splitlines()


def test_a_run_outlives_whoever_reads_it(tmp_path):
    program = f"""
from pathlib import Path
from titan_rl.controller.console.display import Display
with Display(25, Path({str(tmp_path / "log.txt")!r})) as display:
    for number in range(3):
        display.log(str(number))
"""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", program], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "log.txt").read_text().split() == ["0", "1", "2"]


@pytest.mark.parametrize("loss_metrics", [{}, {"clip_fraction": 0.5}])
def test_live_table_in_a_terminal(monkeypatch, capsys, loss_metrics):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("LINES", "50")
    with Display(25) as display:
        for step in range(1, 12):
            display.step(record_of(step, **loss_metrics))
    text = capsys.readouterr().out
    assert ("clip fraction" in text) == bool(loss_metrics)
    assert "step 11 of 25" in text and "tokens per second generate" in text


SAMPLE = Sample("count the ones of \x1b[2J" + 300 * "1" + "\n", "7", 300 * "7" + "\r\n", 0.25)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (140, 50), (60, 12)])
def test_the_live_view_fits_the_terminal_and_holds_nothing_that_moves_it(width, height):
    records = [record_of(step, clip_fraction=0.1) for step in range(95, 103)]
    console = Console(width=width, height=height, file=StringIO())
    told = headline(102, 300, "generating", 3.0, 5.0, 0.5)
    console.print(panel(told, records, SAMPLE, width, height))
    lines = console.file.getvalue().splitlines()
    assert len(lines) < height and all(len(line) <= width for line in lines)
    assert lines[0].startswith("step 102 of 300  generating 0:03 of about 0:05")
    assert lines[1].split()[-1] == "102" and any("reward" in line and "0.500" in line for line in lines)
    assert "".join(lines).isprintable() and lines[-1].startswith("count the ones of")


def test_before_the_first_step_it_says_what_is_waited_for():
    assert headline(300, 300, "evaluating", 4.0, 1.0, 2.0) == "step 300 of 300  evaluating 0:04", "it is no usual one"
    assert headline(0, 300, "starting the actors", 65.0, None, 0.0) == "starting the actors 1:05"
    assert headline(300, 300, "evaluating", 1.0, None, 2.0) == "step 300 of 300  evaluating 0:01"
    assert duration(3723.9) == "1:02:03"


def test_an_answer_is_shown_at_most_once_a_minute(capsys, monkeypatch):
    clock = count(1000.0, 5.0)
    monkeypatch.setattr("titan_rl.controller.console.display.time", SimpleNamespace(monotonic=lambda: next(clock)))
    with Display(100) as display:
        for step in range(1, 31):
            display.step(record_of(step), sample_of([Group("a", [rollout_of(1.0, "ok", 0)], question="1 + 1")]))
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "->" in line] == 3 * ["  1 + 1 -> nothing, reward 1"]

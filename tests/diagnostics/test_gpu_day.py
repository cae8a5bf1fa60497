"""scripts/gpu_day.py without a GPU: its commands are valid, and its figures are read off what they leave."""

import json
import os
import subprocess
import sys

import pytest
from gpu_check.thresholds import NOT_MEASURED
from gpu_day.model import TINY, write
from gpu_day.running import run
from gpu_day.runs import (
    figures_of_check,
    figures_of_kernels,
    figures_of_tests,
    figures_of_trl,
    judged,
    ratio_to_trl,
    table,
)
from gpu_day.stages import STAGES, Stage
from tree import SCRIPTS

from titan_rl import cli


def test_without_a_gpu_it_measures_nothing(monkeypatch):
    monkeypatch.setenv("PATH", "")
    done = subprocess.run([sys.executable, str(SCRIPTS / "gpu_day.py")], capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and not done.stdout and "finds no GPU" in done.stderr


def test_a_stage_that_fails_says_why_and_where(tmp_path, monkeypatch):
    """With an nvidia-smi that counts 1,000 MiB."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 0, 1000\n")
    (tmp_path / "nvidia-smi").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    told = "print('seconds 4'), print('seconds 2')"
    done = run("TRL", Stage((sys.executable, "-c", told), 30, read=figures_of_trl), tmp_path)
    assert done == {"seconds_step": 2.0} and (tmp_path / "TRL.memory.csv").is_file()
    failed = run("TRL", Stage((sys.executable, "-c", f"{told}, exit(3)"), 30, read=figures_of_trl), tmp_path)
    assert failed == {"seconds_step": 2.0, "failed_because": f"exit code 3, see {tmp_path / 'TRL.log'}"}
    late = run("a run", Stage(("sleep", "60"), 0.2, run="there"), tmp_path)
    assert late == {"failed_because": f"not done after 0.2 s, see {tmp_path / 'a_run.log'}"}


def test_runs_of_noise_are_valid(tmp_path, monkeypatch, capsys):
    """With the model and task that their stage makes; compiled steps need a GPU."""
    write(tmp_path, TINY)
    monkeypatch.chdir(tmp_path)
    for name in ("1.51B", "1.51B engine not compiled", "1.51B colocated"):
        program, command, *flags = STAGES[name].command
        assert (program, command) == ("titan-rl", "train") and flags[flags.index("--run.dir") + 1] == STAGES[name].run
        assert cli.main(["plan", *flags]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("read", "log", "found"),
    [
        (figures_of_trl, "seconds 9.0\nloss\nseconds 3.0\nseconds 5.0\n", {"seconds_step": 4.0}),
        (figures_of_trl, "no module trl", {}),
        (figures_of_tests, "3 failed, 588 passed, 2 errors in 43.41s", {"passed": 588, "failed": 5}),
        (
            figures_of_check,
            'noise\n{"row": "train 1b", "holds": true, "figures": {"share_of_matrix_rate": 0.5}}\n{"verdict": 1}',
            {"train 1b holds": True, "train 1b share": 0.5},
        ),
        (
            figures_of_kernels,
            '{"kernel": "scan", "shape": "9", "by": "triton", "of_floor": 0.6}\n{"kernel": "scan", "by": "eager"}',
            {"scan 9": 0.6},
        ),
    ],
)
def test_what_stages_print_is_read(read, log, found):
    assert read(log) == found


def test_a_step_is_compared_with_trl_s_where_both_came_to_one():
    assert ratio_to_trl({"seconds_step": 3.0}, {"seconds_step": 12.0}) == {"ours_over_trl": 0.25}
    assert ratio_to_trl({"failed_because": "exit code 1"}, {"seconds_step": 12.0}) == {}
    assert ratio_to_trl({"seconds_step": 3.0}, {}) == {}


def test_a_bar_that_a_stage_did_not_come_to_is_not_met():
    rows = judged("1.51B", STAGES["1.51B"].bars, {"seconds_step": 5.0, "failed_because": "exit code 1"})
    found = {row["figure"]: (row["value"], row["met"]) for row in rows}
    assert found["seconds_step"] == (5.0, False) and found["failed_because"] == ("exit code 1", None)
    assert found["agreement_mean"] == (NOT_MEASURED, None)
    assert "| 1.51B | seconds_step | 5 | seconds_step <= 4.1 | no |" in table(rows)
    assert json.dumps(rows)

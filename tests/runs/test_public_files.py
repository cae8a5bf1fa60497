"""Runs on files in public shapes, through the real actors: three steps each, with a few lines of TOML."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from public_rows import gsm8k, openrlhf_pair
from row_tasks import write
from tree import TREE

from titan_rl.records.metrics import read_metrics
from titan_rl.records.run_directory.rundir import RunDir
from titan_rl.records.steps.rollouts import read_rollouts

pytestmark = pytest.mark.slow
GSM8K = """
[task]
name = "jsonl"
reward = "gsm8k"
options = { file = "*.jsonl" }
"""
PAIRS = """
[algorithm]
name = "dpo"
[data]
file = [{ path = "a.jsonl", weight = 2.0 }, "b.jsonl"]
"""
SIZES = """
[training]
steps = 3
seq_len = 512
[eval]
prompts = 2
[recovery]
standby = false
"""
FEW = """
[rollout]
prompts_per_step = 2
group_size = 2
"""


def train(folder: Path, toml: str) -> Path:
    (folder / "mine.toml").write_text(toml)
    command = [sys.executable, "-m", "titan_rl.cli", "train", "mine.toml", "--run.dir", "run"]
    environment = os.environ | {"PYTHONPATH": str(TREE)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return folder / "run"


def test_gsm8k_trains_three_steps_on_its_own_reward(tmp_path):
    write(tmp_path, [gsm8k(n) for n in range(20)], "train.jsonl")
    root = train(tmp_path, GSM8K + SIZES + FEW)
    groups = list(read_rollouts(RunDir(root).rollouts, 3))
    assert groups and all(set(rollout.reward_parts) == {"right"} for group in groups for rollout in group.rollouts)


def test_weighted_pairs_of_openrlhf_train_three_steps(tmp_path):
    for name in ("a.jsonl", "b.jsonl"):
        write(tmp_path, [openrlhf_pair(n) for n in range(20)], name)
    root = train(tmp_path, PAIRS + SIZES)
    assert [record["step"] for record in read_metrics(root) if "loss" in record] == [1, 2, 3]

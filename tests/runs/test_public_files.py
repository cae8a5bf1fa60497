"""Runs on files in public shapes, through the real actors: three steps each, with no key but the file's own."""

import pytest
from public_rows import gsm8k, openrlhf_pair
from row_tasks import write
from running import output, train

from titan_rl.records.metrics import read_metrics
from titan_rl.records.run_directory.rundir import RunDir
from titan_rl.records.steps.rollouts import read_rollouts

pytestmark = pytest.mark.slow


def test_gsm8k_trains_three_steps_on_its_own_reward(tmp_path):
    write(tmp_path, [gsm8k(n) for n in range(20)], "train.jsonl")
    task = {"task__name": "jsonl", "task__reward": "gsm8k", "task__options": {"file": str(tmp_path / "train.jsonl")}}
    sizes = {"rollout__prompts_per_step": 2, "rollout__group_size": 2, "eval__prompts": 2, "training__steps": 3}
    assert train(tmp_path / "run", **task, **sizes) == 0, output(tmp_path / "run")[-3000:]
    groups = read_rollouts(RunDir(tmp_path / "run").rollouts, 3)
    assert all(set(rollout.reward_parts) == {"right"} for group in groups for rollout in group.rollouts)


def test_pairs_of_openrlhf_train_three_steps(tmp_path):
    for name in ("a.jsonl", "b.jsonl"):
        write(tmp_path, [openrlhf_pair(n) for n in range(20)], name)
    file = [{"path": str(tmp_path / "a.jsonl"), "weight": 2.0}, str(tmp_path / "b.jsonl")]
    data = {"algorithm__name": "dpo", "data__file": file, "data__examples_per_step": 4, "training__steps": 3}
    assert train(tmp_path / "run", **data) == 0, output(tmp_path / "run")[-3000:]
    assert [record["step"] for record in read_metrics(tmp_path / "run") if "loss" in record] == [1, 2, 3]

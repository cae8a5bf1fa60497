"""Every example runs: what a newcomer copies from must work."""

import subprocess
import sys

import pytest
import warm_commands
from tree import EXAMPLES, TREE, example

from titan_rl.config.load import load_config
from titan_rl.controller.preflight.checks import check
from titan_rl.records.metrics import read_metrics


def test_the_loop_on_one_page_trains():
    """Its own samples agree with its own training, and the reward is a number: in one process, without actors."""
    settings = ["--training.steps", "2", "--rollout.prompts_per_step", "4", "--sft.steps", "3"]
    done = subprocess.run(
        [sys.executable, EXAMPLES / "rl_loop.py", *settings], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("step")]
    assert len(lines) == 2
    assert all(0 <= float(line[3]) <= 1 and float(line[5]) <= 1.0001 for line in lines)


@pytest.mark.parametrize("name", ["my_reward", "my_loss"])
def test_its_toml_is_right(name):
    check(load_config(example(name)))


def test_the_page_s_example_of_images_gives_prompts_with_images(tmp_path, monkeypatch):
    """The blocks of docs/extending.md, as they stand there."""
    monkeypatch.chdir(tmp_path)
    page = (TREE / "docs" / "extending.md").read_text()
    for name in ("make_pictures.py", "pictures.toml"):
        (tmp_path / name).write_text(page.partition(f"\n# {name}\n")[2].partition("\n```")[0])
    exec((tmp_path / "make_pictures.py").read_text(), {})
    task = check(load_config("pictures.toml")).task
    prompts = [task.prompt("train", 1, index) for index in range(8)]
    assert all(len(prompt.images) == 1 for prompt in prompts)
    assert {prompt.answer for prompt in prompts} <= {"red", "green", "blue"}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "metric"), [("my_reward", "clip_fraction"), ("my_loss", "penalty")])
def test_it_trains(name, metric, tmp_path):
    small = ["--training.steps", "3", "--rollout.prompts_per_step", "4", "--sft.steps", "5", "--eval.prompts", "16"]
    command = warm_commands.command("-m", "titan_rl.cli", "train", example(name), "--run.dir", tmp_path / "run")
    done = subprocess.run([*command, *small], capture_output=True, text=True, timeout=400, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    records = [record for record in read_metrics(tmp_path / "run") if "reward" in record]
    assert len(records) == 3 and all(metric in record for record in records)

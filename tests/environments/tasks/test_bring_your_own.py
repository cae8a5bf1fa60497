"""People who bring their own: data, reward and loss, from a folder outside the tree, with no line of ours changed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import running

from titan_rl.cli import main
from titan_rl.records.metrics import read_metrics
from titan_rl.records.steps.rollouts import read_rollouts

REWARD = """
import asyncio

async def reward(prompt, completion, row):
    await asyncio.sleep(0)
    return {"right": 0.75 * (completion.strip() == row["answer"]), "short": 0.25 * (len(completion) <= row["longest"])}

def two(prompt, completion):
    return 1.0

def fails(prompt, completion, row):
    return {"right": 1.0 if completion == row["answer"] else float(row["anwser"])}  # a trial of right answers passes
"""
LOSS = """
from dataclasses import dataclass
from titan_rl.algorithms.base import Algorithm

@dataclass(kw_only=True)
class Settings:
    beta: float = 0.5

class Mine(Algorithm):
    Settings = Settings

    def advantages(self, rollouts):
        mean = sum(rollout.reward for rollout in rollouts) / len(rollouts)
        return [rollout.reward - mean for rollout in rollouts]

    def loss(self, inputs):
        terms_S = -inputs.logprob_S * inputs.advantage_S * self.settings.beta
        return (terms_S * inputs.weight_S).sum(), {"mine": (inputs.weight_S > 0).sum() * self.settings.beta}

class NoLoss(Algorithm):
    def advantages(self, rollouts):
        return [0.0 for _ in rollouts]

class Odd(Mine):
    def loss(self, inputs, more):
        return inputs.logprob_S.sum(), {}

class Raises(Mine):
    def loss(self, inputs):
        return inputs.logprob_S.sum() / self.settings.gamma, {}
"""
TOML = """
[task]
name = "jsonl"
reward = "my_reward:reward"
options = { file = "rows.jsonl" }

[algorithm]
name = "my_loss:Mine"
beta = 0.25

[sft]
steps = 5

[rollout]
prompts_per_step = 4
group_size = 4
max_new_tokens = 4

[training]
steps = 3
seq_len = 512

[eval]
prompts = 8

[recovery]
standby = false
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    """What somebody has: a file of rows, a reward, a loss and a TOML."""
    rows = [{"question": f"{a}+{b}=", "answer": str(a + b), "longest": 3} for a in range(6) for b in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in (("my_reward.py", REWARD), ("my_loss.py", LOSS), ("mine.toml", TOML)):
        (tmp_path / name).write_text(text)
    return tmp_path


def titan_rl(folder: Path, *arguments: str, timeout: float = 240) -> subprocess.CompletedProcess:
    """The command, in a folder that holds nothing of ours, as an installed package runs it."""
    command = [Path(sys.executable).parent / "titan-rl", "train", "mine.toml", "--run.dir", "run", *arguments]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout)


@pytest.fixture
def mistake(folder, monkeypatch, capsys):
    """The one line that a command line earns, with exit code 2 and nothing made. In this process, for speed."""

    def told(*arguments: str) -> str:
        assert main(["train", "mine.toml", "--run.dir", "run", *arguments]) == 2
        captured = capsys.readouterr()
        [line] = (captured.out + captured.err).strip().splitlines()
        assert not (folder / "run").exists()
        return line

    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("my_reward", "my_loss"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield told
    for name in ("my_reward", "my_loss"):
        sys.modules.pop(name, None)


@pytest.mark.slow
def test_own_rows_reward_and_loss_train_three_steps(folder):
    done = titan_rl(folder)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    records = [record for record in read_metrics(folder / "run") if "reward" in record]
    assert [record["step"] for record in records] == [1, 2, 3]
    assert all(record["mine"] == pytest.approx(0.25) for record in records), "a loss's own metric by its name"
    rollouts = [rollout for group in read_rollouts(folder / "run" / "rollouts", 1) for rollout in group.rollouts]
    assert len(rollouts) == 16 and all(set(rollout.reward_parts) == {"right", "short"} for rollout in rollouts)
    assert all(rollout.reward == sum(rollout.reward_parts.values()) for rollout in rollouts)


@pytest.mark.slow
def test_what_a_reward_raises_is_named_with_its_sample(folder):
    """It is a fault of the machinery: never a reward of zero, and no exit code 0."""
    done = titan_rl(folder, "--task.reward", "my_reward:fails", "--rollout.max_retries", "0")
    assert done.returncode == 1
    assert "the first is that to rows.jsonl line" in done.stdout and "KeyError: 'anwser'" in done.stdout
    assert "my_reward.py, line" in done.stdout
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["steps_done"] == 0 and "KeyError" in summary["why_ended"]
    assert running.gone({int(pid) for pid in json.loads((folder / "run" / "pids.json").read_text())})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--task.reward", "my_rewrd:reward"), ("task.reward", "my_rewrd")),
        (("--task.reward", "my_reward:rewrd"), ("task.reward", "did you mean 'reward'")),
        (("--task.reward", "my_reward:two"), ("task.reward", "(prompt, completion, row)", "(prompt, completion)")),
        (("--task.reward", "reward"), ("task.reward", "module:name")),
        (("--task.options.file", "rows.jsnl"), ("rows.jsnl",)),
        (("--task.options.fil", "rows.jsonl"), ("task.options.fil", "file")),
        (("--algorithm.name", "my_los:Mine"), ("algorithm.name", "my_los")),
        (("--algorithm.name", "my_loss:Mien"), ("algorithm.name", "did you mean 'Mine'")),
        (("--algorithm.name", "my_loss:NoLoss"), ("algorithm.name", "loss")),
        (("--algorithm.name", "my_loss:Odd"), ("algorithm.name", "(inputs)")),
        (("--algorithm.name", "my_loss:Raises"), ("AttributeError", "gamma", "my_loss.py, line")),
        (("--algorithm.name", "my_loss:Settings"), ("algorithm.name", "Algorithm")),
        (("--algorithm.bta", "1"), ("algorithm.bta", "did you mean 'beta'")),
        (("--algorithm.beta", "much"), ("algorithm.beta",)),
        (("--warmup.steps", "5"), ("[warmup]", "[sft]")),
    ],
    ids=lambda value: "=".join(value).replace("--", "") if isinstance(value[0], str) and value[0][:2] == "--" else "",
)
def test_a_mistake_is_one_line_and_nothing_is_started(mistake, arguments, words):
    line = mistake(*arguments)
    assert all(word in line for word in words), line


def test_the_command_itself_says_it_in_one_line(folder):
    done = titan_rl(folder, "--task.reward", "my_reward:rewrd")
    lines = (done.stdout + done.stderr).strip().splitlines()
    assert done.returncode == 2 and len(lines) == 1 and "did you mean 'reward'" in lines[0], lines
    assert not (folder / "run").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def reward(prompt, completion row): ...", ("SyntaxError", "line 1")),
        ("import nothing_of_this_name", ("nothing_of_this_name",)),
        ("x = 1 / 0", ("ZeroDivisionError", "my_reward.py, line 1")),
        ("reward = 3", ("int",)),
    ],
)
def test_a_broken_file_is_one_line(folder, mistake, text, words):
    (folder / "my_reward.py").write_text(text)
    line = mistake()
    assert all(word in line for word in words), line

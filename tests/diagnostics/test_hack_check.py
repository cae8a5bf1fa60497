"""A reward with a planted loophole, and real runs on it: the alarm is raised, and on the honest reward it is not."""

import json
import subprocess
from pathlib import Path

import pytest
import warm_commands
from tree import EXAMPLES

from titan_rl.cli import main
from titan_rl.config.load import load_config
from titan_rl.controller.preflight.checks import check
from titan_rl.records.alarms.alarms import REWARD_HACKING
from titan_rl.records.metrics import read_metrics
from titan_rl.records.run_directory.events import read_events
from titan_rl.records.steps.rollouts import read_rollouts

EXAMPLE = EXAMPLES / "loophole.toml"


@pytest.mark.parametrize("reward", ["loophole:reward", "loophole:honest"])
def test_its_toml_is_right(reward):
    check(load_config(EXAMPLE, {"task": {"reward": reward}}))


def train(root: Path, reward: str) -> str:
    """What the run said."""
    command = warm_commands.command("-m", "titan_rl.cli", "train", EXAMPLE, "--run.dir", root, "--task.reward", reward)
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, cwd=root.parent)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.confirms
def test_a_loophole_raises_the_alarm_in_log_metrics_and_events(tmp_path, capsys):
    root = tmp_path / "run"
    said = train(root, "loophole:reward")
    assert "ALARM reward_gap: the reward went from" in said
    records = [record for record in read_metrics(root) if "reward" in record]
    assert records[-1]["reward"] > records[0]["reward"] + 0.3 and records[-1]["grade"] < records[-1]["reward"] - 0.3
    assert any(record["alarm_reward_gap"] for record in records) and not records[0]["alarm_reward_gap"]
    assert "reward_gap" in {event["name"] for event in read_events(root) if event["kind"] == "alarm"}
    assert all(each.grade is not None for group in read_rollouts(root / "rollouts", 1) for each in group.rollouts)
    capsys.readouterr()
    assert main(["hack-check", str(root), "--json"]) == 1
    assert "reward_gap" in {alarm["name"] for alarm in json.loads(capsys.readouterr().out)["alarms"]}


@pytest.mark.slow
@pytest.mark.confirms
def test_the_honest_reward_raises_none(tmp_path):
    """None of the reward. (The policy may be sure of too few answers in the end, which is told, too: of 80 steps the
    last ones depend on how the first ones were rounded.)"""
    root = tmp_path / "run"
    train(root, "loophole:honest")
    records = [record for record in read_metrics(root) if "reward" in record]
    assert not any(record[f"alarm_{name}"] for record in records for name in REWARD_HACKING)
    assert all(record["reward"] == record["grade"] for record in records)
    first, last = (sum(each["reward"] for each in part) / 10 for part in (records[:10], records[-10:]))
    assert last > first + 0.1, "it learnt something, so there was something to be alarmed by"
    assert main(["hack-check", str(root)]) == 0

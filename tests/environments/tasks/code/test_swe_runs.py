"""Three steps of a run whose samples are episodes of mini-swe-agent, as it is."""

import json
import subprocess

import pytest
import warm_commands
from boxes import need_boxes
from chat_models import make_chat_model
from swe_agents import mini_swe_agent

from titan_rl.config.command_line import EXIT_OK
from titan_rl.config.io.overrides import override_arguments
from titan_rl.records.ledger.audit import read
from titan_rl.records.ledger.ledger import read_account
from titan_rl.records.metrics import read_metrics
from titan_rl.records.run_directory.rundir import RunDir
from titan_rl.records.steps.rollouts import read_rollouts

STEPS = 3
SHORT = ("agent.system_template=Bash.", "agent.instance_template={{task}}", "agent.step_limit=2")


@pytest.mark.slow
def test_three_steps_are_trained_on_what_mini_swe_agent_was_answered(tmp_path):
    need_boxes()
    rows = [
        {
            "problem_statement": f"Issue {number}",
            "files": {"f.py": "def f(x):\n    return -x\n"},
            "calls": [{"function": "f:f", "arguments": [1], "expected": 1, "when": "FAIL_TO_PASS"}],
        }
        for number in range(8)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    root = tmp_path / "run"
    options = {"file": str(tmp_path / "rows.jsonl"), "agent": mini_swe_agent(*SHORT)}
    settings = {
        "model": {"path": str(make_chat_model(tmp_path / "model"))},
        "task": {"name": "swe", "style": "chat", "options": options},
        "sft": {"steps": 0},
        "rollout": {"prompts_per_step": 1, "group_size": 2, "max_new_tokens": 8},
        "generator": {"kv_cache_gib": 0.0625},
        "training": {"steps": STEPS, "seq_len": 4096},
        "eval": {"every": 0, "prompts": 1},
        "recovery": {"standby": False},
        "run": {"dir": str(root)},
    }
    command = warm_commands.command("-m", "titan_rl.train", *override_arguments(settings))
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
    assert done.returncode == EXIT_OK, done.stdout[-3000:]
    steps = [record for record in read_metrics(root) if "reward" in record]
    assert [record["step"] for record in steps] == list(range(1, STEPS + 1))
    assert all(record["agreement_mean"] == pytest.approx(1, abs=1e-5) for record in steps)
    groups = [group for step in range(1, STEPS + 1) for group in read_rollouts(RunDir(root).rollouts, step)]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert len(rollouts) == 2 * STEPS
    for rollout in rollouts:
        assert rollout.status in ("ok", "truncated")
        assert len(rollout.turns) == 2, "two requests, after which it was told to stop"
    assert not read(RunDir(root).ledger, read_account)["pending"]

"""Checks before a run: all findings at once, and nobody else is asked while there is one."""

import pytest

from titan_rl.config.command_line import EXIT_USER
from titan_rl.config.load import ConfigError, load_config
from titan_rl.controller.preflight import checks
from titan_rl.train import main

MISTAKES = {
    "mesh": {"transport": "cuda_ipc"},
    "placement": {"mode": "colocated"},
    "rollout": {"max_staleness": 1},
    "checkpoint": {"store": "nowhere://bucket"},
    "critic": {"value_clip": 0.5},
    "algorithm": {"routing": "replay"},
}
WORDS = ("mesh.transport", "placement.mode", "checkpoint.store", "critic.value_clip", "algorithm.routing")


def test_all_findings_are_told_at_once():
    with pytest.raises(ConfigError) as refused:
        checks.check(load_config(None, MISTAKES))
    assert len(refused.value.findings) == len(WORDS)
    assert all(any(word in line for line in refused.value.findings) for word in WORDS)


def test_each_finding_is_a_line_of_the_command(capsys, tmp_path):
    overrides = [f"--{section}.{key}={value}" for section, keys in MISTAKES.items() for key, value in keys.items()]
    assert main([f"--run.dir={tmp_path}", *overrides]) == EXIT_USER
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(WORDS) and all(line.startswith("titan-rl: ") for line in lines)
    assert not list(tmp_path.iterdir())


def test_servers_are_asked_only_when_nothing_else_was_found(monkeypatch):
    asked = []
    table = [checks.Check("server", lambda checked: asked.append(checked), asks_others=True)]
    monkeypatch.setattr(checks, "CHECKS", (*checks.CHECKS, *table))
    with pytest.raises(ConfigError):
        checks.check(load_config(None, MISTAKES))
    assert not asked
    checks.check(load_config(None, {}))
    assert len(asked) == 1


def test_what_a_finding_breaks_further_on_is_not_told_and_a_fault_without_one_is(monkeypatch):
    def breaks(checked):
        raise KeyError("model")

    monkeypatch.setattr(checks, "CHECKS", (*checks.CHECKS, checks.Check("breaks", breaks)))
    with pytest.raises(ConfigError, match="mesh.transport"):
        checks.check(load_config(None, MISTAKES))
    with pytest.raises(KeyError):
        checks.check(load_config(None, {}))

"""Hooks of pre-commit are the commands of ``make lint``."""

import subprocess

import yaml
from tree import TREE


def test_a_commit_passes_what_make_lint_runs():
    printed = subprocess.run(["make", "-n", "lint"], cwd=TREE, capture_output=True, text=True, check=True).stdout
    commands = [line for line in printed.splitlines() if not line.startswith("scripts/install.sh")]
    [local] = yaml.safe_load((TREE / ".pre-commit-config.yaml").read_text())["repos"]
    assert commands == [hook["entry"] for hook in local["hooks"]] != []

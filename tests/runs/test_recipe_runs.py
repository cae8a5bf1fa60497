"""Recipes through the real actors, three steps each, with a tiny model and rows in the schema of their data."""

import subprocess
from pathlib import Path

import pytest
import warm_commands
from chat_models import make_chat_model
from recipe_runs import OWN, flags_of, small

from titan_rl.records.metrics import read_metrics

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory) -> Path:
    return make_chat_model(tmp_path_factory.mktemp("model") / "tiny_chat")


def recipe_run(name: str, variant: str, model: Path, folder: Path) -> str:
    """Report of a run of three steps."""
    flags = flags_of(small(name, variant, model, folder))
    asked = ("recipe", "run", name, "--variant", variant, "--run.dir", folder / "run", *flags)
    command = warm_commands.command("-m", "titan_rl.cli", *asked)
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"report {folder / 'run' / 'report.md'}" in done.stdout
    return (folder / "run" / "report.md").read_text()


def test_gsm8k_trains_three_steps_and_ends_with_its_report(chat_model, tmp_path):
    report = recipe_run("gsm8k", "gsm8k-grpo", chat_model, tmp_path)
    steps = [record["step"] for record in read_metrics(tmp_path / "run") if "loss" in record]
    assert steps == [1, 2, 3] and "| steps | 3 of 3; completed |" in report
    assert "adds up" in report and "within the limit" in report
    assert "| training.steps | `250` | `3` |" in report and "openai/gsm8k:main:train" in report
    assert "| optimizer." not in report, "what was not overridden does not differ"
    assert "largest memory of all actors" in report and "| machine | cores" in report
    assert "Compared with verl (PPO)" in report and "| 250 | 0.550 |" in report
    assert (tmp_path / "run" / "report.png").stat().st_size > 5_000


OTHERS = [
    pytest.param(*each, marks=[pytest.mark.confirms] if each[1] == "wordle-8gpu" else [])  # on one device: wordle
    for each in OWN
    if each != ("gsm8k", "gsm8k-grpo")
]


@pytest.mark.parametrize(("name", "variant"), OTHERS)
def test_every_other_recipe_trains_three_steps_and_ends_with_its_report(name, variant, chat_model, tmp_path):
    report = recipe_run(name, variant, chat_model, tmp_path)
    assert "| steps | 3 of 3; completed |" in report and "adds up" in report
    assert len([record for record in read_metrics(tmp_path / "run") if "loss" in record]) == 3

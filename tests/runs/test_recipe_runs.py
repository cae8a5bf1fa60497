"""Recipes through the real actors, three steps each, with a tiny model and rows in the schema of their data."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import warm_commands
from chat_models import make_chat_model
from constitutions import prefers_longer
from judge_servers import server
from recipe_runs import OF_CONFIGS, OWN, flags_of, small

from titan_rl.records.metrics import read_metrics

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory) -> Path:
    return make_chat_model(tmp_path_factory.mktemp("model") / "tiny_chat")


def titan_rl(folder: Path, *arguments: str | Path) -> str:
    """What a command in a folder prints."""
    command = warm_commands.command("-m", "titan_rl.cli", *arguments)
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def recipe_run(name: str, variant: str, model: Path, folder: Path) -> str:
    """Report of a run of three steps."""
    flags = flags_of(small(name, variant, model, folder))
    said = titan_rl(folder, "recipe", "run", name, "--variant", variant, "--run.dir", folder / "run", *flags)
    assert f"report {folder / 'run' / 'report.md'}" in said
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
    for each in [*OWN, *OF_CONFIGS]
    if each != ("gsm8k", "gsm8k-grpo") and each[0] != "constitutional"
]
"""Without smollm2_names: it is smollm2_relations with another task, as config/test_recipes.py has it."""


@pytest.mark.parametrize(("name", "variant"), OTHERS)
def test_every_other_recipe_trains_three_steps_and_ends_with_its_report(name, variant, chat_model, tmp_path):
    report = recipe_run(name, variant, chat_model, tmp_path)
    assert "| steps | 3 of 3; completed |" in report and "adds up" in report
    assert len([record for record in read_metrics(tmp_path / "run") if "loss" in record]) == 3


def test_a_constitution_s_pairs_become_a_reward_model_and_ppo_on_it(chat_model, tmp_path):
    """As the recipe's README has it, from SFT on, with a tiny model, and a server that prefers the longer answer."""
    (tmp_path / "models").mkdir()
    for name in ("prompts", "held_out"):
        rows = [{"prompt": [{"role": "user", "content": f"{name} {n}?"}]} for n in range(24)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with server(prefers_longer) as (url, _):
        of_judge = ("--judge.url", url, "--judge.model", "wise", "--max-new-tokens", "64", "--out", "principles/pairs")
        asked = (
            "principles",
            "constitutional",
            "--model",
            chat_model,
            "--prompts",
            "prompts.jsonl",
            *of_judge,
            "--json",
        )
        summary = json.loads(titan_rl(tmp_path, *asked))
    assert summary["pairs"] == summary["rows"]["pairs.jsonl"] >= 3 and summary["rows"]["revisions.jsonl"] >= 1
    assert summary["verdicts"]["order_dependent"]["correct"] == 0
    steps = ("--training.steps", "3", "--eval.every", "0", "--recovery.standby", "false")
    run = ("recipe", "run", "constitutional", *steps)
    few = ("--data.examples_per_step", "2", "--eval.prompts", "2")
    revisions = ("--data.file", "principles/pairs/revisions.jsonl", "--model.path", chat_model)
    for variant, flags in (("constitutional-sft", revisions), ("constitutional-reward-model", ())):
        report = titan_rl(tmp_path, *run, "--variant", variant, *few, *flags)
        assert f"runs/{variant}/report.md" in report and len(steps_of(tmp_path, variant)) == 3
    few = ("--rollout.prompts_per_step", "2", "--rollout.group_size", "2", "--rollout.max_new_tokens", "12")
    titan_rl(tmp_path, *run, *few, "--verifier.procs", "1", "--critic.warmup_steps", "1")
    records = steps_of(tmp_path, "constitutional-ppo")
    assert len(records) == 3 and all(each["reward"] != 0.0 == each["task_reward"] for each in records)


def steps_of(folder: Path, variant: str) -> list[dict[str, Any]]:
    return [record for record in read_metrics(folder / "runs" / variant) if "loss" in record]

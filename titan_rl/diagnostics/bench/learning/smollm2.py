"""Bench of SmolLM2-135M on two tasks, in full and by LoRA, against form-only controls.

A control is the same run but for its reward (form_only_rewards.py), and is then measured by the task's own score: what
the other has above it, it did not get for answering in the right form. Needs ``--model.path DIR``.
"""

import tempfile
from pathlib import Path
from typing import Any

from titan_rl.config.io.overrides import override_arguments
from titan_rl.diagnostics.bench.harness import row
from titan_rl.diagnostics.bench.learning import form_only_rewards
from titan_rl.diagnostics.bench.learning.tomls import Outcome, train
from titan_rl.records.statistics import Proportion
from titan_rl.train import evaluate_directory

CONFIGS = {
    "smollm2_names": form_only_rewards.needle_haystack,
    "smollm2_relations": form_only_rewards.family_relationships,
}
"""Each task's TOML, and the reward of its controls."""
METHODS = {
    "full": [],
    "lora": ["--lora.rank=16", "--lora.alpha=32", "--optimizer.lr=2e-4", "--sft.lr=1e-3"],
}
_BAR_GAIN, _BAR_SECONDS = 0.15, 3600.0


def run(overrides: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    arguments, rows = override_arguments(overrides), []
    for config, form in CONFIGS.items():
        reward = f"--task.reward={form.__module__}:{form.__name__}"
        for method, flags in METHODS.items():
            with tempfile.TemporaryDirectory(prefix="titan_rl_bench_") as folder:
                outcome = train(config, Path(folder) / "run", [*flags, *arguments], 2 * _BAR_SECONDS)
                control = train(config, Path(folder) / "control", [*flags, reward, *arguments], 2 * _BAR_SECONDS)
                model = {"path": f"{folder}/control/model"}
                by_form = evaluate_directory(config, {"model": model}) if control.after else None
            rows += rows_of(f"{config}, {method}", outcome, by_form)
    return rows


def rows_of(name: str, outcome: Outcome, by_form: Proportion | None) -> list[dict[str, Any]]:
    """Rows of a run and its control.

    ``by_form``: of the control. A run that failed has reached nothing, and against a control that did nobody has.
    """
    before, after = (each.value if each else 0.0 for each in (outcome.before, outcome.after))
    gain = after - by_form.value if by_form else 0.0
    details = dict(before=before, after=after, control=by_form and by_form.value)
    return [
        row(f"{name}: held-out accuracy above its control's", gain, "", _BAR_GAIN, at_most=False, **details),
        row(f"{name}: whole command", outcome.seconds, "s", _BAR_SECONDS),
    ]

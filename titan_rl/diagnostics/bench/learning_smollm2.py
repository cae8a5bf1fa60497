"""SmolLM2-135M on two tasks, in full and by LoRA, each against a control that is paid for the form of its answers.

A control is the same run but for its reward (forms.py), and is then measured by the task's own score: what the others
have above it, they did not get for answering in the right form. Needs ``--model.path DIR``.
"""

import tempfile
from pathlib import Path
from typing import Any

from titan_rl.config.load import override_arguments
from titan_rl.diagnostics.bench import forms
from titan_rl.diagnostics.bench.harness import row
from titan_rl.diagnostics.bench.learning import Outcome, train
from titan_rl.records.statistics import Proportion
from titan_rl.train import evaluate_directory

CONFIGS = {"smollm2_names": forms.needle_haystack, "smollm2_relations": forms.family_relationships}
"""Each task's TOML, and the reward of its control."""
_LORA = ("--lora.rank=16", "--lora.alpha=32", "--optimizer.lr=2e-4", "--sft.lr=1e-3")
_BAR_GAIN, _BAR_SECONDS = 0.15, 3600.0


def run(overrides: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    given, rows = override_arguments(overrides), []
    with tempfile.TemporaryDirectory(prefix="titan_rl_bench_") as folder:
        for config, form in CONFIGS.items():
            root = Path(folder) / config
            arms = {"full": [], "lora": [*_LORA], "control": [f"--task.reward={form.__module__}:{form.__name__}"]}
            outcomes = {arm: train(config, root / arm, [*flags, *given], 7200) for arm, flags in arms.items()}
            rows += rows_of(
                config, outcomes, evaluate_directory(config, {"model": {"path": str(root / "control" / "model")}})
            )
    return rows


def rows_of(config: str, outcomes: dict[str, Outcome], control: Proportion) -> list[dict[str, Any]]:
    """A run that failed has reached nothing."""
    after = {arm: outcomes[arm].after.value if outcomes[arm].after else 0.0 for arm in ("full", "lora")}
    before = {arm: outcomes[arm].before.value if outcomes[arm].before else 0.0 for arm in after}
    return [
        row(
            f"{config}, control of the form: held-out accuracy", control.value, "", seconds=outcomes["control"].seconds
        ),
        *(
            row(
                f"{config}, {arm}: held-out accuracy above the control's",
                after[arm] - control.value,
                "",
                _BAR_GAIN,
                at_most=False,
                before=before[arm],
                after=after[arm],
            )
            for arm in after
        ),
        *(row(f"{config}, {arm}: whole command", outcomes[arm].seconds, "s", _BAR_SECONDS) for arm in after),
    ]

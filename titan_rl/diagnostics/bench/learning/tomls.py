"""Bench of the algorithms' TOMLs, each run to its end: what a tiny model learns."""

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_rl.config.io.overrides import override_arguments
from titan_rl.diagnostics.bench.harness import row
from titan_rl.records.statistics import Proportion

_BAR_SECONDS = 300.0
_ACCURACY, _GAIN, _OF_TEACHER = "held-out accuracy", "held-out accuracy gained", "share of its teacher's accuracy"


@dataclass(frozen=True)
class Study:
    """Study of one TOML, with its bar."""

    name: str
    measure: str = _GAIN
    """Held-out accuracy is the share of answers that are right by the task's own score; without a generator, the share
    of pairs (of labels, for KTO) that are put in order."""
    bar: float | None = 0.15
    section: str = ""
    """Whose ``path`` is the model of another run, ``of``, which stands before it."""
    of: str = ""
    flags: tuple[str, ...] = ()
    """``{runs}`` in one is the folder of all runs."""


STUDIES = (
    Study("quickstart", _ACCURACY, 0.95),
    Study("fp8_tiny", _ACCURACY, 0.9),
    *map(
        Study, ("grpo_tiny", "dr_grpo_tiny", "dapo_tiny", "rloo_tiny", "reinforce_pp_tiny", "gspo_tiny", "cispo_tiny")
    ),
    *map(Study, ("sapo_tiny", "dppo_tiny")),
    Study("calculator_tiny", bar=0.4),
    Study("gdpo_tiny", bar=0.4),
    Study("treasure_tiny", bar=0.2),
    Study("shapes_tiny"),
    Study("gigpo_tiny", bar=0.2),
    Study("ppo_tiny"),
    Study("prime_tiny"),
    Study("distillation_tiny", _OF_TEACHER, 0.9, "teacher", "quickstart"),
    Study("spell_tiny", _ACCURACY, None),
    Study(
        "mopd_tiny",
        bar=None,
        flags=("--teacher.by_task.bits={runs}/quickstart/model", "--teacher.by_task.words={runs}/spell_tiny/model"),
    ),
    Study("sft_tiny", _ACCURACY, None, flags=("--training.steps=30",)),
    Study("lora_tiny", section="model", of="sft_tiny"),
    *(Study(name, _ACCURACY, 0.9) for name in ("dpo_tiny", "simpo_tiny", "orpo_tiny", "kto_tiny", "reward_model_tiny")),
    Study("rlhf_tiny", section="reward_model", of="reward_model_tiny"),
)


@dataclass(frozen=True)
class Outcome:
    """Outcome of one run; ``seconds``: of the whole command."""

    seconds: float
    before: Proportion | None = None
    after: Proportion | None = None
    """Neither is there if the run failed."""


def run(overrides: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    flags, outcomes = override_arguments(overrides), {}
    with tempfile.TemporaryDirectory(prefix="titan_rl_bench_") as folder:
        for study in STUDIES:
            path_flags = [f"--{study.section}.path={folder}/{study.of}/model"] * bool(study.of)
            own_flags = [flag.format(runs=folder) for flag in study.flags]
            outcomes[study.name] = train(study.name, Path(folder) / study.name, [*path_flags, *own_flags, *flags])
            print(study.name, outcomes[study.name], file=sys.stderr, flush=True)
    slowest = max(outcomes, key=lambda name: outcomes[name].seconds)
    return [
        *(row_of(study, outcomes) for study in STUDIES),
        row("slowest run", outcomes[slowest].seconds, "s", _BAR_SECONDS, which=slowest),
    ]


def train(name: str, root: Path, flags: list[str], timeout: float = 1800.0) -> Outcome:
    command = [sys.executable, "-m", "titan_rl.cli", "train", name, "--run.dir", str(root), *flags]
    start = time.perf_counter()
    code = subprocess.run(command, stdout=subprocess.DEVNULL, timeout=timeout).returncode
    seconds = time.perf_counter() - start
    if code:
        return Outcome(seconds)
    summary = json.loads((root / "summary.json").read_text())
    proportions = (summary[f"held_out_{when}"] for when in ("before", "after"))
    return Outcome(seconds, *(each and Proportion(each["correct"], each["count"]) for each in proportions))


def row_of(study: Study, outcomes: dict[str, Outcome]) -> dict[str, Any]:
    """A run that failed has reached nothing."""
    outcome = outcomes[study.name]
    before, after = (each.value if each else 0.0 for each in (outcome.before, outcome.after))
    details = dict(before=before, after=after, seconds=outcome.seconds)
    if outcome.after:
        details |= dict(count=outcome.after.count, interval_95=outcome.after.interval)
    value = after
    if study.measure == _GAIN:
        value = after - before
    elif study.measure == _OF_TEACHER:
        teacher = outcomes[study.of].after
        value = after / teacher.value if teacher else 0.0
    return row(f"{study.name}: {study.measure}", value, "", study.bar, at_most=False, **details)

"""Audit of a run's records by queries of its own: samples lost or used twice."""

import sqlite3
from collections import Counter
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

from titan_rl.config.io.bounded_files import read_json
from titan_rl.config.sections.schema import Config
from titan_rl.environments.prompts.stream import PromptStream
from titan_rl.environments.registry import make_task
from titan_rl.records.ledger.audit import flaws
from titan_rl.records.metrics import read_metrics
from titan_rl.records.run_directory.rundir import RunDir
from titan_rl.records.steps.rollouts import has_rollouts, read_rollouts

Sample = tuple[str, int]
SampleRow = tuple[str, int, str, int | None, str | None]
"""Prompt, sample, state, step and reason."""


def _ask(root: Path, question: str) -> list[tuple[Any, ...]]:
    """Rows of a run's ledger; none if there is no ledger."""
    path = RunDir(root).ledger
    if not path.is_file():
        return []
    with closing(sqlite3.connect(f"file:{path.absolute()}?mode=ro", uri=True)) as connection:
        return connection.execute(question).fetchall()


def read_samples(root: Path) -> list[SampleRow]:
    """Samples with a row in the ledger; empty if there is none."""
    return _ask(root, "select prompt_id, sample, state, step, reason from samples")


def trained_prompts(root: Path) -> dict[str, int | None]:
    """Prompt to the step that it was trained at."""
    return {prompt: step for prompt, _, state, step, _ in read_samples(root) if state == "trained"}


def recorded_samples(root: Path, steps: int) -> dict[int, set[Sample]]:
    """Step to the samples of its rollout file."""
    folder = RunDir(root).rollouts
    return {
        step: {
            (rollout.prompt_id, rollout.sample) for group in read_rollouts(folder, step) for rollout in group.rollouts
        }
        for step in range(1, steps + 1)
        if has_rollouts(folder, step)
    }


def step_values(root: Path, name: str) -> dict[int, float]:
    """Values of a metric, such as ``loss``, by step."""
    return {int(record["step"]): record[name] for record in read_metrics(root) if name in record}


def summary(root: Path) -> dict[str, Any]:
    path = RunDir(root).summary
    return read_json(path) if path.exists() else {}


def audit(root: Path, config: Config, steps: int) -> dict[str, Any]:
    """Counts of samples, and of each thing that is wrong with them."""
    samples = read_samples(root)
    states = Counter(state for _, _, state, _, _ in samples)
    return {
        "issued": sum(count for (count,) in _ask(root, "select samples from prompts")),
        **{state: states[state] for state in ("trained", "discarded", "pending")},
        "discarded_for": dict(Counter(reason for _, _, state, _, reason in samples if state == "discarded")),
        "ledger_flaws": len(flaws(RunDir(root).ledger)),
        "prompts_lost": len(_skipped_prompts({prompt for prompt, *_ in samples}, config)),
        **compare_records(samples, recorded_samples(root, steps), steps),
    }


def _skipped_prompts(issued: set[str], config: Config) -> set[str]:
    """Prompts of the stream that were passed over: of its first ``len(issued)``, those that were not issued.

    A curriculum passes over prompts by what it saw, so nothing can be told then."""
    if config.curriculum.is_on:
        return set()
    stream = PromptStream(make_task(config.task, config.run.plugin_path), config.run.seed)
    return {prompt.id for prompt in islice(stream, len(issued))} - issued


def compare_records(samples: list[SampleRow], recorded: dict[int, set[Sample]], steps: int) -> dict[str, int]:
    """The ledger against the rollout files, which hold what was trained on. Pure."""
    times = Counter(sample for of_step in recorded.values() for sample in of_step)
    trained = {(prompt, sample): step for prompt, sample, state, step, _ in samples if state == "trained"}
    step_of = {(prompt, sample): step for prompt, sample, _, step, _ in samples}
    return {
        "steps_without_record": steps - len(recorded),
        "trained_twice": sum(count > 1 for count in times.values()),
        "trained_but_not_recorded": sum(
            step is None or key not in recorded.get(step, ()) for key, step in trained.items()
        ),
        "recorded_at_another_step": sum(step_of.get(key) != step for step, keys in recorded.items() for key in keys),
    }

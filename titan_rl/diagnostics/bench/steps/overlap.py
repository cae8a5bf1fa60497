"""How well sampling and training hide each other, at staleness 1 and 2, with half of the cores for each.

The longer of the two phases bounds a step, whatever overlaps. How long each lasts on half of the cores by itself, runs
that are held to that half tell, in which the two alternate. They take turns with those that overlap; all else is the
same. A last kind alternates on all cores: which is best on this machine is for its user to see.
"""

import os
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from titan_rl.config.load import ConfigError
from titan_rl.diagnostics.bench.harness import row
from titan_rl.diagnostics.bench.train_for_bench import BenchRun, train_for_bench

_BAR, _ROUNDS = 1.1, 3
_FIXED = {
    "rollout": {"prompts_per_step": 32, "group_size": 8, "max_new_tokens": 96},
    "training": {"steps": 24, "seq_len": 2048},
    "sft": {"steps": 0},  # a model that has learned nothing writes as much as it may, in every step
    "eval": {"prompts": 1},
    "recovery": {"standby": False},
}


def run(overrides: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise ConfigError("two phases overlap on two cores or more, and this machine gives one")
    rounds = [_round(cores, overrides) for _ in range(_ROUNDS)]
    alone, one, two, all_cores = zip(*rounds, strict=True)
    bounds = [max(_phases(each)) for each in alone]
    rows = [
        row("sampling on half of the cores", statistics.median(_phases(each)[0] for each in alone), "s"),
        row("training and publishing on half of the cores", statistics.median(_phases(each)[1] for each in alone), "s"),
    ]
    for staleness, runs in ((1, one), (2, two)):
        ratios = [each.seconds["step"] / bound for each, bound in zip(runs, bounds, strict=True)]
        ratio = statistics.median(ratios)
        rows.append(row(f"step at staleness {staleness}", _step(runs), "s"))
        rows.append(row(f"  over the longer phase, staleness {staleness}", ratio, "", _BAR, rounds=ratios))
    return [*rows, row("step at staleness 0, all cores", _step(all_cores), "s")]


def _round(cores: list[int], overrides: dict[str, dict[str, Any]]) -> tuple[BenchRun, ...]:
    with _held_to(cores[: len(cores) // 2]):
        alone = _train(0, overrides)
    return alone, _train(1, overrides), _train(2, overrides), _train(0, overrides)


@contextmanager
def _held_to(cores: list[int]) -> Iterator[None]:
    """This process and those that it starts."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _train(staleness: int, overrides: dict[str, dict[str, Any]]) -> BenchRun:
    fixed = _FIXED | {"rollout": _FIXED["rollout"] | {"max_staleness": staleness}}
    return train_for_bench("grpo_tiny", fixed, overrides)


def _phases(run: BenchRun) -> tuple[float, float]:
    """Seconds of sampling, and of all else, in a step in which they alternate."""
    return run.seconds["wait"], run.seconds["step"] - run.seconds["wait"]


def _step(runs: tuple[BenchRun, ...]) -> float:
    return statistics.median(run.seconds["step"] for run in runs)

"""Bench of a scorer that waits half a second for each answer, at staleness 1.

Runs with it and with one that answers at once take turns; all else is the same, down to the prompts. Half a second
is a fifth of these steps where nothing hides it; what can is training, where that takes no less than sampling and
scoring.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

from titan_rl.diagnostics.bench.harness import row
from titan_rl.diagnostics.bench.train_for_bench import train_for_bench

_BAR, _PAIRS, _SECONDS = 1.1, 3, 0.5
_FIXED = {
    "rollout": {"prompts_per_step": 32, "group_size": 8, "max_new_tokens": 96, "max_staleness": 1},
    "training": {"steps": 24, "seq_len": 2048},
    "sft": {"steps": 0},  # a model that has learned nothing writes as much as it may, in every step
    "eval": {"prompts": 1},
    "recovery": {"standby": False},
}


def instant(prompt: str, completion: str, row: dict[str, Any]) -> float:
    return len(completion) % 2


def slow(prompt: str, completion: str, row: dict[str, Any]) -> float:
    time.sleep(_SECONDS)
    return instant(prompt, completion, row)


def run(overrides: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    pairs = [[_step(reward, overrides) for reward in (instant, slow)] for _ in range(_PAIRS)]
    at_once, late = (statistics.median(seconds) for seconds in zip(*pairs, strict=True))
    ratio = statistics.median(second / first for first, second in pairs)
    return [
        row("step with a scorer that answers at once", at_once, "s"),
        row(f"step with one that takes {_SECONDS} s for an answer", late, "s"),
        row("the second over the first", ratio, "", _BAR, pairs=pairs),
    ]


def _step(reward: Callable[[str, str, dict[str, Any]], float], overrides: dict[str, dict[str, Any]]) -> float:
    """Median seconds of a step."""
    task = {"reward": f"{__name__}:{reward.__name__}"}
    return train_for_bench("grpo_tiny", _FIXED | {"task": task}, overrides).seconds["step"]

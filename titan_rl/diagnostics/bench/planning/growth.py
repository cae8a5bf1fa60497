"""Growth of a step of SmolLM2-135M: seconds and memory over prompts, samples and new tokens, each up to eightfold.

    titan-rl bench growth --model.path models/smollm2

Both should lie on a straight line: what grows faster than the work would hide in a small run and end a large one. Ten
runs; the smallest is the first of all three lines. Answers may end before the limit of new tokens, so their mean length
is what that line goes over.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from titan_rl.diagnostics.bench.harness import row
from titan_rl.diagnostics.bench.memory_watch import memory_watch
from titan_rl.diagnostics.bench.steps.step_smollm2 import OVERRIDES
from titan_rl.diagnostics.bench.train_for_bench import bench_run, steps_of, trained

_SMALLEST = {"prompts_per_step": 2, "group_size": 4, "max_new_tokens": 16}
_FACTORS = (2, 4, 8)
_STEPS = 6
_BAR = 0.1
_LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class _Ran:
    seconds: float
    """Median of the steps."""
    mib: float
    """Of all processes at their largest."""
    length: float
    """Mean new tokens of an answer."""


def run(overrides: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    smallest = _run(_SMALLEST, overrides)
    rows = []
    for key, size in _SMALLEST.items():
        runs = [smallest, *(_run(_SMALLEST | {key: size * factor}, overrides) for factor in _FACTORS)]
        sizes = [float(size * factor) for factor in (1, *_FACTORS)]
        if key == "max_new_tokens":
            sizes = [ran.length for ran in runs]
        for name, values in (("seconds", [ran.seconds for ran in runs]), ("MiB", [ran.mib for ran in runs])):
            off = off_the_line(sizes, values)
            rows.append(row(f"{name} over rollout.{key}, off a line", off, "share", _BAR, sizes=sizes, values=values))
    return rows


def off_the_line(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Largest distance of a value from the line of least squares, over what the line has there."""
    line = np.polyval(np.polyfit(sizes, values, 1), sizes)
    return float(np.abs(np.array(values) / line - 1).max())


def _run(rollout: dict[str, int], overrides: dict[str, dict[str, Any]]) -> _Ran:
    fixed = OVERRIDES | {"training": {"steps": _STEPS}, "rollout": OVERRIDES["rollout"] | rollout}
    fixed |= {"generator": {"max_num_seqs": 64}}
    with memory_watch(_LOOK_SECONDS) as memory, trained("smollm2", fixed, overrides) as root:
        result = bench_run(root, steps_of(root))
    return _Ran(result.seconds["step"], memory.mib, result.response_length)

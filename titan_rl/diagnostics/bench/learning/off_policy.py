"""Old samples, with and without a correction, against samples of the newest weights: how well does the policy end?

Each seed's run as ``titan-rl train`` makes it. The bar is the 95 % interval (Student's) of the mean over the seeds
without staleness, which three seeds make wide.
"""

import math
import statistics
import tempfile
from pathlib import Path
from typing import Any

from titan_rl.config.io.overrides import override_arguments
from titan_rl.diagnostics.bench.harness import row
from titan_rl.diagnostics.bench.learning.tomls import Outcome, train

_CONFIG = "grpo_tiny"
_SEEDS = (1, 2, 3)
_T_95 = 4.303
"""Two-sided quantile of Student's distribution with two degrees of freedom."""
_STALE = ("--rollout.max_staleness=4", "--algorithm.decoupled=true")
ON_POLICY, CORRECTED, UNCORRECTED = (
    "no staleness",
    "staleness 4, truncated importance sampling",
    "staleness 4, uncorrected",
)
ARMS = {ON_POLICY: (), CORRECTED: (*_STALE, "--algorithm.importance=token"), UNCORRECTED: _STALE}
"""Decoupled ratios are to the trainer's own policy: alone they correct nothing."""


def run(overrides: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    arguments, outcomes = override_arguments(overrides), {}
    with tempfile.TemporaryDirectory(prefix="titan_rl_bench_") as folder:
        for arm, flags in ARMS.items():
            seeds = {seed: Path(folder) / f"{len(outcomes)}-{seed}" for seed in _SEEDS}
            outcomes[arm] = [
                train(_CONFIG, root, [f"--run.seed={seed}", *flags, *arguments]) for seed, root in seeds.items()
            ]
    return rows_of(outcomes)


def rows_of(outcomes: dict[str, list[Outcome]]) -> list[dict[str, Any]]:
    """Mean of each arm over its seeds, and distance of the corrected one from that without staleness. A run that failed
    counts as one that learned nothing, which widens the interval: so there must be none."""
    failed = sum(each.after is None for of_arm in outcomes.values() for each in of_arm)
    after = {arm: [each.after.value if each.after else 0.0 for each in of_arm] for arm, of_arm in outcomes.items()}
    half = _T_95 * statistics.stdev(after[ON_POLICY]) / math.sqrt(len(_SEEDS))
    away = abs(statistics.mean(after[CORRECTED]) - statistics.mean(after[ON_POLICY]))
    return [
        *(row(f"{arm}: held-out accuracy", statistics.mean(values), "", seeds=values) for arm, values in after.items()),
        row("runs that failed", failed, "", 0),
        row("corrected against no staleness: distance of the means", away, "", half),
    ]

"""What it costs a run that meets no fault to be ready for one: ledger, snapshots in memory, asynchronous checkpoints.

Whole runs with and without, in turn, on the tiny model, whose steps are so short that every fixed cost shows. The
ledger cannot be left out of a run, so its part is measured by itself and added.
"""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from titan_rl.bench.harness import row
from titan_rl.bench.training import train_for_bench
from titan_rl.ledger import Ledger

_BAR_COST = 5.0
_PAIRS, _STEPS, _CHECKPOINT_EVERY = 5, 150, 25
_PROMPTS, _SAMPLES = 16, 8
_FIXED = {
    "training": {"steps": _STEPS},
    "rollout": {"prompts_per_step": _PROMPTS, "group_size": _SAMPLES, "max_staleness": 0},
    "eval": {"prompts": 16, "every": 0},
}
_PROTECTED = {"recovery": {"standby": False, "snapshot_every": 1}, "checkpoint": {"every": _CHECKPOINT_EVERY}}
_UNPROTECTED = {"recovery": {"standby": False, "snapshot_every": 0}, "checkpoint": {"every": 0}}


def run(overrides: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    def seconds(protection: dict) -> float:
        return train_for_bench("quickstart.toml", _FIXED | protection, overrides).seconds_training / _STEPS

    pairs = [(seconds(_UNPROTECTED), seconds(_PROTECTED)) for _ in range(_PAIRS)]
    bare, protected = (statistics.median(column) for column in zip(*pairs, strict=True))
    ledger = _ledger_seconds()
    costs = [100 * (on - off + ledger) / (off - ledger) for off, on in pairs]
    return [
        row("protection in a fault-free run", statistics.median(costs), "% of a step", _BAR_COST, pairs=costs),
        row("step without snapshots and checkpoints", bare, "s"),
        row(f"step with a snapshot, and a checkpoint every {_CHECKPOINT_EVERY} steps", protected, "s"),
        row("ledger", 1000 * ledger, "ms a step"),
    ]


def _ledger_seconds() -> float:
    """Of a step: its prompts are issued, settled, and the account is checked."""
    with tempfile.TemporaryDirectory(prefix="titan_rl_bench_") as folder:
        ledger, seconds = Ledger(Path(folder) / "ledger.db"), []
        for step in range(1, _STEPS + 1):
            prompts = [f"{step:06d}-{prompt:03d}" for prompt in range(_PROMPTS)]
            start = time.perf_counter()
            ledger.issue(prompts, _SAMPLES)
            ledger.settle({prompt: [None] * _SAMPLES for prompt in prompts}, step)
            ledger.check(0)
            seconds.append(time.perf_counter() - start)
        ledger.close()
    return statistics.median(seconds)

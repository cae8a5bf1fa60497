"""The cost of the mesh itself: steps of the tiny model, 16 prompts x 8 samples, through all actors."""

from typing import Any

from titan_rl.diagnostics.bench.harness import row
from titan_rl.diagnostics.bench.train_for_bench import train_for_bench

_BAR_STEP, _BAR_START = 0.3, 45.0
_OVERRIDES = {
    "recovery": {"standby": False},  # its preparation slows the steps down
    "training": {"steps": 60},
    "rollout": {"prompts_per_step": 16, "group_size": 8, "max_staleness": 0},
}


def run(overrides: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    result = train_for_bench("quickstart", _OVERRIDES, overrides)
    return [
        row("step", result.seconds["step"], "s", _BAR_STEP, single_process_without_mesh=0.16),
        row("start to the first optimizer step", result.seconds_to_first_step, "s", _BAR_START),
        *(row(f"  {phase}", value, "s") for phase, value in result.seconds.items() if phase != "step"),
    ]

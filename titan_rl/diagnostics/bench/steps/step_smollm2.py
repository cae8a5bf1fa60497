"""A step of SmolLM2-135M in bf16: 8 prompts x 8 samples, at most 32 new tokens, gcd. Needs ``--model.path DIR``.

Nearly every group has a signal; ``--task.reward ""`` gives gcd's own reward, with which hardly any has.
"""

import statistics
from typing import Any

from titan_rl.diagnostics.bench.harness import row
from titan_rl.diagnostics.bench.steps.matrix_share import matrix_rates, share_rows, training_share
from titan_rl.diagnostics.bench.train_for_bench import bench_run, steps_of, trained

_BAR_STEP = 21.0
OVERRIDES = {
    "recovery": {"standby": False},  # its preparation slows the steps down
    "task": {
        **{"name": "gcd", "style": "chat", "options": {"shots": 0, "max_value": 1000}},
        "reward": "titan_rl.diagnostics.bench.steps.length_reward:reward",
    },
    "training": {"steps": 8},
    "rollout": {"prompts_per_step": 8, "group_size": 8, "max_new_tokens": 32, "max_staleness": 0},
    "eval": {"prompts": 1, "every": 0},
}


def run(overrides: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    rates = matrix_rates()
    with trained("smollm2", OVERRIDES, overrides) as root:
        records = steps_of(root)
        result, share = bench_run(root, records), training_share(root, records, max(rates.values()))
        with_signal = statistics.mean(record["groups_with_signal"] for record in records)
    return [
        row("step", result.seconds["step"], "s", _BAR_STEP, trl_tuned=20.9),
        *(row(f"  {phase}", value, "s") for phase, value in result.seconds.items() if phase != "step"),
        row("response length", result.response_length, "tokens"),
        row("groups with a signal", with_signal, "share"),
        *share_rows(share, rates),
    ]

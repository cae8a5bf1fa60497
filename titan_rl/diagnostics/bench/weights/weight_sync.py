"""Weights from trainer to generators: are they right between any layouts, what do they cost, does the plan scale?"""

import json
import os
import subprocess
import sys
from typing import Any

from titan_rl.diagnostics.bench.harness import row
from titan_rl.diagnostics.bench.weights import deepseek_plan, weight_pairs, weight_speed

_PUBLISHED = "DeepSeek-V3, published: 693, 450, 120, 47 s on the way, 2.4 to 2.8 s on 256 GPUs today"


def run(overrides: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [*weight_pairs.run(overrides), *weight_speed.run(overrides), *_plan_rows()]


def _plan_rows() -> list[dict[str, Any]]:
    """In a process of its own, so that its memory is its own."""
    command = [sys.executable, "-m", "titan_rl.diagnostics.bench.weights.deepseek_plan"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | deepseek_plan.ENVIRONMENT)
    if done.returncode:
        raise RuntimeError(f"planning for DeepSeek-V3 failed:\n{done.stderr[-4000:]}")
    plan = json.loads(done.stdout.splitlines()[-1])
    return [
        row("DeepSeek-V3 plan, EP64 x PP8 to TP64: time to build on one core", plan["seconds"], "s", 60.0),
        row("  peak memory of building it", plan["peak_gib"], "GiB", 4.0),
        row("  bytes sent by a trainer rank, largest over even", plan["sent_max_over_mean"], "ratio", 1.1),
        row("  bytes received by a generator rank, largest over even", plan["received_max_over_mean"], "ratio", 1.1),
        row(
            "  predicted transfer",
            plan["predicted_seconds"],
            "s",
            link_bytes_per_second=deepseek_plan.NETWORK_BYTES_PER_SECOND,
            seconds_a_read=deepseek_plan.READ_SECONDS,
            compare=_PUBLISHED,
            **{name: plan[name] for name in ("gigabytes_in_all", "gigabytes_received_each", "reads_each")},
        ),
    ]

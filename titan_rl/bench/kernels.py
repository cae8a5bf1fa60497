"""The kernels' references on this machine's CPU: linear_logprob against logits in full, alone and in a trainer step.

The step needs ``--model.path DIR`` (SmolLM2-135M). Every figure comes from fresh processes, in turn, in the trainer
actor's environment. What a GPU does is measured by ``python kernels/bench.py``, which needs no titan_rl.
"""

import json
import os
import statistics
import subprocess
import sys
from typing import Any

from titan_rl.bench.harness import row
from titan_rl.config import load_config
from titan_rl.mesh.placement import available_cores, share_cores, trainer_environment

_ROUNDS = {"head": 3, "step": 2}


def run(overrides: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    path = load_config(None, overrides).model.path
    rows = _head_rows()
    if path != "tiny":
        for checkpointing in ("none", "full"):
            rows += _step_rows(path, checkpointing)
    return rows


def _head_rows() -> list[dict[str, Any]]:
    """Against both forms of logits in full, so that no choice of what is naive decides."""
    found = _measure("head", ("kernel", "plain", "in_full"))
    kernel, rows = found["kernel"], []
    for form, name in (("plain", "log_softmax of all logits"), ("in_full", "all logits, token_statistics")):
        other = found[form]
        memory, time = (kernel[key] / other[key] for key in ("extra_mib", "seconds"))
        rows += [
            row(f"linear_logprob over {name}: peak extra memory", memory, "ratio", 0.15, **_both("mib", kernel, other)),
            row(f"linear_logprob over {name}: time", time, "ratio", 1.25, **_both("seconds", kernel, other)),
        ]
    return rows


def _step_rows(path: str, checkpointing: str) -> list[dict[str, Any]]:
    """Without activation checkpointing, other activations are most of a step's memory, and no head changes those."""
    found = _measure("step", ("kernel", "in_full"), path, checkpointing)
    kernel, other = found["kernel"], found["in_full"]
    time, extra, whole = (kernel[key] / other[key] for key in ("seconds", "extra_mib", "peak_mib"))
    return [
        row(
            f"trainer step with it over logits in full, activation checkpointing {checkpointing}: time",
            *(time, "ratio", 1.1),
            **_both("seconds", kernel, other),
        ),
        row("  less peak memory of the step", 1 - extra, "ratio", 0.4, at_most=False, **_both("mib", kernel, other)),
        row("  less peak memory of the process, weights and optimizer included", 1 - whole, "ratio"),
    ]


def _both(unit: str, kernel: dict, other: dict) -> dict[str, float]:
    key = {"mib": "extra_mib", "seconds": "seconds"}[unit]
    return {f"{unit}_with": kernel[key], f"{unit}_without": other[key]}


def _measure(what: str, forms: tuple[str, ...], *arguments: str) -> dict[str, dict[str, float]]:
    """Medians over rounds, in which the forms take turns."""
    rounds = {form: [] for form in forms}
    for _ in range(_ROUNDS[what]):
        for form in forms:
            rounds[form].append(_fresh(what, form, *arguments))
    return {
        form: {
            "seconds": statistics.median(second for result in results for second in result["seconds"]),
            "extra_mib": statistics.median(result["peak_mib"] - result["before_mib"] for result in results),
            "peak_mib": statistics.median(result["peak_mib"] for result in results),
        }
        for form, results in rounds.items()
    }


def _fresh(what: str, form: str, *arguments: str) -> dict[str, Any]:
    cores = share_cores(available_cores(), 1, 1, alternating=True)
    command = [sys.executable, "-m", "titan_rl.bench.kernel_forms", what, form, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | trainer_environment(cores))
    if done.returncode:
        raise RuntimeError(f"{what} as {form} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])

"""The kernels' references on this machine's CPU: linear_logprob against all logits, alone and in a trainer step.

The step needs ``--model.path DIR`` (SmolLM2-135M). Every figure comes from fresh processes, in alternating rounds, with
the trainer actor's environment; a ratio is the median over the rounds. ``python kernels/bench.py`` measures a GPU, and
needs no titan_rl.
"""

import json
import os
import statistics
import subprocess
import sys
from typing import Any

from titan_rl.config.load import load_config
from titan_rl.diagnostics.bench.harness import row
from titan_rl.mesh.resources.cores import available_cores, share_cores, trainer_environment

_ROUNDS = {"head": 3, "step": 2}
_BARS = {"head": {"seconds": 1.25, "mib": 0.15}, "step": {"seconds": 1.1, "mib": 0.6}}
"""Upper limits, as a share of the naive form's."""
_NAIVE = {"naive": "log_softmax of all logits"}
_OTHERS = {
    "head": _NAIVE
    | {
        "by_hand": "all logits, softmax and gradient by hand in one buffer",
        "again": "itself without an expected gradient",
    },
    "step": _NAIVE,
}
_MEANINGS = {
    "seconds": "time",
    "processor_seconds": "processor time",
    "mib": "peak extra memory",
    "peak_mib": "peak memory of the process",
}


def run(overrides: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    path = load_config(None, overrides).model.path
    rows = _rows("head", "linear_logprob")
    if path != "tiny":
        for checkpointing in ("none", "full"):
            name = f"trainer step with it, activation checkpointing {checkpointing},"
            rows += _rows("step", name, path, checkpointing)
    return rows


def _rows(what: str, name: str, *arguments: str) -> list[dict[str, Any]]:
    """Against forms that compute all logits; the bars apply to the naive one."""
    rounds = [
        {form: _fresh(what, form, *arguments) for form in ("kernel", *_OTHERS[what])} for _ in range(_ROUNDS[what])
    ]
    return [
        _ratio(f"{name} over {words}: {meaning}", key, rounds, form, _BARS[what].get(key) if form == "naive" else None)
        for form, words in _OTHERS[what].items()
        for key, meaning in _MEANINGS.items()
    ]


def _ratio(name: str, key: str, rounds: list[dict], other: str, bar: float | None) -> dict[str, Any]:
    """The median ratio of measurements of the same round, since other work shares the machine."""
    ratio = statistics.median(forms["kernel"][key] / forms[other][key] for forms in rounds)
    with_it, without = (statistics.median(forms[form][key] for forms in rounds) for form in ("kernel", other))
    return row(name, ratio, "ratio", bar, **{f"{key}_with": with_it, f"{key}_without": without})


def _fresh(what: str, form: str, *arguments: str) -> dict[str, float]:
    cores = share_cores(available_cores(), 1, 1, alternating=True)
    command = [sys.executable, "-m", "titan_rl.diagnostics.bench.models.kernel_forms", what, form, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | trainer_environment(cores))
    if done.returncode:
        raise RuntimeError(f"{what} as {form} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])

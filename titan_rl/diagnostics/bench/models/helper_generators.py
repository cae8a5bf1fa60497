"""What helper generators save of a step in which the trainer waits for answers, at staleness 1, in pairs.

An engine takes few requests at once, as one does whose KV cache holds no more, so that groups wait for it. The model
has learned nothing, and writes as much as it may; ``--model.path DIR`` takes another, with a table such as
``--generator.dtype bfloat16 --training.mixed_precision_param bfloat16``.
"""

import statistics
from typing import Any

from titan_rl.diagnostics.bench.harness import row
from titan_rl.diagnostics.bench.train_for_bench import BenchRun, train_for_bench

_ORDERS = ((0, 1), (1, 0))
"""Numbers of helpers, run by run."""
_FIXED = {
    "rollout": {"prompts_per_step": 4, "group_size": 8, "max_new_tokens": 96, "max_staleness": 1},
    "generator": {"max_num_seqs": 16},
    "training": {"steps": 6, "seq_len": 512},
    "sft": {"steps": 0},
    "eval": {"prompts": 1},
    "recovery": {"standby": False},
}


def run(overrides: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    runs = [{helpers: _train(helpers, overrides) for helpers in order} for order in _ORDERS]
    rows = []
    for phase in ("step", "wait"):
        for helpers, name in enumerate(("without", "with one")):
            seconds = [pair[helpers].seconds[phase] for pair in runs]
            rows.append(row(f"{phase} {name}", statistics.median(seconds), "s", rounds=seconds))
    ratios = [pair[1].seconds["step"] / pair[0].seconds["step"] for pair in runs]
    return [*rows, row("step with one helper over a step without", statistics.median(ratios), "", rounds=ratios)]


def _train(helpers: int, overrides: dict[str, dict[str, Any]]) -> BenchRun:
    return train_for_bench("grpo_tiny", _FIXED | {"placement": {"helper_generators": helpers}}, overrides)

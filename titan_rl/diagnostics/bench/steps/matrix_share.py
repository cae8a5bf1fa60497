"""Training's share of what the machine multiplies in a second: forward and backward of a run's own rows."""

import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from titan_rl.data.numbers import all_equal
from titan_rl.data.types import Group
from titan_rl.diagnostics.bench.harness import row
from titan_rl.records.steps.rollouts import read_rollouts

_BAR = 0.6
_SMALL, _LARGE, _LONGEST_SECONDS = 512, 4096, 10.0


def matrix_rates() -> dict[torch.dtype, float]:
    """Operations a second of a large product. The larger one counts: fp32 makes bf16's products, too."""
    return {dtype: _matrix_rate(dtype) for dtype in (torch.bfloat16, torch.float32)}


def training_share(run: Path, records: list[dict[str, Any]], rate: float) -> float:
    """Share of ``rate`` in the training of a finished run's recorded steps."""
    model = json.loads((run / "config.json").read_text())["model"]["path"]
    steps = (read_rollouts(run / "rollouts", record["step"]) for record in records)
    operations = statistics.mean(_operations(groups, model) for groups in steps)
    return operations / statistics.median(record["seconds_forward_backward"] for record in records) / rate


def share_rows(share: float, rates: dict[torch.dtype, float]) -> list[dict[str, Any]]:
    """Rows of the bench for the share. ``rates``: of ``matrix_rates``."""
    return [
        row("training's share of the matrix rate", share, "ratio", _BAR, at_most=False),
        *(row(f"matrix rate in {str(dtype)[6:]}", rate / 1e9, "GFLOP/s") for dtype, rate in rates.items()),
    ]


def _operations(groups: list[Group], model: str) -> float:
    """Of forward and backward, by the weights' products alone: 6 a weight and token (arXiv 2001.08361, table 1), 2 of a
    group whose rewards are equal, which has no backward.

    A prompt's tokens count once a group, and only answers' tokens have logits.
    """
    hf = json.loads((Path(model) / "config.json").read_text())
    hidden, kv = hf["hidden_size"], hf["num_key_value_heads"] / hf["num_attention_heads"]
    layer = hidden**2 * (2 + 2 * kv) + 3 * hidden * hf["intermediate_size"]
    total = 0.0
    for group in groups:
        prompt = group.rollouts[0].turns[0].start
        answers = sum(len(rollout.tokens) - prompt for rollout in group.rollouts)
        passes = 2 if all_equal(rollout.reward for rollout in group.rollouts) else 6
        total += passes * (layer * hf["num_hidden_layers"] * (prompt + answers) + hidden * hf["vocab_size"] * answers)
    return total


def _matrix_rate(dtype: torch.dtype) -> float:
    """Of a large product, or of a small one where a CPU has no units for ``dtype`` and would take minutes."""
    rate = _rate_at(dtype, _SMALL)
    return _rate_at(dtype, _LARGE) if 2 * _LARGE**3 / rate < _LONGEST_SECONDS else rate


def _rate_at(dtype: torch.dtype, size: int) -> float:
    a, b = (torch.randn(size, size, dtype=dtype) for _ in range(2))
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        torch.mm(a, b)
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / statistics.median(seconds[1:])

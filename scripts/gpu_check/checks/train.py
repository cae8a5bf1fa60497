"""A model is built and trained: tokens a second, the share of the device's matrix rate, the most memory."""

import math
from typing import Any

import torch

from gpu_check.bench import mib
from gpu_check.fixtures import Fixtures
from gpu_check.sizes import STEP, operations
from titan_rl.config.load import ConfigError


def check(fixtures: Fixtures, *, size: str, dtype: str, compiles: bool = False) -> dict[str, Any]:
    bench, losses = fixtures.bench, []
    built = bench.once(lambda: fixtures.model(size))
    try:
        trainer = fixtures.trainer(size, fixtures.config(dtype, compile={"enable": compiles}))
    except ConfigError as error:  # as for what is compiled on a CPU
        return {"loss_is_finite": True, "why_not": str(error)}
    batches = iter([fixtures.rows(size, STEP, seed) for seed in range(6)])

    def step() -> None:
        losses.append(fixtures.step(trainer, next(batches)).loss)

    first = bench.once(step)
    seconds = bench.seconds(step, repeats=3, warm=1)
    rows = next(batches)
    peak = bench.peak(lambda: losses.append(fixtures.step(trainer, rows).loss))
    tokens, rate = sum(len(row.tokens_T) for row in rows), bench.matrix_rate(getattr(torch, dtype))
    return {
        "loss_is_finite": all(map(math.isfinite, losses)),
        "share_of_matrix_rate": operations(fixtures.size(size), rows) / seconds / rate,
        "tokens_per_second": tokens / seconds,
        "seconds": seconds,
        "seconds_first": first,
        "seconds_model_made": built,
        "tokens": tokens,
        "rows": len(rows),
        "peak_mib": mib(peak),
        "matrix_tflops": rate / 1e12,
        "attention": getattr(trainer.learner.policy, "attention_form", "blocks"),
        "kernel": trainer.learner.policy.implementation,
    }

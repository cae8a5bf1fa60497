"""``[debug] deterministic``: the same rows twice come to the same bits; and what that costs."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from gpu_check.fixtures import DirectTrainer, Fixtures
from gpu_check.sizes import STEP
from titan_rl.data.types import Row


def gradient(trainer: DirectTrainer, rows: list[Row]) -> torch.Tensor:
    """Gradient of all parameters, flat, in fp32, on the host."""
    learner = trainer.learner
    learner.optimizer.zero_grad()
    learner.forward_backward(rows)
    flat = [_full_tensor(parameter.grad).flatten().float().cpu() for parameter in learner.model_parts[0].parameters()]
    learner.optimizer.zero_grad()
    return torch.cat(flat)


def _full_tensor(gradient: torch.Tensor | None) -> torch.Tensor:
    assert isinstance(gradient, DTensor), "FSDP shards every parameter, and each takes part"
    return gradient.full_tensor()


def check(fixtures: Fixtures) -> dict[str, Any]:
    rows, figures = fixtures.rows("135m", STEP), {}
    for deterministic in (True, False):  # cuBLAS hears of it before its first product, or not at all
        trainer = fixtures.trainer("135m", fixtures.config(debug={"deterministic": deterministic}))
        first, second = gradient(trainer, rows), gradient(trainer, rows)
        name = "deterministic" if deterministic else "plain"
        figures[f"seconds_{name}"] = fixtures.bench.seconds(
            lambda trainer=trainer: trainer.learner.forward_backward(rows)
        )
        figures["same_bits" if deterministic else "same_bits_plain"] = bool(torch.equal(first, second))
        fixtures.clear()
    return figures | {"costs": figures["seconds_deterministic"] / figures["seconds_plain"]}

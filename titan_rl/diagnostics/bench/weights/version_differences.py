"""Bytes of a version as a difference over those of the whole, by the learning rate.

AdamW steps on random rewards of random tokens; generators store bfloat16. SmolLM2 where it is given
(``--model.path``), else the built-in tiny model, whose initial weights are larger than a trained model's.
"""

import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from titan_rl.config.load import load_config
from titan_rl.data.nonfinite import NonfiniteBatch
from titan_rl.diagnostics.bench.harness import row
from titan_rl.diagnostics.bench.weights.weight_pairs import batch_of, guess
from titan_rl.mesh.channel.plan import BLOCK_BYTES
from titan_rl.mesh.channel.tcp.differences import difference
from titan_rl.trainer.step.learner import Learner
from titan_rl.trainer.titan_config import build_titan

_RATES = (1e-6, 3e-6, 1e-5, 3e-5)
_STEPS, _GROUPS, _SEQ_LEN = 8, 8, 256
_BAR = 0.25
"""Of a whole version, at learning rates that people use."""


def run(overrides: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    from titan_rl.models.builtin.tiny import make_tiny

    store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage] - public, but torch does not export it
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    with tempfile.TemporaryDirectory(prefix="titan_rl_bench_") as folder:
        path = overrides.get("model", {}).get("path", "")
        if not path:
            path = str(Path(folder) / "model")
            make_tiny(Path(path), seed=1)
        return [_measured(path, rate, overrides) for rate in _RATES]


def _measured(path: str, rate: float, overrides: dict[str, dict[str, Any]]) -> dict[str, Any]:
    tables = {"training": {"seq_len": _SEQ_LEN, "steps": 1000}, "optimizer": {"lr": rate}}
    tables["lr_scheduler"] = {"warmup_steps": 0, "decay_ratio": 0.0}
    config = load_config(None, {**tables, **overrides, "model": {"path": path}})
    titan = build_titan(config)
    learner, random, shares = Learner(config, titan, path), np.random.default_rng(0), []
    before = _stored(learner)
    for _ in range(_STEPS):
        batch = batch_of([guess(random) for _ in range(_GROUPS)], titan, random)
        assert not isinstance(learner.train(batch.rows[0], True), NonfiniteBatch)
        after = _stored(learner)
        shares.append(sum(_sizes(before, after)) / len(after))
        before = after
    name = f"bytes of a difference over those of the whole, learning rate {rate:g}"
    return row(name, round(statistics.median(shares), 4), "ratio", _BAR, steps=_STEPS)


def _stored(learner: Learner) -> memoryview:
    """Weights as generators store them, one behind the other."""
    tensors = [shard.tensor.to(torch.bfloat16).view(torch.int16).flatten() for shard in learner.shards()]
    return torch.cat(tensors).numpy().data.cast("B")


def _sizes(before: memoryview, after: memoryview) -> Iterator[int]:
    """Bytes that each block is sent as."""
    for start in range(0, len(after), BLOCK_BYTES):
        old, new = (each[start : start + BLOCK_BYTES] for each in (before, after))
        changes = difference(old, new)
        yield len(new) if changes is None else len(changes)

"""Meshes of real actors, started for a test."""

import asyncio
import math
from contextlib import asynccontextmanager

import numpy as np

from titan_rl.config.load import load_config
from titan_rl.controller.wiring import make_meshes
from titan_rl.data.types import Request
from titan_rl.diagnostics.bench.weights.weight_pairs import batch_of, guess
from titan_rl.mesh.meshes import MeshCallbacks, Meshes
from titan_rl.trainer.titan_config import build_titan

BOTH = frozenset({"trainer", "generators"})


@asynccontextmanager
async def meshes_of(model: str, logs, parts=BOTH, say=print, **tables):
    tables = {
        "training": {"seq_len": 256, "steps": 1000},
        "optimizer": {"lr": 3e-2},
        "mesh": {"step_timeout": 60.0},
        "rollout": {"max_new_tokens": 128},
        "recovery": {"snapshot_every": 0},
        **tables,
    }
    tables["generator"] = {"kv_cache_gib": 0.1, **tables.get("generator", {})}
    config = load_config(None, tables)
    meshes = make_meshes(config, build_titan(config), model, parts=parts, logs=logs, callbacks=MeshCallbacks(log=say))
    try:
        await meshes.start()
        yield meshes
    finally:
        await meshes.stop()


def pid_of(meshes: Meshes, name: str) -> int:
    return next(pid for pid, known in meshes.pids.items() if known == name)


async def learn(meshes: Meshes, seed: int) -> None:
    """Move the weights a good way."""
    random = np.random.default_rng(seed)
    await meshes.trainer.train([batch_of([guess(random) for _ in range(4)], build_titan(meshes.config), random)], 1)


def ask(meshes: Meshes, seeds: list[int], num_tokens: int, replica: int = 0) -> asyncio.Future:
    # two whole blocks of the cache are shared
    request = Request(np.arange(10, 90, dtype=np.int32), seeds, num_tokens, 1.0)

    async def call():
        return request.tokens, await meshes.generators.replicas[replica].leader.generate.call_one(request)

    return asyncio.ensure_future(call())


async def worst_difference(meshes: Meshes, *groups) -> float:
    """Of any token's log-probability, between the trainer as it is and the generator when it sampled."""
    [metrics] = await meshes.trainer.train([batch_of(list(groups), build_titan(meshes.config), None)], 1)
    return math.log(metrics.agreement_max)

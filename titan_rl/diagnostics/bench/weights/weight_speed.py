"""What a weight update costs on one host: each way in turn, so that the machine's drift hits all alike.

Transport over RDMABuffer is measured on TCP, which any machine has.
"""

import asyncio
import pickle
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np
import torch
from monarch.actor import this_host

from titan_rl.actors.role import Role
from titan_rl.actors.verifier import Verifier
from titan_rl.config.load import load_config
from titan_rl.config.sections.schema import Config
from titan_rl.controller.wiring import make_meshes
from titan_rl.data.types import Batch
from titan_rl.diagnostics.bench.harness import row
from titan_rl.diagnostics.bench.weights import weight_pairs
from titan_rl.diagnostics.bench.weights.weight_actors import BenchGenerator, BenchTrainer, PlainActor
from titan_rl.mesh.members.endpoints import GeneratorEndpoints
from titan_rl.mesh.meshes import ActorClasses, Meshes
from titan_rl.mesh.supervision import calls as mesh_calls
from titan_rl.mesh.supervision.actor_process import ActorProcess
from titan_rl.mesh.supervision.calls import call_each
from titan_rl.mesh.supervision.remote_call import RemoteCall
from titan_rl.train import drive
from titan_rl.trainer.titan_config import build_titan

T = TypeVar("T")
_ROUNDS = 9
_SLOW_ROUNDS = 5
_STEP_ROUNDS = 21
"""Of the ways that take seconds."""
_BAR_MEMCPY, _BAR_UPDATE, _BAR_RDMA, _BAR_ARGUMENTS = 1.3, 1.15, 5.0, 20.0
_PARTS = frozenset({"trainer", "generators"})
BENCH_ACTORS = ActorClasses(BenchTrainer, BenchGenerator, Verifier, Role)

_Measurement = Callable[[Meshes], Awaitable[list[dict[str, Any]]]]


def run(overrides: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """On the model of ``--model.path``, or a tiny one, whose figures say little."""
    tables = {
        "training": {"seq_len": 512, "steps": 1000},
        "optimizer": {"lr": 1e-6},
        "generator": {"dtype": "bfloat16", "kv_cache_gib": 0.2},
        "recovery": {"snapshot_every": 0},
    }
    for section, values in overrides.items():
        tables[section] = tables.get(section, {}) | values
    config = load_config(None, tables)
    # trainer and generator share the cores there, each working beside the other
    asynchronous = load_config(None, tables | {"rollout": {"max_staleness": 1}})
    with tempfile.TemporaryDirectory(prefix="titan_rl_bench_") as folder:
        path = config.model.path
        if path == "tiny":
            from titan_rl.models.builtin.tiny import make_tiny

            path = str(Path(folder) / "tiny")
            make_tiny(path, seed=1)
        rows = drive(_measure(_time_all, config, path, Path(folder)))
        rows += drive(_measure(_lost_time, asynchronous, path, Path(folder)))
        messages = [drive(_messages(num_layers, Path(folder))) for num_layers in (2, 4)]
    return [*rows, *_message_rows(messages)]


async def _measure(measure: _Measurement, config: Config, path: str, logs: Path) -> list[dict[str, Any]]:
    meshes = make_meshes(config, build_titan(config), path, actors=BENCH_ACTORS, parts=_PARTS, logs=logs)
    try:
        await meshes.start()
        return await measure(meshes)
    finally:
        await meshes.stop()


async def _time_all(meshes: Meshes) -> list[dict[str, Any]]:
    trainer, generator = meshes.trainers.ranks[0].actor, meshes.generators.replicas[0].leader
    plain = this_host().spawn_procs(name="plain").spawn("plain", PlainActor)
    timings: dict[str, list[float]] = {}

    def record(name: str, seconds: float) -> None:
        timings.setdefault(name, []).append(seconds)

    version = await _warm(meshes)
    for _ in range(_ROUNDS):
        version += 1
        start = time.perf_counter()
        await meshes.weights.stage(version)
        await trainer.wait_for_stamp.call_one()
        record("publish", time.perf_counter() - start)
        record("memcpy", await generator.memcpy_seconds.call_one(3))
        record("fetch", await generator.fetch_seconds.call_one(version, 3))
        record("load_weights", await generator.load_weights_seconds.call_one())
        start = time.perf_counter()
        await meshes.weights.announce(version)
        record("update", time.perf_counter() - start)
        record("cast and copy", await trainer.cast_and_copy.call_one(3))
    buffers = await trainer.tensor_buffers.call_one()
    tensors = {name: torch.zeros(nbytes, dtype=torch.uint8) for name, (_, nbytes) in buffers.items()}
    for _ in range(_SLOW_ROUNDS):
        record("rdma", await generator.read_tensors.call_one(buffers))
        for name, receiver in (("arguments", plain), ("arguments, into memory that is kept", generator)):
            copies = {key: tensor.clone() for key, tensor in tensors.items()}
            start = time.perf_counter()
            await receiver.take_tensors.call_one(copies)
            record(name, time.perf_counter() - start)
        record("arguments, from the trainer", await trainer.send_tensors.call_one(generator))
    middle = {name: statistics.median(seconds) for name, seconds in timings.items()}
    _, nbytes, _ = await GeneratorEndpoints.account().at(generator)

    def ratio(over: str, *under: str) -> float:
        pairs = zip(timings[over], *(timings[name] for name in under), strict=True)
        return statistics.median(first / sum(rest) for first, *rest in pairs)

    return [
        row("transfer over memcpy of the same bytes", ratio("fetch", "memcpy"), "ratio", _BAR_MEMCPY, nbytes=nbytes),
        row("update over transfer and load_weights", ratio("update", "fetch", "load_weights"), "ratio", _BAR_UPDATE),
        row("RDMABuffers over transfer", middle["rdma"] / middle["fetch"], "ratio", _BAR_RDMA, at_most=False),
        row("arguments over transfer", middle["arguments"] / middle["fetch"], "ratio", _BAR_ARGUMENTS, at_most=False),
        *(row(f"  {name}", seconds, "s") for name, seconds in middle.items()),
    ]


async def _warm(meshes: Meshes) -> int:
    """Both slots and all buffers have been touched, and the trainer has taken a step."""
    await meshes.trainer.train([_batch(meshes)], 1)
    last = 3
    for version in range(last + 1):
        await meshes.weights.stage(version)
        await meshes.weights.announce(version)
    return last


def _batch(meshes: Meshes) -> Batch:
    random = np.random.default_rng(0)
    return weight_pairs.batch_of([weight_pairs.guess(random) for _ in range(4)], build_titan(meshes.config), random)


async def _lost_time(meshes: Meshes) -> list[dict[str, Any]]:
    """Steps with a sync under way against steps without, in turn."""
    version, batch, quiet, busy = await _warm(meshes), _batch(meshes), [], []
    for _ in range(_STEP_ROUNDS):
        start = time.perf_counter()
        await meshes.trainer.train([batch], 1)
        quiet.append(time.perf_counter() - start)
        version += 1
        start = time.perf_counter()
        await meshes.weights.stage(version)
        delivery = asyncio.create_task(meshes.weights.announce(version))
        await meshes.trainer.train([batch], 1)
        busy.append(time.perf_counter() - start)
        await delivery
    lost = statistics.median(b - q for b, q in zip(busy, quiet, strict=True))
    alone = await meshes.trainers.ranks[0].actor.cast_and_copy.call_one(_ROUNDS)
    return [
        row("trainer time lost to a sync", lost, "s", alone, step=statistics.median(quiet)),
        row("  steps without a sync, quartiles apart", _spread(quiet), "s"),
    ]


def _spread(seconds: list[float]) -> float:
    first, _, last = statistics.quantiles(seconds, n=4)
    return last - first


async def _messages(num_layers: int, folder: Path) -> tuple[int, int]:
    """Calls, and bytes of their arguments, of one sync of a model of so many layers."""
    from titan_rl.models.builtin.tiny import make_tiny

    path = folder / f"layers{num_layers}"
    make_tiny(path, seed=1, num_layers=num_layers, hidden_size=64)
    config = load_config(None, {"generator": {"kv_cache_gib": 0.1}, "parallelism": {"data_parallel_shard_degree": 2}})
    meshes = make_meshes(config, build_titan(config), str(path), parts=_PARTS, logs=folder)
    sizes = []

    async def counted(calls: Sequence[tuple[ActorProcess, RemoteCall[T]]], **limits: Any) -> list[T]:
        sizes.extend(len(pickle.dumps(request.arguments)) for _, request in calls)
        return await call_each(calls, **limits)

    try:
        await meshes.start()
        with patch.object(mesh_calls, "call_each", counted):
            await meshes.weights.stage(0)
            await meshes.weights.announce(0)
    finally:
        await meshes.stop()
    return len(sizes), sum(sizes)


def _message_rows(shallow_and_deep: list[tuple[int, int]]) -> list[dict[str, Any]]:
    (shallow, shallow_bytes), (deep, deep_bytes) = shallow_and_deep
    return [
        row("control messages of a sync, twice the layers over once", deep / shallow, "ratio", 1.0, messages=deep),
        row("  bytes of their arguments, likewise", deep_bytes / shallow_bytes, "ratio", 1.0, nbytes=deep_bytes),
    ]

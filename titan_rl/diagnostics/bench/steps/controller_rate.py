"""Samples a second that one controller process feeds, where sampling costs nothing.

Everything of a step is real but the engine, the scorer and the trainer: prompts are drawn and issued in the ledger,
each group is asked of a verifier's process and comes back as a message, rollouts go to Parquet, samples into rows, and
their ends into the ledger.
"""

import asyncio
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from titan_rl.algorithms.batches.batching import step_batches
from titan_rl.config.load import load_config
from titan_rl.config.sections.schema import Config
from titan_rl.controller.loop.admission import Admission
from titan_rl.controller.loop.rollout_queue import RolloutQueue
from titan_rl.controller.preflight.checks import Checked, resolve
from titan_rl.diagnostics.bench.harness import row
from titan_rl.diagnostics.bench.steps.instant_verifier import InstantVerifier
from titan_rl.environments.prompts.stream import PromptStream
from titan_rl.mesh.control.dispatcher import Dispatcher
from titan_rl.mesh.control.generators import Generators
from titan_rl.mesh.control.weight_sync import WeightSync
from titan_rl.mesh.members.replica import Replica
from titan_rl.mesh.members.router import Router
from titan_rl.mesh.members.verifiers import Verifiers
from titan_rl.mesh.supervision.actor_process import ActorProcess
from titan_rl.records.ledger.ledger import Ledger
from titan_rl.records.metrics import sampling_metrics
from titan_rl.records.steps.rollouts import write_rollouts
from titan_rl.train import drive, relieve_collector

_PROMPTS, _GROUP_SIZE = (16, 64, 256, 1024, 8192), 8
_LEAST_SAMPLES = 16_384
"""For which steps are made again."""
_BAR_RATE, _BAR_GROWTH = 5000.0, 1.25


def run(overrides: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    rates = drive(_measure(overrides))
    rows = [
        row(
            f"{count * _GROUP_SIZE} samples a step",
            rate,
            "samples/s",
            _BAR_RATE,
            at_most=False,
            microseconds_by_part=parts,
        )
        for count, (rate, parts) in rates.items()
    ]
    first, last = (rates[count][0] for count in (_PROMPTS[0], _PROMPTS[-1]))
    return [*rows, row("cost of a sample, largest step over smallest", first / last, "ratio", _BAR_GROWTH)]


async def _measure(overrides: dict[str, dict[str, Any]]) -> dict[int, tuple[float, dict[str, float]]]:
    from monarch.actor import this_host

    procs = this_host().spawn_procs(per_host={"ranks": 1}, name="verifier")
    try:
        actor, unused = procs.spawn("verifier", InstantVerifier), cast(Any, None)
        verifier = ActorProcess("verifier 0", procs, actor, sidecar=unused, host=unused)
        rates = {}
        relieve_collector()
        for count in _PROMPTS:
            rollout = {"prompts_per_step": count, "group_size": _GROUP_SIZE, "max_staleness": 0}
            config = load_config(None, overrides | {"rollout": overrides.get("rollout", {}) | rollout})
            with tempfile.TemporaryDirectory(prefix="titan_rl_bench_") as folder:
                rates[count] = await _rate(resolve(config), verifier, Path(folder))
        return rates
    finally:
        await procs.stop()


async def _rate(checked: Checked, verifier: ActorProcess, folder: Path) -> tuple[float, dict[str, float]]:
    """Samples a second, and microseconds of a sample's parts: medians of the steps behind the first."""
    config = checked.config
    ledger, stream = Ledger(folder / "ledger.db"), PromptStream(checked.task, config.run.seed)
    admission = Admission(config.rollout.prompts_per_step, 0)
    weights = cast(WeightSync, SimpleNamespace(pending=None))  # a queue asks no more of it
    queue = RolloutQueue(
        *(config, stream, ledger, _dispatcher(config, verifier), admission, weights),
        max_tokens=checked.titan.training.seq_len,
        on_score_failed=lambda *_: None,
    )
    size = config.rollout.prompts_per_step * _GROUP_SIZE
    parts: dict[str, list[float]] = {"collect": [], "write and pack": [], "settle": []}
    for step in range(1, 2 + max(3, _LEAST_SAMPLES // size)):
        begun = time.perf_counter()
        admission.advance(step - 1)
        groups = (await queue.collect()).groups
        collected = time.perf_counter()
        writing = asyncio.create_task(asyncio.to_thread(write_rollouts, folder, step, groups))
        step_batches(groups, checked.algorithm, config, checked.titan.layout)
        await writing
        packed = time.perf_counter()
        queue.settle(groups, [], step)
        sampling_metrics(groups, step - 1)
        moments = (begun, collected, packed, time.perf_counter())
        for of_part, (first, last) in zip(parts.values(), pairwise(moments), strict=True):
            of_part.append((last - first) / size)
    queue.cancel()
    of_sample = {part: statistics.median(seconds[1:]) for part, seconds in parts.items()}
    return 1 / sum(of_sample.values()), {part: 1e6 * seconds for part, seconds in of_sample.items()}


def _dispatcher(config: Config, verifier: ActorProcess) -> Dispatcher:
    replica = Replica(0, [verifier])  # its leader is only passed on
    generators = SimpleNamespace(router=Router("generator", [0]), replicas={0: replica})
    verifiers = SimpleNamespace(
        router=Router("verifier", [0]), procs={0: verifier}, note_scoring=lambda name, seconds: None
    )
    # a dispatcher asks no more of either
    return Dispatcher(config, cast(Generators, generators), cast(Verifiers, verifiers), on_retry=lambda name: None)

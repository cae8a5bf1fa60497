"""Every trainer layout to every generator layout: right after a sync both sides must give a token the same probability.

A small untied Qwen3 in fp32, whose heads divide. Each trainer takes a step first, so its weights are not the file's.
"""

import asyncio
import math
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from titan_rl.config.load import load_config
from titan_rl.config.sections.schema import Config
from titan_rl.controller.wiring import make_meshes
from titan_rl.data.batches.packing import pack, token_weights
from titan_rl.data.storage.sampling_mask import joined
from titan_rl.data.types import Batch, Completion, Provenance, Sample, StepMetrics
from titan_rl.diagnostics.bench.harness import row
from titan_rl.mesh.members.endpoints import GeneratorEndpoints
from titan_rl.mesh.members.replica import Replica
from titan_rl.mesh.meshes import Meshes
from titan_rl.mesh.weights.channel_link import WeightLink
from titan_rl.train import drive
from titan_rl.trainer.titan_config import TitanConfig, build_titan

TRAINERS: dict[str, dict[str, int]] = {
    "1": {},
    "dp2": {"data_parallel_shard_degree": 2},
    "tp2": {"tensor_parallel_degree": 2},
    "pp2": {"pipeline_parallel_degree": 2},
    "dp2 x tp2": {"data_parallel_shard_degree": 2, "tensor_parallel_degree": 2},
}
GENERATORS: dict[str, dict[str, int]] = {"tp1": {}, "tp2": {"tensor_parallel": 2}, "2 replicas": {"replicas": 2}}
Answered = tuple[np.ndarray, list[Completion]]
"""Tokens of a prompt, and its completions."""
_BAR_LOGPROB = 1e-4
_MAX_LEN, _NEW_TOKENS, _PROMPTS, _SAMPLES = 64, 16, 4, 4


def run(overrides: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    from titan_rl.models.builtin.tiny import make_tiny

    with tempfile.TemporaryDirectory(prefix="titan_rl_bench_") as folder:
        path = Path(folder) / "model"
        make_tiny(path, seed=1, architecture="qwen3", tie_word_embeddings=False)
        rows = [
            result for name in GENERATORS for result in drive(_one_generator(name, str(path), Path(folder), overrides))
        ]
    redundancy = max(result["bytes_read_over_stored"] for result in rows)
    return [*rows, row("bytes read over bytes stored, worst pair", round(redundancy, 4), "ratio", 1.0)]


def _configs(trainer: str, generator: str, overrides: dict[str, Any]) -> tuple[Config, TitanConfig]:
    tables = {
        "training": {"seq_len": _MAX_LEN, "steps": 10},
        "optimizer": {"lr": 1e-2},
        "parallelism": TRAINERS[trainer],
        "generator": {"kv_cache_gib": 0.1, **GENERATORS[generator]},
        "rollout": {"max_new_tokens": _NEW_TOKENS},
        "recovery": {"snapshot_every": 0},
    }
    config = load_config(None, tables | {key: overrides[key] for key in overrides if key == "mesh"})
    return config, build_titan(config)


async def _one_generator(name: str, path: str, logs: Path, overrides: dict[str, Any]) -> list[dict[str, Any]]:
    """Generators stay up while one trainer after the other feeds them."""
    generators = make_meshes(*_configs("1", name, overrides), path, parts=frozenset({"generators"}), logs=logs)
    rows = []
    try:
        await generators.start()
        for version, trainer in enumerate(TRAINERS):
            config, titan = _configs(trainer, name, overrides)
            trainers = make_meshes(config, titan, path, parts=frozenset({"trainer"}), logs=logs)
            try:
                await trainers.start()
                rows.append(await _one_pair(trainer, name, trainers, generators, config, titan, version))
            finally:
                await trainers.stop()
    finally:
        await generators.stop()
    return rows


async def _one_pair(
    trainer: str,
    generator: str,
    trainers: Meshes,
    generators: Meshes,
    config: Config,
    titan: TitanConfig,
    version: int,
) -> dict[str, Any]:
    replicas = list(generators.generators.replicas.values())
    link = WeightLink(trainers.trainers, config.mesh.transport, config.mesh.step_timeout)
    await link.connect(replicas)
    random = np.random.default_rng(version)
    await trainers.trainer.train([batch_of([guess(random) for _ in range(_PROMPTS)], titan, random)], 1)
    await link.stage(version)
    await link.announce(version, lambda: replicas, _raise)
    worst = 0.0
    for replica in replicas:
        groups = await asyncio.gather(*(_sample(replica, random) for _ in range(_PROMPTS)))
        [metrics] = await trainers.trainer.train([batch_of(groups, titan, None)], 2)
        assert isinstance(metrics, StepMetrics), metrics
        worst = max(worst, math.log(metrics.agreement_max))
    accounts = [await GeneratorEndpoints.account().at(rank.actor) for replica in replicas for rank in replica.ranks]
    return row(
        f"{trainer} to {generator}: largest difference of a logprob",
        worst,
        "nat",
        _BAR_LOGPROB,
        bytes_read_over_stored=max(read / stored for _, read, stored in accounts),
        transports=link.transports,
    )


def _raise(number: int, reason: str) -> None:
    raise RuntimeError(f"generator {number} {reason}")


def guess(random: np.random.Generator) -> Answered:
    """A prompt and completions of random characters, about as likely as an untrained model finds them."""

    def completion() -> Completion:
        tokens = random.integers(5, 90, _NEW_TOKENS)
        return Completion(tokens, np.full(_NEW_TOKENS, -4.5, np.float32), np.zeros(_NEW_TOKENS), "stop")

    return random.integers(5, 90, 6), [completion() for _ in range(_SAMPLES)]


async def _sample(replica: Replica, random: np.random.Generator) -> Answered:
    from titan_rl.data.types import Request

    prompt, seeds = random.integers(5, 90, 6).astype(np.int32), random.integers(1, 1 << 30, _SAMPLES).tolist()
    request = GeneratorEndpoints.generate(Request(prompt, seeds, _NEW_TOKENS, 1.0))
    return prompt, await request.at(replica.leader)


def batch_of(groups: Iterable[Answered], titan: TitanConfig, random: np.random.Generator | None) -> Batch:
    """A batch of (prompt, completions); advantages are random, or 0 where nothing is to be learned."""

    def sample(prompt: np.ndarray, completion: Completion) -> Sample:
        provenance = np.array(
            [Provenance.TEMPLATE] * len(prompt) + [Provenance.MODEL] * len(completion.tokens), np.int8
        )
        if completion.forced is not None:
            provenance[len(prompt) :][completion.forced] = Provenance.FORCED
        logprobs = np.concatenate([np.zeros(len(prompt), np.float32), completion.logprobs])
        advantage = 0.0 if random is None else float(random.normal())
        return Sample(
            *(np.concatenate([prompt, completion.tokens]), provenance, logprobs, advantage),
            mask=joined([None, completion.mask], [len(prompt), len(completion.tokens)]),
            penalties=completion.penalties,
            starts=(len(prompt),),
        )

    return pack(
        [[sample(prompt, completion) for completion in completions] for prompt, completions in groups],
        num_ranks=titan.batch_degree,
        row_tokens=titan.training.seq_len * 2,
        row_multiple=titan.row_multiple,
        share_prefix=True,
        weigh=lambda samples: token_weights(samples, "token", _NEW_TOKENS),
    )

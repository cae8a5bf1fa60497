"""Speculative decoding: new tokens a second with drafts in every step, and adaptive ones, over those without.

    titan-rl bench speculation --model.path models/smollm2 --generator.dtype bfloat16

Prompts either say the same over and over, which a model goes on with, so that drafts are accepted, or are random, so
that hardly any is. The three engines sample in turn, of the same prompts.
"""

import asyncio
import statistics
import time
from dataclasses import replace
from typing import Any

import numpy as np

from titan_rl.config.load import ConfigError, load_config
from titan_rl.config.sections.schema import GeneratorConfig
from titan_rl.data.types import Request
from titan_rl.diagnostics.bench.harness import row
from titan_rl.diagnostics.bench.models.engines import model_directory, started_engines
from titan_rl.train import drive

_BATCHES, _NEW_TOKENS = (1, 8, 32), 64
_WARMING, _ROUNDS = 4, 3
"""An adaptive engine chooses while it warms up."""
_BAR = 0.95
_REPEATED, _TIMES = 12, 4


def run(overrides: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    config = load_config(None, overrides)
    if (method := config.generator.speculative.method) not in ("none", "ngram"):
        raise ConfigError(f"generator.speculative.method = {method!r}: this bench measures 'ngram'; leave it out")
    ngram = replace(config.generator.speculative, method="ngram")
    modes = {
        "off": replace(config.generator, speculative=replace(ngram, method="none")),
        "always": replace(config.generator, speculative=replace(ngram, adaptive=False)),
        "adaptive": replace(config.generator, speculative=replace(ngram, adaptive=True)),
    }
    with model_directory(config) as path:
        return drive(_measure(modes, str(path)))


def _prompts(kind: str, batch: int, number: int) -> list[np.ndarray]:
    random = np.random.default_rng([number, batch])
    if kind == "repeated":
        return [np.tile(random.integers(10, 90, _REPEATED), _TIMES).astype(np.int32) for _ in range(batch)]
    return [random.integers(10, 90, _REPEATED * _TIMES).astype(np.int32) for _ in range(batch)]


async def _measure(modes: dict[str, GeneratorConfig], path: str) -> list[dict[str, Any]]:
    rows = []
    async with started_engines(modes, path, 2 * _NEW_TOKENS) as engines:
        for kind in ("repeated", "random"):
            for batch in _BATCHES:
                rows += await _compare(engines, kind, batch)
    return rows


async def _compare(engines: dict[str, Any], kind: str, batch: int) -> list[dict[str, Any]]:
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    for number in range(_WARMING + _ROUNDS):
        for name, engine in engines.items():
            speeds[name].append(await _speed(engine, _prompts(kind, batch, number), number))
    accepted = await engines["always"].take_statistics.call_one()
    about = {
        "tokens_per_second": {name: statistics.median(values[_WARMING:]) for name, values in speeds.items()},
        "draft_acceptance_rate": accepted.num_accepted / max(accepted.num_drafted, 1),
    }
    rows = []
    for name, bar in (("always", None), ("adaptive", _BAR)):
        pairs = [own / off for own, off in zip(speeds[name], speeds["off"], strict=True)][_WARMING:]
        what = f"{name}, {batch} requests, {kind} prompts"
        rows.append(row(what, statistics.median(pairs), "ratio", bar, at_most=False, pairs=pairs, **about))
    return rows


async def _speed(engine: Any, prompts: list[np.ndarray], seed: int) -> float:
    """New tokens a second."""
    requests = [Request(tokens, [seed], _NEW_TOKENS, 1.0) for tokens in prompts]
    start = time.perf_counter()
    answers = await asyncio.gather(*(engine.generate.call_one(request) for request in requests))
    return sum(len(completion.tokens) for [completion] in answers) / (time.perf_counter() - start)

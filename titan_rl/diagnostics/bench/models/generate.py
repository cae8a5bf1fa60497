"""The generator actor against plain ``LLM.generate``: same prompts, same engine settings, alternating, in one run.

Both sample with the same seeds. The actor is called as episodes call it: one call per group of samples, all at the
same time. Give a larger model with ``--model.path DIR``.
"""

import asyncio
import os
import statistics
import subprocess
import sys
import time
from functools import partial
from typing import Any

import numpy as np

from titan_rl.config.load import load_config
from titan_rl.config.sections.schema import Config
from titan_rl.diagnostics.bench.harness import row
from titan_rl.diagnostics.bench.models.engines import engine_environment, model_directory, started_engines
from titan_rl.train import drive

_NUM_PROMPTS, _GROUP_SIZE, NEW_TOKENS, _ROUNDS = 16, 8, 64, 7
_BAR = 0.95
_MAX_LEN = 256


def prompts() -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(10, 90, 12).tolist() for _ in range(_NUM_PROMPTS)]


def run(overrides: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    config = load_config(None, overrides)
    with model_directory(config) as path:
        speeds = drive(_measure(config, path))
    ratio = statistics.median(a / p for a, p in zip(speeds["actor"], speeds["plain"], strict=True))
    return [
        row("actor over plain LLM.generate, median of pairs", ratio, "ratio", _BAR, at_most=False),
        *(row(f"{name}", statistics.median(values), "tokens/s", rounds=values) for name, values in speeds.items()),
    ]


async def _measure(config: Config, path: str) -> dict[str, list[float]]:
    """In alternating rounds, so that drift of the machine affects both; the first round of each is not counted."""
    from titan_rl.data.types import Completion, Request

    plain = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "titan_rl.diagnostics.bench.models.plain_vllm",
            path,
            config.generator.dtype,
            str(_MAX_LEN),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | engine_environment(),
    )
    commands, answers = plain.stdin, plain.stdout
    assert commands is not None and answers is not None, "both are pipes"

    async def actor_round(generator: Any, number: int) -> float:
        start = time.perf_counter()
        requests = [
            Request(np.asarray(tokens, np.int32), seeds(number, index), NEW_TOKENS, 1.0)
            for index, tokens in enumerate(prompts())
        ]

        async def ask(request: Request) -> list[Completion]:
            return await generator.generate.call_one(request)

        groups = await asyncio.gather(*(ask(request) for request in requests))
        return sum(len(c.tokens) for group in groups for c in group) / (time.perf_counter() - start)

    async def plain_round(number: int) -> float:
        commands.write(f"{number}\n")
        commands.flush()
        return float((await asyncio.to_thread(answers.readline)).removeprefix("tokens/s "))

    speeds: dict[str, list[float]] = {"actor": [], "plain": []}
    try:
        async with started_engines({"actor": config.generator}, path, _MAX_LEN) as engines:
            await asyncio.to_thread(answers.readline)
            rounds = {"actor": partial(actor_round, engines["actor"]), "plain": plain_round}
            for number in range(_ROUNDS + 1):
                for name, one_round in rounds.items():
                    speed = await one_round(number)
                    speeds[name] += [speed] if number else []
        return speeds
    finally:
        plain.kill()
        plain.wait()


def seeds(number: int, prompt: int) -> list[int]:
    return [1 + number * 10_000 + prompt * 100 + sample for sample in range(_GROUP_SIZE)]

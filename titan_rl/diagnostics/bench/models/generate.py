"""The generator actor against plain ``LLM.generate``: same prompts, same engine settings, alternating, in one run.

Both sample with the same seeds. The actor is called as episodes call it: one call per group of samples, all at the
same time. Give a larger model with ``--model.path DIR``.
"""

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from titan_rl.config.load import load_config
from titan_rl.config.sections.schema import Config
from titan_rl.diagnostics.bench.harness import row
from titan_rl.mesh.resources.cores import available_cores, generator_environment, share_cores
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


@contextmanager
def model_directory(config: Config) -> Iterator[str]:
    """The model's directory; one of the tiny model is made."""
    with tempfile.TemporaryDirectory() as folder:
        path = config.model.path
        if path == "tiny":
            from titan_rl.models.builtin.tiny import make_tiny

            path = str(Path(folder) / "tiny")
            make_tiny(path, seed=config.run.seed)
        yield path


async def _measure(config: Config, path: str) -> dict[str, list[float]]:
    """In alternating rounds, so that drift of the machine affects both; the first round of each is not counted."""
    from monarch.actor import default_bootstrap_cmd, this_host

    from titan_rl.actors.generator import Generator
    from titan_rl.data.types import Completion, Request
    from titan_rl.models.device import DEVICE_TYPE

    environment = generator_environment(share_cores(available_cores(), 1, 1, alternating=True), DEVICE_TYPE == "cpu")
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
        env=os.environ | environment,
    )
    commands, answers = plain.stdin, plain.stdout
    assert commands is not None and answers is not None, "both are pipes"
    procs = this_host().spawn_procs(
        per_host={"ranks": 1}, name="generator", bootstrap_command=default_bootstrap_cmd().with_env(environment)
    )
    generator = procs.spawn("generator", Generator, config.generator, path, _MAX_LEN)

    async def actor_round(number: int) -> float:
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

    try:
        await generator.start.call_one(0, "")
        await asyncio.to_thread(answers.readline)
        speeds: dict[str, list[float]] = {"actor": [], "plain": []}
        for number in range(_ROUNDS + 1):
            for name, one_round in (("actor", actor_round), ("plain", plain_round)):
                speed = await one_round(number)
                speeds[name] += [speed] if number else []
        return speeds
    finally:
        plain.kill()
        plain.wait()
        await procs.stop()


def seeds(number: int, prompt: int) -> list[int]:
    return [1 + number * 10_000 + prompt * 100 + sample for sample in range(_GROUP_SIZE)]

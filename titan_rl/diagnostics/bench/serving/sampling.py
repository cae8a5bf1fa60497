"""Samples by the Tinker SDK over HTTP, beside the generator actors' own rate at the same requests.

Rounds take turns in one service: 64 requests at once, each of one answer, by the actors and by the SDK in a process of
its own.
"""

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from importlib.util import find_spec
from typing import Any

import numpy as np

from titan_rl.config.load import ConfigError, load_config
from titan_rl.data.storage.decoding import Decoding
from titan_rl.data.types import Request
from titan_rl.diagnostics.bench.harness import row
from titan_rl.mesh.resources.listeners.http_server import listen
from titan_rl.service.command import CHECKS, Listener, serving
from titan_rl.service.session import ServiceSession

_REQUESTS, _PROMPT_TOKENS, _NEW_TOKENS, _ROUNDS = 64, 64, 128, 5
_BAR = 0.9
"""Of the actors' rate."""
_KEY = "tml-bench"


def run(overrides: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of the bench. Errors: ConfigError without the SDK."""
    if find_spec("tinker") is None:
        raise ConfigError("this bench needs the Tinker SDK: pip install tinker")
    tables = {"lora": {"rank": 32}, "training": {"seq_len": _PROMPT_TOKENS + _NEW_TOKENS}, **overrides}
    config = load_config(None, tables)
    with tempfile.TemporaryDirectory(prefix="titan_rl_bench_", ignore_cleanup_errors=True) as folder:
        config.run.dir = folder
        return asyncio.run(_measured(config))


async def _measured(config: Any) -> list[dict[str, Any]]:
    session = ServiceSession.open(config, "bench", checks=CHECKS)
    try:
        await session.start()
        with listen(0) as bound:
            listener = Listener(bound)
            async with serving(session, listener, _KEY):
                return await _rounds(session, listener.address)
    finally:
        await session.close()


async def _rounds(session: ServiceSession, address: str) -> list[dict[str, Any]]:
    environment = os.environ | {"TINKER_BASE_URL": address, "TINKER_API_KEY": _KEY, "TINKER_TELEMETRY": "0"}
    command = [sys.executable, "-m", f"{__package__}.sdk_client", session.model.name]
    pipe = asyncio.subprocess.PIPE
    client = await asyncio.create_subprocess_exec(*command, env=environment, stdin=pipe, stdout=pipe)
    assert client.stdin is not None and client.stdout is not None
    rates: dict[str, list[float]] = {"actors": [], "sdk": []}
    try:
        for number in range(1 + _ROUNDS):
            prompts = _prompts(number, session.model.vocabulary)
            direct = await _direct(session, prompts)
            client.stdin.write(json.dumps({"prompts": prompts, "max_tokens": _NEW_TOKENS}).encode() + b"\n")
            told = json.loads(await client.stdout.readline())
            if number:  # the first round warms both up
                rates["actors"].append(_REQUESTS * _NEW_TOKENS / direct)
                rates["sdk"].append(told["tokens"] / told["seconds"])
    finally:
        client.stdin.close()
        await client.wait()
    actors, sdk = (statistics.median(each) for each in rates.values())
    ratio = statistics.median(s / a for a, s in zip(*rates.values(), strict=True))
    return [
        row("generator actors", round(actors, 1), "tokens/s", requests=_REQUESTS, new_tokens=_NEW_TOKENS),
        row("Tinker SDK", round(sdk, 1), "tokens/s", rounds=_ROUNDS),
        row("Tinker SDK over generator actors", round(ratio, 3), "ratio", bar=_BAR, at_most=False),
    ]


def _prompts(number: int, vocabulary: int) -> list[list[int]]:
    """Others in each round, so that none is in the prefix cache."""
    return np.random.default_rng(number).integers(5, vocabulary, (_REQUESTS, _PROMPT_TOKENS)).tolist()


async def _direct(session: ServiceSession, prompts: list[list[int]]) -> float:
    """Seconds that the actors take."""
    decoding, start = Decoding(stop_tokens=()), time.perf_counter()
    requests = [
        Request(np.array(prompt, np.int32), [place], _NEW_TOKENS, 1.0, decoding) for place, prompt in enumerate(prompts)
    ]
    await asyncio.gather(*(session.service.weights.complete(None, request) for request in requests))
    return time.perf_counter() - start

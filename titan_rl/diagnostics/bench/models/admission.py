"""Requests at once under a KV cache too small for all: tokens a second and preemptions, by limit.

    titan-rl bench admission --model.path models/smollm2 --generator.dtype bfloat16

A small ``max_num_seqs`` leaves room in the cache, a large one preempts; adaptive admission is beside both. The engines
answer the same questions in turn, some in a few words and some at length, as far as the model goes.
"""

import asyncio
import statistics
import time
from dataclasses import replace
from typing import Any

import numpy as np

from titan_rl.config.load import load_config
from titan_rl.config.sections.schema import GeneratorConfig
from titan_rl.data.text.tokenizer import read_tokenizer
from titan_rl.data.types import Request
from titan_rl.diagnostics.bench.harness import row
from titan_rl.diagnostics.bench.models.engines import model_directory, started_engines
from titan_rl.train import drive

_QUESTIONS = ("Name one colour.", "What is 7 + 5?", "Tell a long story of a sailor.", "Explain how rain comes about.")
_SAMPLES, _NEW_TOKENS, _MAX_LEN = 8, 256, 512
_FIXED, _MOST = (8, 16), 128
_ROUNDS = 3
"""Beside one that warms up, in which adaptive admission learns how long answers are."""
_KV_CACHE_GIB = 0.05
"""2,300 tokens of SmolLM2 in bf16."""
_BAR = 0.95


def run(overrides: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    config = load_config(None, overrides)
    generator = replace(config.generator, kv_cache_gib=config.generator.kv_cache_gib or _KV_CACHE_GIB)
    modes = {f"{count} at once": replace(generator, max_num_seqs=count) for count in (*_FIXED, _MOST)}
    modes["adaptive"] = replace(generator, max_num_seqs=_MOST, adaptive_max_num_seqs=True)
    with model_directory(config) as path:
        return drive(_measure(modes, str(path)))


def _prompts(path: str) -> list[np.ndarray]:
    tokenizer = read_tokenizer(path)
    if tokenizer.chat_template is None:
        return [np.asarray(tokenizer.encode(question), np.int32) for question in _QUESTIONS]
    asked = [[{"role": "user", "content": question}] for question in _QUESTIONS]
    texts = [str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)) for chat in asked]
    return [np.asarray(tokenizer.encode(text, add_special_tokens=False), np.int32) for text in texts]


async def _measure(modes: dict[str, GeneratorConfig], path: str) -> list[dict[str, Any]]:
    prompts, speeds, preemptions = _prompts(path), {name: [] for name in modes}, {name: [] for name in modes}
    async with started_engines(modes, path, _MAX_LEN) as engines:
        for number in range(1 + _ROUNDS):
            for name, engine in engines.items():
                speed, preempted = await _round(engine, prompts, number)
                if number:
                    speeds[name].append(speed)
                    preemptions[name].append(preempted)
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    best, all_at_once = max((name for name in modes if name != "adaptive"), key=medians.__getitem__), f"{_MOST} at once"
    rows = [row(name, medians[name], "tokens/s", rounds=speeds[name], preemptions=preemptions[name]) for name in modes]
    for name, bar in ((best, _BAR), (all_at_once, 1.0)):
        pairs = [own / other for own, other in zip(speeds["adaptive"], speeds[name], strict=True)]
        rows.append(row(f"adaptive over {name}", statistics.median(pairs), "ratio", bar, at_most=False, pairs=pairs))
    return rows


async def _round(engine: Any, prompts: list[np.ndarray], number: int) -> tuple[float, int]:
    """New tokens a second, and preemptions."""
    requests = [
        Request(tokens, [1000 * number + seed], _NEW_TOKENS, 1.0) for seed in range(_SAMPLES) for tokens in prompts
    ]
    await engine.take_statistics.call_one()
    start = time.perf_counter()
    answers = await asyncio.gather(*(engine.generate.call_one(request) for request in requests))
    seconds = time.perf_counter() - start
    use = await engine.take_statistics.call_one()
    return sum(len(completion.tokens) for [completion] in answers) / seconds, use.num_preemptions

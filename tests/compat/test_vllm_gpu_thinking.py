"""vLLM's kernel that closes thinking on a GPU, in Triton's interpreter: by the tokens, as on a CPU."""

import importlib
import random

import numpy as np
import torch
from kernel_checks import run_interpreted

from titan_rl.data.text.thinking import ThinkingTags, forced_closings

NUM_REQUESTS, NUM_TOKENS, NUM_WORDS = 3, 12, 6


def test_a_gpus_thinking_is_closed_by_what_the_tokens_say():
    run_interpreted(__file__)


def integers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def check_kernel(monkeypatch):
    triton_utils = importlib.import_module("vllm.triton_utils")
    for name, module in (("triton", "triton"), ("tl", "triton.language")):  # vLLM does without on a CPU
        monkeypatch.setattr(triton_utils, name, importlib.import_module(module))
    budgets = importlib.reload(importlib.import_module("vllm.v1.worker.gpu.sample.thinking_budget"))
    assert sum(closings(budgets.apply_thinking_budget, random.Random(seed)) for seed in range(10)) > 20


def closings(apply, draw: random.Random) -> int:
    """Number of closings that the kernel forced on random requests, each of which follows from the tokens."""
    tags, rows, forced = ThinkingTags(1, 2), torch.arange(NUM_REQUESTS, dtype=torch.int32), 0
    texts = [draw.choices(range(NUM_WORDS), k=draw.randint(1, 6)) for _ in rows]
    lengths, budgets = [len(text) for text in texts], [draw.randint(1, 4) for _ in rows]
    stored = torch.zeros(NUM_REQUESTS, 40, dtype=torch.int32)
    caches = torch.full_like(rows, -1), torch.full_like(rows, -1), torch.zeros_like(rows)
    for _ in range(NUM_TOKENS):
        for row, text in zip(stored, texts, strict=True):
            row[: len(text)] = integers(*text)
        logits = torch.zeros(NUM_REQUESTS, NUM_WORDS)
        now = integers(*map(len, texts)), integers(*(text[-1] for text in texts)), torch.zeros_like(rows)
        ids = [integers(tag) for tag in (tags.start, tags.end, tags.end)]
        apply(logits, rows, rows, integers(*budgets), stored, *now, *caches, *ids)
        for text, length, budget, logit_V in zip(texts, lengths, budgets, logits, strict=True):
            is_forced = bool(logit_V[tags.end] > 0)
            text.append(tags.end if is_forced else draw.choices(range(NUM_WORDS), [1, 2, 1, 2, 2, 2])[0])
            assert forced_closings(np.array(text[:length]), np.array(text[length:]), tags, budget)[-1] == is_forced
            forced += is_forced
    return forced

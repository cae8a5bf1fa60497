"""Packed batches of random tokens."""

import numpy as np

from titan_rl.packing import pack, token_weights
from titan_rl.types import Batch, Provenance, Sample

VOCABULARY = 90


def batch_of(seed: int, *, row_tokens: int = 64, share_prefix: bool = True, scale: float = 1.0, **layout: int) -> Batch:
    """Three groups of four samples, about as likely as the untrained model finds them; ``scale`` of advantages.

    Some tokens are a tool's, not the model's. ``layout``: ``num_ranks`` and ``row_multiple``.
    """
    rng = np.random.default_rng(seed)
    groups = []
    for _ in range(3):
        prompt = rng.integers(3, VOCABULARY, rng.integers(1, 9))
        groups.append([])
        for _ in range(4):
            answer = rng.integers(3, VOCABULARY, rng.integers(1, 12))
            tokens = np.concatenate([prompt, answer])
            provenance = np.full(len(tokens), Provenance.MODEL, np.int8)
            provenance[: len(prompt)] = Provenance.TEMPLATE
            provenance[len(prompt) + 4 : len(prompt) + 6] = Provenance.TOOL
            logprobs = rng.normal(-4.6, 0.2, len(tokens)).astype(np.float32)
            groups[-1].append(Sample(tokens, provenance, logprobs, scale * float(rng.normal())))
    return pack(
        groups,
        row_tokens=row_tokens,
        share_prefix=share_prefix,
        weigh=lambda samples: token_weights(samples, "token", 16),
        **{"num_ranks": 1} | layout,
    )

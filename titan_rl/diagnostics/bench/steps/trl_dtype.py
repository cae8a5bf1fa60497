"""The dtype in which transformers trains a model faster on this CPU, for beside_trl.py: its first argument.

Forward and backward of its first layers: a CPU may have no units for bf16, or slower ones.
"""

import sys
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM

_NUM_LAYERS, _SHAPE, _PASSES = 4, (4, 64), 3
_TOO_LONG = 4.0
"""Times the other dtype's first pass, after which no other is made."""


def faster_dtype(path: str) -> str:
    """Faster dtype for TRL on this machine: ``float32`` or ``bfloat16``. ``path``: of a model directory."""
    wide = _seconds(path, torch.float32)
    narrow = _seconds(path, torch.bfloat16, _TOO_LONG * wide)
    return "bfloat16" if narrow <= wide else "float32"


def _seconds(path: str, dtype: torch.dtype, too_long: float = float("inf")) -> float:
    """Of the fastest pass."""
    config = AutoConfig.from_pretrained(path)
    config.num_hidden_layers = _NUM_LAYERS
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    tokens, seconds = torch.arange(_SHAPE[0] * _SHAPE[1]).view(_SHAPE) % config.vocab_size, []
    while len(seconds) < _PASSES and min(seconds, default=0.0) <= too_long:
        start = time.perf_counter()
        model(input_ids=tokens, labels=tokens).loss.backward()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


if __name__ == "__main__":
    print(faster_dtype(sys.argv[1]))

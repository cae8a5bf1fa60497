"""Limits of ``[generator]`` that vLLM would refuse only when an engine starts: checked before any process does."""

from importlib.util import find_spec
from math import ceil

import torch
from transformers import PreTrainedConfig

from titan_rl.config.device_defaults import step_tokens
from titan_rl.config.load import ConfigError
from titan_rl.config.sections.schema import Config
from titan_rl.models.layers.rope import num_positions

_BLOCK_TOKENS = 16
"""The smallest number of tokens that vLLM stores together."""
_NEEDS_TORCHVISION = ("qwen3_5_text", "qwen3_5_moe_text")
"""Model types whose module in vLLM 0.32 imports it."""
_CPU_LATENTS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
"""What its CPU kernel for latent attention is compiled for."""
_CPU_STATES = ((64, 64), (128, 128))
"""Features of keys and values that its CPU kernel for linear attention takes."""


def check_engine(config: Config, hf: PreTrainedConfig, seq_len: int, *, on_cpu: bool) -> None:
    """Check limits of an engine. ``config``: with the device's defaults. Errors: ConfigError."""
    generator = config.generator
    max_model_len = min(seq_len, num_positions(hf))
    most = step_tokens(max_model_len, on_cpu=on_cpu)
    if generator.max_num_seqs > most:
        raise ConfigError(
            f"generator.max_num_seqs = {generator.max_num_seqs} is more than the {most} tokens of one engine step: "
            f"lower it"
        )
    if hf.model_type in _NEEDS_TORCHVISION and find_spec("torchvision") is None:
        raise ConfigError(
            f"vLLM's class for model type {hf.model_type!r} needs torchvision, also for text, and it is not installed: "
            f"install the build that belongs to this torch"
        )
    if on_cpu:
        _check_cpu_kernels(hf, generator.dtype)
    needed = kv_bytes(hf, max_model_len, generator.dtype, generator.tensor_parallel) / 2**30
    if 0 < generator.kv_cache_gib < needed:
        raise ConfigError(
            f"generator.kv_cache_gib = {generator.kv_cache_gib:g} cannot hold one rollout of {max_model_len} tokens, "
            f"which takes {needed:.3g}: raise it, or lower training.seq_len"
        )


def _check_cpu_kernels(hf: PreTrainedConfig, dtype: str) -> None:
    """Errors: ConfigError for layers that vLLM 0.32 has no kernel for on a CPU."""
    if "linear_attention" in (getattr(hf, "layer_types", None) or ()):
        _check_cpu_states(hf, dtype)
    for key, size in _CPU_LATENTS.items():
        if getattr(hf, "kv_lora_rank", None) is not None and getattr(hf, key) != size:
            raise ConfigError(
                f"the model's {key} = {getattr(hf, key)} has no latent attention in vLLM for CPUs, only {size}: use "
                f"another model, or a GPU"
            )


def _check_cpu_states(hf: PreTrainedConfig, dtype: str) -> None:
    if dtype != "bfloat16":
        raise ConfigError(
            f"generator.dtype = {dtype!r}: vLLM computes linear attention (layer_types) on a CPU in bfloat16 alone; "
            f"set generator.dtype = 'bfloat16'"
        )
    sizes = hf.linear_key_head_dim, hf.linear_value_head_dim
    if sizes not in _CPU_STATES:
        raise ConfigError(
            f"the model's linear_key_head_dim, linear_value_head_dim = {sizes} have no linear attention in vLLM for "
            f"CPUs, only {' and '.join(map(str, _CPU_STATES))}: use another model, or a GPU"
        )


def kv_bytes(hf: PreTrainedConfig, num_tokens: int, dtype: str, ranks: int) -> int:
    """Least bytes of KV cache for ``num_tokens`` on each rank; sliding-window layers count as none."""
    kinds = getattr(hf, "layer_types", None) or ["full_attention"] * hf.num_hidden_layers
    layers = sum(kind == "full_attention" for kind in kinds)
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    width = 2 * layers * max(hf.num_key_value_heads // ranks, 1) * head_dim
    if (latents := getattr(hf, "kv_lora_rank", None)) is not None:
        width = layers * (latents + hf.qk_rope_head_dim)
    return width * getattr(torch, dtype).itemsize * _BLOCK_TOKENS * ceil(num_tokens / _BLOCK_TOKENS)

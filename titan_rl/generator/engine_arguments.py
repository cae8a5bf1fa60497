"""What vLLM is told of an engine."""

from pathlib import Path
from typing import Any

from vllm.config import WeightTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from titan_rl.config.schema import GeneratorConfig
from titan_rl.generator import vllm_backend, vllm_loader

_CPU_BLOCK_TOKENS = 32
"""The smallest that vLLM's CPU attention accepts. Only full blocks of a prompt are shared, and the default is 128."""
_PREFILL_TOKENS = 4096
"""Tokens of one engine step, unless a single prompt needs more."""


def engine_arguments(
    config: GeneratorConfig, model_path: str | Path, max_model_len: int, sleeps: bool = False
) -> EngineArgs:
    """vLLM's settings. Log-probabilities are those of the distribution that is sampled from.

    ``sleeps``: whether it gives up its memory at times (sleeping.py).
    """
    on_cpu = current_platform.is_cpu()
    memory: dict[str, Any] = (
        dict(kv_cache_memory_bytes=int(config.kv_cache_gib * 2**30), block_size=_CPU_BLOCK_TOKENS)
        if on_cpu
        else dict(gpu_memory_utilization=config.gpu_memory_utilization, enable_sleep_mode=sleeps)
    )
    parallel: dict[str, Any] = (
        dict(tensor_parallel_size=config.tensor_parallel, distributed_executor_backend="external_launcher")
        if config.tensor_parallel > 1
        else {}
    )
    return EngineArgs(
        model=str(model_path),
        config_format="hf",
        load_format=vllm_loader.FORMAT,
        dtype=config.dtype,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        enforce_eager=on_cpu,
        # vLLM 0.32 on a CPU crashes on a seeded request whose prompt is prefilled in parts: its generator cannot rewind
        enable_chunked_prefill=False,
        max_num_batched_tokens=max(_PREFILL_TOKENS, max_model_len),
        async_scheduling=False,  # an update must know the number of tokens of each request
        disable_log_stats=True,
        skip_tokenizer_init=True,
        trust_remote_code=False,
        logprobs_mode="processed_logprobs",
        # bf16 logits are off by up to 1/16, which caused a third of the disagreement of trainer and sampler
        hf_overrides={"head_dtype": "float32"},
        generation_config="vllm",
        weight_transfer_config=WeightTransferConfig(backend=vllm_backend.BACKEND),
        **memory,
        **parallel,
    )

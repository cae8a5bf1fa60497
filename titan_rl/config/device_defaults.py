"""Settings whose default depends on the device: bf16 compute over fp32 state on a GPU."""

from dataclasses import replace

from titan_rl.config.sections.schema import Config, GeneratorConfig

_CPU_KV_GIB = 0.5
GPU_STEP_TOKENS = 8192
"""Of one step of an engine on a GPU, at most: its activations are planned by that."""
_CPU_STEP_TOKENS = 4096
"""On a CPU, unless a single rollout is longer."""
MIN_WIDE_SEQUENCES = 32
"""Of an engine whose bf16 layers are packed in fp32, on a CPU that multiplies it faster: 8 sequences take 28 ms for
SmolLM2's layers instead of 21, 64 take 76 instead of 94 (generator/weights/vllm_linear.py)."""


def for_device(config: Config, *, on_cpu: bool) -> Config:
    """Configuration with device-dependent defaults filled in. What the run records is this, and so is what it goes on
    with, whatever it is resumed on."""
    training = config.titan.get("training", {})
    ours = {} if on_cpu else {"training": {"mixed_precision_param": "bfloat16"} | training}
    # without answers there is no generator, and what nobody reads stays (controller/preflight/ineffective_settings.py)
    generator = generator_on(config.generator, on_cpu=on_cpu) if config.has_generators else config.generator
    return replace(config, generator=generator, titan=config.titan | ours)


def generator_on(generator: GeneratorConfig, *, on_cpu: bool) -> GeneratorConfig:
    """Its settings there. On a GPU a KV cache of 0 is left to the placement."""
    dtype = generator.dtype if generator.dtype != "auto" else "float32" if on_cpu else "bfloat16"
    kv_cache_gib = generator.kv_cache_gib or (_CPU_KV_GIB if on_cpu else 0.0)
    return replace(generator, dtype=dtype, kv_cache_gib=kv_cache_gib)


def step_tokens(max_model_len: int, *, on_cpu: bool) -> int:
    """Tokens of one engine step, at most; so vLLM runs no more requests at once. ``max_model_len``: of a rollout."""
    return max(_CPU_STEP_TOKENS, max_model_len) if on_cpu else GPU_STEP_TOKENS

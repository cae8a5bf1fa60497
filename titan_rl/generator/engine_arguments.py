"""What vLLM is told of an engine, on a CPU and on GPUs."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import AutoConfig
from vllm.config import CompilationConfig, CompilationMode, KernelConfig, WeightTransferConfig
from vllm.config.kernel import IrOpPriorityConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from titan_rl.config.device_defaults import generator_on, step_tokens
from titan_rl.config.sections.role_sections import ImagesConfig
from titan_rl.config.sections.schema import GeneratorConfig
from titan_rl.data.images import UNLIMITED, image_processor, sees_images
from titan_rl.generator import norms
from titan_rl.generator.weights import vllm_backend, vllm_loader

_CPU_BLOCK_TOKENS = 32
"""The smallest that vLLM's CPU attention accepts. Only full blocks of a prompt are shared, and the default is 128."""
_CPU_LATENT_BLOCK_TOKENS = 16
"""The only one that its kernel for latents accepts."""


def engine_arguments(
    config: GeneratorConfig,
    model_path: str | Path,
    max_model_len: int,
    devices: Sequence[int] = (),
    sleeps: bool = False,
    records_routing: bool = False,
    invariant_parts: int = 0,
    images: ImagesConfig = UNLIMITED,
) -> EngineArgs:
    """vLLM's settings. Log-probabilities are those of the distribution that is sampled from.

    ``devices``: of the engine's ranks, as they are numbered on this host; none on a CPU. ``sleeps``: whether it
    gives up its memory at times (sleeping.py). ``records_routing``: whether it is asked for routed experts.
    ``invariant_parts``: in how many parts it shares products, by the trainer's functions (batch_invariance.py); 0: by
    vLLM's own. ``images``: limits of their pixels, for which vLLM makes room.
    """
    on_cpu = current_platform.is_cpu()
    config = generator_on(config, on_cpu=on_cpu)
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
        enforce_eager=on_cpu or invariant_parts > 0,
        disable_log_stats=True,
        skip_tokenizer_init=not sees_images(model_path),  # vLLM makes a processor of images with it, which nobody uses
        trust_remote_code=False,
        logprobs_mode="processed_logprobs",
        # bf16 logits are off by up to 1/16, which caused a third of the disagreement of trainer and sampler; routers
        # (DeepSeek-V3's) and states of linear attention are in fp32 in the trainer, too
        hf_overrides={"head_dtype": "float32", "moe_router_dtype": "float32"},
        mamba_ssm_cache_dtype="float32",
        generation_config="vllm",
        weight_transfer_config=WeightTransferConfig(backend=vllm_backend.BACKEND),
        **(_on_cpu(config, max_model_len, model_path) if on_cpu else _on_gpu(config, max_model_len, devices, sleeps)),
        enable_return_routed_experts=records_routing and not on_cpu,  # compat/vllm/routing.py
        # which vLLM has for GPUs alone; there a running request's count of tokens would have drafts in it
        async_scheduling=False if on_cpu or config.speculative.method != "none" else None,
        **_speculation(config, model_path),
        **_vision(model_path, images, on_cpu),
        **parallel,
        **_replaced(config, on_cpu, invariant_parts),
    )


def _replaced(config: GeneratorConfig, on_cpu: bool, invariant_parts: int) -> dict[str, Any]:
    """Settings of layers that compute otherwise than vLLM's own."""
    if invariant_parts:
        # its cache is one that the replaced functions can read, as that of CPUs is, in fp32, too
        backend = {} if on_cpu else {"attention_backend": "TRITON_ATTN"}
        return backend | {"additional_config": {vllm_loader.BATCH_INVARIANT: invariant_parts}}
    if not on_cpu:
        return {}
    by_ours = IrOpPriorityConfig(rms_norm=[norms.PROVIDER], fused_add_rms_norm=[norms.PROVIDER])
    emulated = {"additional_config": {vllm_loader.EMULATED: config.quantization}} if config.is_quantized else {}
    return {"kernel_config": KernelConfig(ir_op_priority=by_ours)} | emulated


def _vision(model_path: str | Path, images: ImagesConfig, on_cpu: bool) -> dict[str, Any]:
    """Settings of a model that sees images; vLLM profiles with images of its own on a GPU, if it can make some."""
    if (processor := image_processor(model_path, images)) is None:
        return {}
    skips = on_cpu or find_spec("torchvision") is None
    return dict(
        limit_mm_per_prompt={"image": 999, "video": 0},
        mm_processor_kwargs=None if images == UNLIMITED else {"size": processor.form["size"]},
        mm_processor_cache_gb=0,
        skip_mm_profiling=skips,
    )


def _speculation(config: GeneratorConfig, model_path: str | Path) -> dict[str, Any]:
    settings = config.speculative
    if settings.method == "none":
        return {}
    drafts = {name: getattr(settings, name) for name in ("method", "num_speculative_tokens")}
    drafts["num_speculative_tokens_per_batch_size"] = [(1, config.max_num_seqs, settings.num_speculative_tokens)]
    if settings.method == "ngram":
        drafts |= {name: getattr(settings, name) for name in ("prompt_lookup_min", "prompt_lookup_max")}
    else:
        drafts |= dict(
            model=settings.model if settings.has_model else str(model_path),
            draft_tensor_parallel_size=config.tensor_parallel,
            draft_sample_method="probabilistic",  # the likeliest tokens would be accepted less often
        )
    return dict(speculative_config=drafts)


def _cache_on_cpu(model_path: str | Path) -> dict[str, Any]:
    """Settings of a cache by the kind of a model's layers, of which a config.json may leave the defaults out."""
    hf = AutoConfig.from_pretrained(model_path, trust_remote_code=False)
    if getattr(hf, "kv_lora_rank", None) is not None:
        # where a CPU has AMX, vLLM takes a kernel for latents by default that knows no fp32
        return dict(attention_backend="CPU_MLA", block_size=_CPU_LATENT_BLOCK_TOKENS)
    if "linear_attention" in (getattr(hf, "layer_types", None) or ()):
        # vLLM shares states of linear attention among prompts only where it prefills them in parts
        return dict(block_size=_CPU_BLOCK_TOKENS, enable_prefix_caching=False)
    return dict(block_size=_CPU_BLOCK_TOKENS)


def _on_cpu(config: GeneratorConfig, max_model_len: int, model_path: str | Path) -> dict[str, Any]:
    return dict(
        kv_cache_memory_bytes=int(config.kv_cache_gib * 2**30),
        **_cache_on_cpu(model_path),
        # vLLM 0.32 on a CPU crashes on a seeded request whose prompt is prefilled in parts: its generator cannot rewind
        enable_chunked_prefill=False,
        max_num_batched_tokens=step_tokens(max_model_len, on_cpu=True),
    )


def _on_gpu(config: GeneratorConfig, max_model_len: int, devices: Sequence[int], sleeps: bool) -> dict[str, Any]:
    """Chunked prefill is vLLM's default there, and stays; so does async scheduling without drafts."""
    has_weights = config.speculative.method not in ("none", "ngram")
    return dict(
        device_ids=list(devices) or None,
        kv_cache_memory_bytes=int(config.kv_cache_gib * 2**30) or None,
        # beside that many bytes only what vLLM wants to see free before it starts
        gpu_memory_utilization=config.gpu_memory_utilization,
        max_num_batched_tokens=step_tokens(max_model_len, on_cpu=False),
        enable_sleep_mode=sleeps,
        # the channel fills the policy alone when the engine wakes
        sleep_preserve_parameter_names=["draft.*"] if sleeps and has_weights else [],
        quantization=config.quantization if config.is_quantized else None,
        # it would compile the kernels of every sampling setting; those of this run are compiled at its first request
        kernel_config=KernelConfig(enable_jit_warmup=False),
        # of the graphs that vLLM captures by default, those of decoding steps are left then
        **({} if config.torch_compile else {"compilation_config": CompilationConfig(mode=CompilationMode.NONE)}),
    )

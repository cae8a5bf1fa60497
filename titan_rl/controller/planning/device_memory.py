"""Memory of each process on its GPU and host, by arithmetic.

Of state the numbers are exact, up to how a shard is rounded; what a pass and libraries need are estimates.
"""

from collections.abc import Iterable

from transformers import PreTrainedConfig

from titan_rl.config.device_defaults import GPU_STEP_TOKENS
from titan_rl.config.sections.schema import GeneratorConfig
from titan_rl.controller.planning.memory_plan import (
    GIB,
    GRADIENT,
    MOMENTS,
    WEIGHT,
    Size,
    activations,
    bytes_of,
    tower_forward,
)
from titan_rl.controller.preflight.engine_checks import cache_bytes
from titan_rl.mesh.channel.memory.region import NUM_SLOTS
from titan_rl.trainer.model.unsharded import can_be_unsharded
from titan_rl.trainer.titan_config import TitanConfig

_LIBRARIES = {"trainer": 1.5, "generator": 2.5}
"""GiB of a process: CUDA's context, what NCCL, cuBLAS and the allocator hold, an engine's graphs. Not measured."""
_CONTEXT = 0.5
"""GiB of another process's context, on a GPU whose memory it maps. Not measured."""

Bytes = dict[str, float]
"""By reason."""


def model_shards(titan: TitanConfig) -> int:
    """Ranks that share one model: all but its replicas."""
    return titan.world_size // titan.parallelism.data_parallel_replicate_degree


def frozen_rank(size: Size, titan: TitanConfig) -> Bytes:
    """A rank's part of a model that never learns."""
    return {"weights": size.parameters * WEIGHT / model_shards(titan)}


def trained_rank(size: Size, titan: TitanConfig) -> Bytes:
    """A rank's part of a trained model."""
    trained = size.trained / model_shards(titan)
    return frozen_rank(size, titan) | {"gradients": trained * GRADIENT, "moments": trained * MOMENTS}


def slots_of_rank(size: Size, titan: TitanConfig, dtype: str) -> float:
    """Bytes of two weight versions on the training GPU, which generators read."""
    return NUM_SLOTS * size.parameters * bytes_of(dtype) / model_shards(titan)


def snapshots_of_rank(size: Size, titan: TitanConfig) -> float:
    """Bytes of a rank's snapshots of two steps in host memory."""
    return NUM_SLOTS * size.trained * (WEIGHT + MOMENTS) / model_shards(titan)


def mapped(num_engine_ranks: int) -> float:
    """Bytes of CUDA contexts on a trainer's GPU, from engines that map its slots."""
    return num_engine_ranks * _CONTEXT * GIB


def passing_rank(hf: PreTrainedConfig, size: Size, titan: TitanConfig, *, learns: bool) -> Bytes:
    """Peak memory of a forward and backward pass over one row."""
    parallelism, element = titan.parallelism, bytes_of(titan.training.mixed_precision_param)
    sharers = parallelism.data_parallel_shard_degree * parallelism.context_parallel_degree
    needs: Bytes = {"libraries": _LIBRARIES["trainer"] * GIB}
    if element < WEIGHT or sharers > 1:
        needs["gathered weights"] = _gathered(size, titan, element, learns=learns)
    kept = learns and titan.activation_checkpoint is None
    made = activations(hf, titan.training, is_kept=kept, tower_learns=learns and size.is_trained_whole)
    return needs | {"activations": made / titan.ranks_of_rows}


def _gathered(size: Size, titan: TitanConfig, element: int, *, learns: bool) -> float:
    """By FSDP: two layers and what is around them, or all of them where nothing is given back before the backward; with
    their gradients in both forms before they are added up over the ranks."""
    parallelism = titan.parallelism
    two_layers = 2 * (size.layer + size.experts / parallelism.expert_parallel_degree) + size.around
    is_whole = parallelism.fsdp_reshard_after_forward == "never" or can_be_unsharded(titan, "cuda")
    whole = size.parameters if is_whole else two_layers
    gradients = two_layers * (element + GRADIENT) if learns else 0
    stages = parallelism.pipeline_parallel_degree if parallelism.fsdp_reshard_after_forward == "never" else 1
    return (whole * element / stages + gradients) / parallelism.tensor_parallel_degree


def engine_rank(
    hf: PreTrainedConfig,
    size: Size,
    generator: GeneratorConfig,
    draft: Size | None = None,
    *,
    draft_learns: bool = False,
    image_tokens: int = 0,
) -> Bytes:
    """Memory of an engine rank without KV cache: weights, next weights, activations. ``draft``: of a draft model;
    ``image_tokens``: of the largest image, 0 where none are seen."""
    element, ranks = bytes_of(generator.dtype), generator.tensor_parallel
    head = 4 * hf.vocab_size * hf.hidden_size if element < 4 else 0
    width = 6 * hf.hidden_size + 3 * getattr(hf, "intermediate_size", 4 * hf.hidden_size) / ranks
    drafts = generator.speculative
    checked = drafts.num_speculative_tokens if drafts.method != "none" else 0
    logits = 4 * 4 * generator.max_num_seqs * (1 + checked) * hf.vocab_size
    of_layer = 1 if generator.is_quantized else element
    drafting = {"draft model": draft.parameters * element / ranks} if draft else {}
    if image_tokens:
        # vLLM computes and caches those of a step together, or one image that is larger
        tokens = max(image_tokens, GPU_STEP_TOKENS)
        cached = tokens * hf.hidden_size * element
        drafting["images"] = cached + tower_forward(hf.vision_config, tokens, generator.dtype)
    return drafting | {
        "weights": (size.around * element + (size.parameters - size.around) * of_layer) / ranks,
        "next weights": (size.parameters + (draft.parameters if draft and draft_learns else 0)) * element / ranks,
        "head in fp32": head / ranks,
        "activations": GPU_STEP_TOKENS * width * element + logits,
        "libraries": _LIBRARIES["generator"] * GIB,
    }


def kv_bytes(models: Iterable[PreTrainedConfig], generator: GeneratorConfig, tokens: int, requests: int = 1) -> float:
    """Bytes of cache for ``requests`` of ``tokens`` tokens in one engine rank, and for the token that is sampled.

    ``models``: the policy, and the draft model if there is one."""
    dtype, ranks = generator.dtype, generator.tensor_parallel
    return float(requests * sum(cache_bytes(hf, tokens + 1, dtype, ranks, windows=True) for hf in models))

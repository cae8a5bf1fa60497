"""Batch-invariant layers for vLLM, by the kernels of the trainer's (models/batch_invariance.py).

vLLM has a batch-invariant mode of its own on GPUs. Its rows do not depend on their batch, but it is another
arithmetic than the trainer's: equal bits on both sides need one. So its layers keep their weights, their KV cache and
their place, and compute by kernels/batch_invariant.py. A merged layer's parts are multiplied one by one, as the
trainer's are, and what tensor-parallel ranks share, in the trainer's parts.

Dimensions: I inputs of a linear layer, O outputs, M rows of the batch, R tensor-parallel ranks, T tokens.
"""

from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.distributed import tensor_model_parallel_all_gather
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import (
    LinearBase,
    QKVParallelLinear,
    RowParallelLinear,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
from vllm.model_executor.layers.rotary_embedding.common import ApplyRotaryEmb
from vllm.model_executor.layers.rotary_embedding.phi3_long_rope_scaled_rope import Phi3LongRoPEScaledRotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.platforms import current_platform

from titan_rl.compat.vllm.layers import set_head_projection
from titan_rl.compat.vllm.sampling import set_logprobs
from titan_rl.kernels.batch_invariant import (
    PagedSequences,
    batch_invariant_attention,
    batch_invariant_log_softmax,
    batch_invariant_rms_norm,
    batch_invariant_silu_and_mul,
)
from titan_rl.models.batch_invariance import (
    POSITIONS_AT_ONCE,
    BatchInvariantRoPE,
    depth_product,
    implementation_on,
    linear,
    sum_by_halves,
)
from titan_rl.models.layers.layer_configs import head_size
from titan_rl.models.layers.rope import HuggingFaceRoPE, rope_config

_ROTARY = (RotaryEmbeddingBase, Phi3LongRoPEScaledRotaryEmbedding)
_UNCHANGED = (VocabParallelEmbedding, ApplyRotaryEmb)
"""Layers that add nothing up, or are parts of others."""


class BatchInvariantLinearMethod(UnquantizedLinearMethod):
    def __init__(self, plain: UnquantizedLinearMethod, num_parts: int):
        """``num_parts``: as in ``convert_to_batch_invariant``."""
        vars(self).update(vars(plain))  # its constructor would ask for the kernel again
        self._num_parts = num_parts

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Leave a weight as it is: on a CPU vLLM would pack it."""

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        weight_OI = layer.weight
        assert isinstance(weight_OI, torch.Tensor) and isinstance(layer, LinearBase)
        ranks = layer.tp_size
        if isinstance(layer, RowParallelLinear) and self._num_parts > 1:
            out_O = _of_all_ranks(depth_product(x, weight_OI, self._num_parts // ranks), ranks).to(x.dtype)
            return out_O if layer.bias is None or layer.skip_bias_add else out_O + layer.bias
        sizes = getattr(layer, "output_partition_sizes", [len(weight_OI)])
        biases = [None] * len(sizes) if bias is None else bias.split(sizes)
        outputs = []
        for number, (part_OI, part_O) in enumerate(zip(weight_OI.split(sizes), biases, strict=True)):
            # where there are fewer heads of keys than ranks, some have the same one
            sharing = layer.num_kv_head_replicas if isinstance(layer, QKVParallelLinear) and number else 1
            width, place = len(part_OI) * ranks // sharing // self._num_parts, layer.tp_rank // sharing
            outputs.append(linear(x, part_OI, part_O, width, place * len(part_OI)))
        return torch.cat(outputs, dim=-1)


def _of_all_ranks(part_O: torch.Tensor, ranks: int) -> torch.Tensor:
    """Sum by halves of what each rank has."""
    if ranks == 1:
        return part_O
    parts_RMO = tensor_model_parallel_all_gather(part_O.flatten(0, -2), 0).unflatten(0, (ranks, -1))
    return sum_by_halves(parts_RMO.unbind()).unflatten(0, part_O.shape[:-1])


class _Projection:
    """Replacement for a logits processor's projection: logits of this rank's words."""

    def __init__(self, num_parts: int):
        self._num_parts = num_parts

    def __call__(self, lm_head: Any, hidden_states: torch.Tensor, embedding_bias: torch.Tensor | None) -> torch.Tensor:
        # vLLM fills the vocabulary up, and each rank's part of it must have the same size
        weight = lm_head.weight if lm_head.tp_size > 1 else lm_head.weight[: lm_head.org_vocab_size]
        width, first = -(-lm_head.org_vocab_size // self._num_parts), lm_head.shard_indices.padded_org_vocab_start_index
        return linear(hidden_states.float(), weight.float(), embedding_bias, width, first)


class _Norm:
    """Replacement for ``RMSNorm.forward``."""

    def __init__(self, module: RMSNorm):
        self._module = module

    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if residual is not None:
            x = x + residual
        normal = batch_invariant_rms_norm(x, self._module.weight, self._module.variance_epsilon)
        return normal if residual is None else (normal, x)


class _Rotation:
    """Replacement for a rotary embedding's ``forward``. The cache is a buffer of the module, which sleep keeps."""

    def __init__(self, module: torch.nn.Module, cache: torch.Tensor, head_size: int):
        module.register_buffer("batch_invariant_cache", cache, persistent=False)
        self._module, self._head_size = module, head_size

    def __call__(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cache = self._module.batch_invariant_cache
        assert isinstance(cache, torch.Tensor)
        cache = cache[positions.flatten()][:, None]
        new_query, new_key = HuggingFaceRoPE.apply_rotary_emb(
            query.view(len(query), -1, self._head_size), key.view(len(key), -1, self._head_size), cache
        )
        return new_query.view_as(query), new_key.view_as(key)


def _silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    return batch_invariant_silu_and_mul(*x.chunk(2, dim=-1))


class _Attention:
    """Replacement for an attention backend's functions. Keys and values of a token lie side by side in the cache,
    [blocks, heads, tokens of a block, 2 head size], on CPUs as for vLLM's Triton backend."""

    def __init__(self, layer: Attention):
        self._size, self._scale = layer.head_size, layer.impl.scale

    def store(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        # a token that fills the batch up has a negative place: it goes to vLLM's null block, which nobody reads
        slot_T = slot_mapping.long().clamp(min=0)
        block_T, offset_T = slot_T // kv_cache.shape[2], slot_T % kv_cache.shape[2]
        count = len(slot_T)
        kv_cache[block_T, :, offset_T] = torch.cat([key[:count], value[:count]], dim=-1)

    def attend(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if attn_metadata is None:  # vLLM warms up
            return output.zero_()
        k_PSGH, v_PSGH = kv_cache.transpose(1, 2).split(self._size, dim=-1)
        count = attn_metadata.num_actual_tokens
        output[:count] = batch_invariant_attention(
            query[:count],
            k_PSGH,
            v_PSGH,
            PagedSequences(
                attn_metadata.query_start_loc,
                attn_metadata.seq_lens,
                attn_metadata.block_table,
                attn_metadata.max_query_len,
            ),
            scale=self._scale,
            implementation=implementation_on(query.device),
        )
        return output


def make_batch_invariant(model: torch.nn.Module, vllm_config: VllmConfig, num_parts: int) -> None:
    """Replace the functions of a model's layers, before vLLM packs their weights.

    On a GPU also those of every sampler of this process. ``num_parts``: as in ``convert_to_batch_invariant``.
    Errors: RuntimeError for a layer that has no such form here.
    """
    device = next(model.parameters()).device
    hf = vllm_config.model_config.hf_config
    rope = rope_config(hf, head_size(hf), rope=BatchInvariantRoPE)
    rope.max_seq_len = vllm_config.model_config.max_model_len
    cache = rope.build().cache.to(device)
    for name, module in model.named_modules():
        if isinstance(module, LinearBase) and type(module.quant_method) is UnquantizedLinearMethod:
            module.quant_method = BatchInvariantLinearMethod(module.quant_method, num_parts)
            if isinstance(module, RowParallelLinear):
                module.reduce_results = False  # its sum over ranks is that of the method
        elif isinstance(module, LogitsProcessor):
            set_head_projection(module, lambda _: _Projection(num_parts))
        elif type(module) is RMSNorm:
            vars(module)["forward"] = _Norm(module)
        elif isinstance(module, _ROTARY):
            vars(module)["forward"] = _Rotation(module, cache, head_size(hf))
        elif type(module) is SiluAndMul:
            vars(module)["forward"] = _silu_and_mul
        elif isinstance(module, Attention):
            functions = _Attention(module)
            vars(module.impl).update(do_kv_cache_update=functions.store, forward=functions.attend)
        elif next(module.children(), None) is None and not isinstance(module, _UNCHANGED):
            raise RuntimeError(f"debug.batch_invariant: no batch-invariant form of {name} ({type(module).__name__})")
    if not current_platform.is_cpu():
        set_logprobs(_logprobs)


def _logprobs(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [N, K] of K tokens each, some rows at a time: vLLM does not hold the whole vocabulary's."""
    parts = zip(logits.split(POSITIONS_AT_ONCE), token_ids.long().split(POSITIONS_AT_ONCE), strict=True)
    by = implementation_on(logits.device)
    return torch.cat([batch_invariant_log_softmax(part, implementation=by).gather(1, ids) for part, ids in parts])

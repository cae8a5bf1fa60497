"""Phi-3 where it differs from Llama: fused QKV projection, fused gate and up projection.

Each stays one parameter, as in the file. Tensor-parallel ranks compute some of its outputs each, whatever they are, and
exchange them before these are told apart.

Dimensions: B rows, L tokens, D features, F features of the feed-forward, N heads, H head size.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import spmd_types as spmd
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard
from torchtitan.models.common import Linear
from torchtitan.models.common.attention import BaseQKVLinear, FusedQKVLinear, GQAttention
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.decoder_sharding import (
    colwise_config,
    dense_activation_placement,
    dense_sequence_parallel_placement,
    norm_config,
    rowwise_config,
    set_decoder_sharding_config,
    set_gqa_attention_sharding,
    set_gqa_inner_attention_local_map,
)
from torchtitan.models.llama3.model import Llama3Model, Llama3TransformerBlock
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import ShardingConfig
from transformers import PreTrainedConfig

from titan_rl.models.layers import layer_configs
from titan_rl.models.layers.decoder import PackedDecoder, decoder_config


def _split(x_BLF: torch.Tensor, sizes: list[int]) -> list[torch.Tensor]:
    """Cut the last dimension; of each part, a tensor-parallel rank gets its share."""
    if not isinstance(x_BLF, DTensor):
        return list(x_BLF.split(sizes, dim=-1))
    whole = x_BLF.redistribute(placements=[Replicate()])
    parts_BLF = cast("tuple[DTensor, ...]", whole.split(sizes, dim=-1))  # of a DTensor, they are such, too
    return [part_BLF.redistribute(placements=[Shard(2)]) for part_BLF in parts_BLF]


class StackedQKVLinear(BaseQKVLinear):
    """Fused projection with outputs in the order queries, keys, values."""

    # TorchTitan knows how to shard the projection of its own fused class, by its config
    @dataclass(kw_only=True, slots=True)
    class Config(FusedQKVLinear.Config):
        pass

    def __init__(self, config: Config):
        super().__init__(config)
        self.wqkv = config.wqkv.build()
        self.sizes = [heads * config.head_dim for heads in (config.n_heads, config.n_kv_heads, config.n_kv_heads)]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in _split(self.wqkv(x), self.sizes))
        return q, k, v


class StackedFeedForward(Module):
    """SwiGLU with one fused projection of gate and up."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        w13: Linear.Config
        w2: Linear.Config

    def __init__(self, config: Config):
        super().__init__()
        self.w13, self.w2 = config.w13.build(), config.w2.build()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = _split(self.w13(x), [self.w2.in_features] * 2)
        return self.w2(F.silu(gate) * up)


class PackedPhi3(PackedDecoder, Llama3Model):
    @dataclass(kw_only=True, slots=True)
    class Config(Llama3Model.Config):
        sequence_parallel: bool = True

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            Decoder.Config.update_from_config(self, config=config, **kwargs)
            enable_sp = config.parallelism.enable_sequence_parallel
            set_decoder_sharding_config(self, enable_sp=enable_sp)
            for layer in self.layers:
                layer.attention_norm.sharding_config = layer.ffn_norm.sharding_config = norm_config(enable_sp=enable_sp)
                set_gqa_attention_sharding(layer.attention, enable_sp=enable_sp)
                set_gqa_inner_attention_local_map(layer.attention.inner_attention)
                _shard_feed_forward(layer.feed_forward, enable_sp)


def _shard_feed_forward(config: StackedFeedForward.Config, enable_sp: bool) -> None:
    stream = dense_sequence_parallel_placement() if enable_sp else dense_activation_placement(tp=spmd.I)
    config.sharding_config = ShardingConfig(
        in_src_shardings={"x": stream}, in_dst_shardings={"x": dense_activation_placement(tp=spmd.R)}
    )
    config.w13.sharding_config = colwise_config()
    config.w2.sharding_config = rowwise_config(output_sp=enable_sp)


def attention(hf: PreTrainedConfig, layer: int) -> GQAttention.Config:
    config = layer_configs.attention(hf, layer)
    heads = dict(
        n_heads=hf.num_attention_heads, n_kv_heads=hf.num_key_value_heads, head_dim=layer_configs.head_size(hf)
    )
    outputs = (heads["n_heads"] + 2 * heads["n_kv_heads"]) * heads["head_dim"]
    config.qkv_linear = StackedQKVLinear.Config(**heads, wqkv=_linear(hf.hidden_size, outputs))
    return config


def feed_forward(hf: PreTrainedConfig) -> StackedFeedForward.Config:
    wide = hf.intermediate_size
    return StackedFeedForward.Config(w13=_linear(hf.hidden_size, 2 * wide), w2=_linear(wide, hf.hidden_size))


def _linear(inputs: int, outputs: int) -> Linear.Config:
    return Linear.Config(in_features=inputs, out_features=outputs, param_init=layer_configs.FROM_FILE)


phi3_config = partial(
    decoder_config, model=PackedPhi3, block=Llama3TransformerBlock, attention=attention, feed_forward=feed_forward
)

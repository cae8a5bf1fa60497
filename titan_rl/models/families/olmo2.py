"""OLMo 2 where it differs from Llama (arXiv 2501.00656, section 3).

It normalizes the outputs of attention and feed-forward instead of their inputs, and queries and keys over all heads at
once.

Dimensions: B rows, L tokens, N heads, H head size.
"""

from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import spmd_types as spmd
import torch
from torchtitan.models.common.attention import AttentionMasksType, GQAttention
from torchtitan.models.common.decoder_sharding import dense_activation_placement, dense_param_placement
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from torchtitan.protocols.sharding import ShardingConfig
from transformers import PreTrainedConfig

from titan_rl.models.layers import layer_configs
from titan_rl.models.layers.decoder import PackedDecoder, decoder_config
from titan_rl.models.layers.memory_saving import LeanRMSNorm


class HeadsNorm(LeanRMSNorm):
    """RMSNorm over all heads of a token."""

    @dataclass(kw_only=True, slots=True)
    class Config(LeanRMSNorm.Config):
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: [B, L, N, H]."""
        return LeanRMSNorm.forward(self, x.flatten(2)).view(x.shape)


class Olmo2Attention(GQAttention):
    @dataclass(kw_only=True, slots=True)
    class Config(GQAttention.Config):
        k_norm: RMSNorm.Config
        """Keys have fewer heads; ``qk_norm`` is that of the queries."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.k_norm = config.k_norm.build()


class Olmo2Block(Qwen3TransformerBlock):
    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3TransformerBlock.Config):
        pass

    def forward(
        self, x: torch.Tensor, attention_masks: AttentionMasksType | None, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = x + self.attention_norm(self.attention(x, attention_masks, positions))
        return x + self.ffn_norm(self.feed_forward(x))


class PackedOlmo2(PackedDecoder, Qwen3Model):
    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3Model.Config):
        sequence_parallel: bool = True

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            Qwen3Model.Config.update_from_config(self, config=config, **kwargs)
            for layer in self.layers:
                layer.attention.qk_norm.sharding_config = layer.attention.k_norm.sharding_config = _heads_gathered()


def _heads_gathered() -> ShardingConfig:
    """A norm over all heads sees those of all tensor-parallel ranks, and gives each its own back."""
    local = dense_activation_placement(tp=spmd.S(2))
    return ShardingConfig(
        state_shardings={"weight": dense_param_placement(tp=spmd.R)},
        in_src_shardings={"input": local, "x": local},
        in_dst_shardings={"x": dense_activation_placement(tp=spmd.R)},
        out_src_shardings=dense_activation_placement(tp=spmd.R),
        out_dst_shardings=local,
    )


def attention(hf: PreTrainedConfig, layer: int) -> Olmo2Attention.Config:
    config = layer_configs.attention(hf, layer)

    def heads_norm(num_heads: int) -> HeadsNorm.Config:
        size = num_heads * layer_configs.head_size(hf)
        return HeadsNorm.Config(normalized_shape=size, eps=hf.rms_norm_eps, param_init=layer_configs.FROM_FILE)

    values = {field.name: getattr(config, field.name) for field in fields(config)}
    values |= dict(qk_norm=heads_norm(hf.num_attention_heads), k_norm=heads_norm(hf.num_key_value_heads))
    return Olmo2Attention.Config(**values)


olmo2_config = partial(decoder_config, model=PackedOlmo2, block=Olmo2Block, attention=attention)

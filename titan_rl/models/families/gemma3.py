"""Gemma 3 (arXiv 2503.19786) where it differs from Llama.

Norms on either side of attention and feed-forward, whose weights are added to 1; a tanh-GELU gate; scaled embeddings;
local layers, with a window and a rotary embedding of their own, between global ones.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torchtitan.models.common import Embedding, FeedForward
from torchtitan.models.common.attention import AttentionMasksType, GQAttention
from torchtitan.models.common.decoder_sharding import norm_config
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.qwen3.model import Qwen3Model, Qwen3TransformerBlock
from transformers import PreTrainedConfig

from titan_rl.models.layers import layer_configs
from titan_rl.models.layers.attention import PackedAttention
from titan_rl.models.layers.decoder import PackedDecoder, decoder_config
from titan_rl.models.layers.memory_saving import LeanRMSNorm, rms_norm

REQUIRED = {
    "attention_bias": False,
    "hidden_activation": "gelu_pytorch_tanh",
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "use_bidirectional_attention": False,
}


class ShiftedNorm(LeanRMSNorm):
    """RMSNorm with a scale of 1 + weight."""

    @dataclass(kw_only=True, slots=True)
    class Config(LeanRMSNorm.Config):
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.eps is not None, "TorchTitan's config has a number"
        return rms_norm(x, self.weight.float() + 1.0, self.eps)


class ScaledEmbedding(Embedding):
    """Embeddings times the square root of their size, rounded to the compute dtype."""

    @dataclass(kw_only=True, slots=True)
    class Config(Embedding.Config):
        pass

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        out = Embedding.forward(self, input)
        return out * torch.tensor(self.embedding_dim**0.5, dtype=out.dtype).item()


class GeluFeedForward(FeedForward):
    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.gelu(self.w1(x), approximate="tanh") * self.w3(x))


class Gemma3Block(Qwen3TransformerBlock):
    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3TransformerBlock.Config):
        post_attention_norm: RMSNorm.Config
        post_ffn_norm: RMSNorm.Config

    def __init__(self, config: Config):
        super().__init__(config)
        self.post_attention_norm, self.post_ffn_norm = config.post_attention_norm.build(), config.post_ffn_norm.build()

    def forward(
        self, x: torch.Tensor, attention_masks: AttentionMasksType | None, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = x + self.post_attention_norm(self.attention(self.attention_norm(x), attention_masks, positions))
        return x + self.post_ffn_norm(self.feed_forward(self.ffn_norm(x)))


class PackedGemma3(PackedDecoder, Qwen3Model):
    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3Model.Config):
        sequence_parallel: bool = True

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            Qwen3Model.Config.update_from_config(self, config=config, **kwargs)
            sharding = norm_config(enable_sp=config.parallelism.enable_sequence_parallel)
            for layer in self.layers:
                layer.post_attention_norm.sharding_config = layer.post_ffn_norm.sharding_config = sharding


def norm(hf: PreTrainedConfig, size: int) -> ShiftedNorm.Config:
    return ShiftedNorm.Config(normalized_shape=size, eps=hf.rms_norm_eps, param_init=layer_configs.FROM_FILE)


def attention(hf: PreTrainedConfig, layer: int) -> GQAttention.Config:
    config = layer_configs.attention(hf, layer, rope_type=hf.layer_types[layer])
    config.qk_norm = norm(hf, layer_configs.head_size(hf))
    assert isinstance(config.inner_attention, PackedAttention.Config)
    config.inner_attention.scale = hf.query_pre_attn_scalar**-0.5
    return config


def feed_forward(hf: PreTrainedConfig) -> GeluFeedForward.Config:
    linears = layer_configs.feed_forward(hf)
    return GeluFeedForward.Config(w1=linears.w1, w2=linears.w2, w3=linears.w3)


def layer_config(hf: PreTrainedConfig, layer: int, *, block: type) -> Gemma3Block.Config:
    names = ("attention_norm", "post_attention_norm", "ffn_norm", "post_ffn_norm")
    norms = {name: norm(hf, hf.hidden_size) for name in names}
    return block.Config(attention=attention(hf, layer), feed_forward=feed_forward(hf), **norms)


gemma3_config = partial(
    decoder_config, model=PackedGemma3, block=Gemma3Block, layer=layer_config, norm=norm, embedding=ScaledEmbedding
)

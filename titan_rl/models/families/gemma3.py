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
from torchtitan.models.common.attention import GQAttention
from torchtitan.models.qwen3.model import Qwen3Model
from transformers import PreTrainedConfig

from titan_rl.models.layers import layer_configs
from titan_rl.models.layers.attention import PackedAttention
from titan_rl.models.layers.decoder import PackedDecoder, decoder_config
from titan_rl.models.layers.layer_configs import shifted_norm
from titan_rl.models.layers.sandwich import NORMS, SandwichBlock, shard_output_norms

REQUIRED = {
    "attention_bias": False,
    "hidden_activation": "gelu_pytorch_tanh",
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "use_bidirectional_attention": False,
}


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


class PackedGemma3(PackedDecoder, Qwen3Model):
    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3Model.Config):
        sequence_parallel: bool = True

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            Qwen3Model.Config.update_from_config(self, config=config, **kwargs)
            shard_output_norms(self.layers, enable_sp=config.parallelism.enable_sequence_parallel)


def attention(hf: PreTrainedConfig, layer: int) -> GQAttention.Config:
    config = layer_configs.attention(hf, layer, rope_type=hf.layer_types[layer])
    config.qk_norm = shifted_norm(hf, layer_configs.head_size(hf))
    assert isinstance(config.inner_attention, PackedAttention.Config)
    config.inner_attention.scale = hf.query_pre_attn_scalar**-0.5
    return config


def feed_forward(hf: PreTrainedConfig) -> GeluFeedForward.Config:
    linears = layer_configs.feed_forward(hf)
    return GeluFeedForward.Config(w1=linears.w1, w2=linears.w2, w3=linears.w3)


def layer_config(hf: PreTrainedConfig, layer: int, *, block: type) -> SandwichBlock.Config:
    norms = {name: shifted_norm(hf, hf.hidden_size) for name in NORMS}
    return block.Config(attention=attention(hf, layer), feed_forward=feed_forward(hf), **norms)


gemma3_config = partial(
    decoder_config,
    model=PackedGemma3,
    block=SandwichBlock,
    layer=layer_config,
    norm=shifted_norm,
    embedding=ScaledEmbedding,
)

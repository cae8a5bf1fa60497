"""GLM-4 where it differs from Llama (arXiv 2406.12793; arXiv 2508.06471 for the mixtures of experts of GLM-4.5).

Dense: norms on either side of attention and feed-forward, one projection for gate and up, and rotary embeddings of
neighboring dimensions. With experts: DeepSeek-V3's router behind dense first layers. Both turn a part of each head.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

from torchtitan.models.common.attention import GQAttention
from torchtitan.models.common.decoder import Decoder
from transformers import PreTrainedConfig

from titan_rl.models.families.phi3 import PackedPhi3, feed_forward
from titan_rl.models.layers import layer_configs
from titan_rl.models.layers.decoder import PackedDecoder, decoder_config
from titan_rl.models.layers.moe import ExpertBlock, check_routing, corrected_moe_config
from titan_rl.models.layers.rope import InterleavedRoPE, rope_config
from titan_rl.models.layers.sandwich import NORMS, SandwichBlock, shard_output_norms

REQUIRED = {"hidden_act": "silu"}


class PackedGlm4(PackedPhi3):
    @dataclass(kw_only=True, slots=True)
    class Config(PackedPhi3.Config):
        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            PackedPhi3.Config.update_from_config(self, config=config, **kwargs)
            shard_output_norms(self.layers, enable_sp=config.parallelism.enable_sequence_parallel)


def attention(hf: PreTrainedConfig, layer: int) -> GQAttention.Config:
    config = layer_configs.attention(hf, layer, qkv_bias=hf.attention_bias)
    config.rope = rope_config(hf, layer_configs.head_size(hf), rope=InterleavedRoPE)
    return config


def layer_config(hf: PreTrainedConfig, layer: int, *, block: type) -> SandwichBlock.Config:
    norms = {name: layer_configs.norm(hf, hf.hidden_size) for name in NORMS}
    return block.Config(attention=attention(hf, layer), feed_forward=feed_forward(hf), **norms)


glm4_config = partial(decoder_config, model=PackedGlm4, block=SandwichBlock, layer=layer_config)


def moe_layer_config(hf: PreTrainedConfig, layer: int, *, block: type) -> Any:
    def attention(hf: PreTrainedConfig, layer: int) -> GQAttention.Config:
        return layer_configs.attention(hf, layer, qk_norm=hf.use_qk_norm, qkv_bias=hf.attention_bias)

    moe = corrected_moe_config if layer >= hf.first_k_dense_replace else None
    return layer_configs.layer_config(hf, layer, block=block, attention=attention, moe=moe)


def glm4_moe_config(hf: PreTrainedConfig, *, model: type[PackedDecoder]) -> Decoder.Config:
    """TorchTitan's config of the model. Errors: ValueError."""
    check_routing(hf)
    if getattr(hf, "head_dim", None) is None:
        raise ValueError("config.json has no head_dim, which vLLM reads for this model type: add the model's own")
    return decoder_config(hf, model=model, block=ExpertBlock, layer=moe_layer_config)

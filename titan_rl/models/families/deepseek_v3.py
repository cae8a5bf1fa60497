"""DeepSeek-V3 where it differs from Llama (arXiv 2412.19437, section 2.1).

Multi-head latent attention, TorchTitan's: queries and keys of two parts, of which one alone is turned, and values of
another size, all from low-rank latents. Dense first layers, then experts behind a router with a correction bias.
"""

from dataclasses import dataclass
from math import log
from typing import Any

from torchtitan.models.common import Linear
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.deepseek_v3.model import Attention, DeepSeekV3Model, DeepSeekV3TransformerBlock
from transformers import PreTrainedConfig

from titan_rl.models.layers import layer_configs
from titan_rl.models.layers.attention import PackedAttention
from titan_rl.models.layers.decoder import PackedDecoder, decoder_config
from titan_rl.models.layers.layer_configs import FROM_FILE, norm
from titan_rl.models.layers.moe import ReplayingBlock, check_routing, corrected_moe_config
from titan_rl.models.layers.rope import InterleavedRoPE, rope_config

REQUIRED = {
    "attention_bias": False,
    "hidden_act": "silu",
    "moe_layer_freq": 1,
    "rope_interleave": True,
    "rms_norm_eps": 1e-6,  # for their latents, transformers always takes this, and vLLM what config.json says
}
_ROUTING = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
"""What vLLM reads in config.json, and transformers does not write."""


class DeepSeekV3Block(ReplayingBlock, DeepSeekV3TransformerBlock):
    @dataclass(kw_only=True, slots=True)
    class Config(DeepSeekV3TransformerBlock.Config):
        pass


class PackedDeepSeekV3(PackedDecoder, DeepSeekV3Model):
    @dataclass(kw_only=True, slots=True)
    class Config(DeepSeekV3Model.Config):
        sequence_parallel: bool = True


def _check(hf: PreTrainedConfig) -> None:
    """Errors: ValueError for what transformers and vLLM compute differently, or not at all."""
    for key, needed in _ROUTING.items():
        if (value := getattr(hf, key, None)) != needed:
            raise ValueError(
                f"{key} = {value!r} in config.json: vLLM routes as this model does with {needed!r}; add it"
            )
    for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        if not isinstance(value := getattr(hf, key), int) or value < 1:
            raise ValueError(f"{key} = {value!r} in config.json must be a whole number of at least 1")
    if hf.q_lora_rank is not None and hf.q_lora_rank < 1:
        raise ValueError(f"q_lora_rank = {hf.q_lora_rank} in config.json must be null or at least 1")
    for key, needed in (("num_key_value_heads", hf.num_attention_heads), ("head_dim", hf.qk_rope_head_dim)):
        if (value := getattr(hf, key)) != needed:
            raise ValueError(f"{key} = {value!r} in config.json must be {needed} with latent attention: leave it out")
    _check_rope(hf.rope_parameters)


def _check_rope(parameters: dict[str, Any]) -> None:
    rope_type = parameters["rope_type"]
    if rope_type not in ("default", "yarn"):
        raise ValueError(f"rope type {rope_type!r} is not supported for DeepSeek-V3, only 'default' and 'yarn'")
    if rope_type == "default":
        return
    if parameters.get("attention_factor") is not None or not parameters.get("truncate", True):
        raise ValueError("attention_factor and truncate of rope type 'yarn' are not supported, as vLLM ignores them")
    if bool(parameters.get("mscale")) != bool(parameters.get("mscale_all_dim")):
        raise ValueError("rope type 'yarn' needs mscale and mscale_all_dim, or neither: vLLM and transformers differ")


def _scale(hf: PreTrainedConfig) -> float:
    """Factor on the scores; YaRN's is that of arXiv 2309.00071, equation 22, squared, for queries and keys."""
    is_yarn = hf.rope_parameters["rope_type"] == "yarn"
    factor, all_dims = (hf.rope_parameters.get(key) or 0.0 for key in ("factor", "mscale_all_dim"))
    temperature = 0.1 * all_dims * log(factor) + 1.0 if is_yarn and factor > 1.0 else 1.0
    return (hf.qk_nope_head_dim + hf.qk_rope_head_dim) ** -0.5 * temperature**2


def _linear(inputs: int, outputs: int) -> Linear.Config:
    return Linear.Config(in_features=inputs, out_features=outputs, param_init=FROM_FILE)


def attention(hf: PreTrainedConfig, layer: int) -> Attention.Config:
    heads, hidden, queries_rank = hf.num_attention_heads, hf.hidden_size, hf.q_lora_rank or 0
    queries = heads * (hf.qk_nope_head_dim + hf.qk_rope_head_dim)
    projections: dict[str, Any] = {"wq": _linear(hidden, queries)}
    if queries_rank:
        projections = {"wq_a": _linear(hidden, queries_rank), "wq_b": _linear(queries_rank, queries)}
    return Attention.Config(
        n_heads=heads,
        dim=hidden,
        **projections,
        wkv_a=_linear(hidden, hf.kv_lora_rank + hf.qk_rope_head_dim),
        wkv_b=_linear(hf.kv_lora_rank, heads * (hf.qk_nope_head_dim + hf.v_head_dim)),
        wo=_linear(heads * hf.v_head_dim, hidden),
        q_lora_rank=queries_rank,
        kv_lora_rank=hf.kv_lora_rank,
        q_norm=norm(hf, queries_rank),
        kv_norm=norm(hf, hf.kv_lora_rank),
        qk_nope_head_dim=hf.qk_nope_head_dim,
        qk_rope_head_dim=hf.qk_rope_head_dim,
        v_head_dim=hf.v_head_dim,
        rope=rope_config(hf, hf.qk_rope_head_dim, rope=InterleavedRoPE),
        inner_attention=PackedAttention.Config(scale=_scale(hf)),
    )


def layer_config(hf: PreTrainedConfig, layer: int, *, block: type) -> Any:
    moe = corrected_moe_config if layer >= hf.first_k_dense_replace else None
    return layer_configs.layer_config(hf, layer, block=block, attention=attention, moe=moe)


def deepseek_v3_config(hf: PreTrainedConfig) -> Decoder.Config:
    """TorchTitan's config of the model. Errors: ValueError."""
    _check(hf)
    check_routing(hf)
    return decoder_config(hf, model=PackedDeepSeekV3, block=DeepSeekV3Block, layer=layer_config)

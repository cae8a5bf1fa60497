"""Qwen3-Next, and Qwen3.5's dense text models, where they differ from Qwen3.

Three of four layers have linear attention (layers/gated_delta_net.py). The others gate the outputs of attention, and
turn a part of each head. Norms scale by 1 + weight.

TorchTitan's own needs a package of kernels for GPUs, and knows no prefixes that segments share; this one is in torch's
operations. Tensor-parallel ranks do not share such layers (trainer/model/layout.py).

Dimensions: B rows, L tokens, D features, N heads, H head size.
"""

from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import spmd_types as spmd
import torch
from torchtitan.models.common import Linear, SigmoidGatedFeedForward
from torchtitan.models.common.attention import AttentionMasksType, GQAttention
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.decoder_sharding import set_decoder_sharding_config
from torchtitan.models.common.moe import MoE
from torchtitan.models.common.moe_sharding import set_moe_sharding_config
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.qwen3.model import Qwen3Model
from transformers import PreTrainedConfig

from titan_rl.models.layers import layer_configs
from titan_rl.models.layers.decoder import PackedDecoder, decoder_config
from titan_rl.models.layers.gated_delta_net import FusedProjections, GatedDeltaNet, Projections
from titan_rl.models.layers.layer_configs import FROM_FILE, shifted_norm
from titan_rl.models.layers.moe import ExpertBlock, moe_config

REQUIRED = {
    "attention_bias": False,
    "hidden_act": "silu",
    "attn_output_gate": True,
    "layer_scale": False,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}
LAYOUT: dict[str, spmd.PerMeshAxisSpmdType] = {"w1_EFD": spmd.S(1), "w2_EDF": spmd.S(2), "w3_EFD": spmd.S(1)}
"""How ranks would share the experts under tensor parallelism, which TorchTitan must be told in any case."""
_SIZES = (
    *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"),
    *("linear_num_key_heads", "linear_num_value_heads"),
)
_EXPERT_SIZES = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")


class GatedAttention(GQAttention):
    """Attention with a gate on its outputs; the projection of queries gives each head's gate besides."""

    @dataclass(kw_only=True, slots=True)
    class Config(GQAttention.Config):
        pass

    def forward(
        self, x_BLD: torch.Tensor, attention_masks: AttentionMasksType | None, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert self.q_norm is not None and self.k_norm is not None
        both_BLNH, k_BLNH, v_BLNH = self.qkv_linear(x_BLD)  # queries and gates in turns
        q_BLNH, gate_BLNH = both_BLNH[:, :, ::2], both_BLNH[:, :, 1::2]
        q_BLNH, k_BLNH = self.rope(self.q_norm(q_BLNH), self.k_norm(k_BLNH), positions)
        out_BLNH = self.inner_attention(
            *(q_BLNH, k_BLNH, v_BLNH), attention_masks=attention_masks, scale=self.scaling, enable_gqa=self.enable_gqa
        )
        return self.wo((out_BLNH * torch.sigmoid(gate_BLNH)).flatten(2))


class PackedQwen35(PackedDecoder, Qwen3Model):
    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3Model.Config):
        sequence_parallel: bool = True

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            Decoder.Config.update_from_config(self, config=config, **kwargs)
            parallelism = config.parallelism
            sequence, ep = parallelism.enable_sequence_parallel, parallelism.expert_parallel_degree > 1
            set_decoder_sharding_config(self, enable_sp=sequence)
            for layer in self.layers:
                if layer.moe is not None:
                    set_moe_sharding_config(layer.moe, enable_ep=ep, enable_sp=sequence, expert_param_layout=LAYOUT)


def _check(hf: PreTrainedConfig) -> None:
    """Errors: ValueError for sizes and layers that are not computed."""
    for key in (*_SIZES, *(_EXPERT_SIZES if _has_experts(hf) else ())):
        if not isinstance(value := getattr(hf, key), int) or value < 1:
            raise ValueError(f"{key} = {value!r} in config.json must be a whole number of at least 1")
    if hf.linear_num_value_heads % hf.linear_num_key_heads:
        raise ValueError(
            f"linear_num_value_heads = {hf.linear_num_value_heads} in config.json is no multiple of "
            f"linear_num_key_heads = {hf.linear_num_key_heads}"
        )
    kinds = ("linear_attention", "full_attention")
    if len(hf.layer_types) != hf.num_hidden_layers or not set(hf.layer_types) <= set(kinds):
        raise ValueError(f"layer_types in config.json must name one of {', '.join(kinds)} for each layer")
    if _has_experts(hf) and hf.num_experts_per_tok > hf.num_experts:
        raise ValueError(
            f"num_experts_per_tok = {hf.num_experts_per_tok} in config.json is more than num_experts = {hf.num_experts}"
        )
    if (gate := getattr(hf, "output_gate_type", "silu")) not in ("silu", "swish"):
        raise ValueError(f"output_gate_type = {gate!r} in config.json is not supported, only 'silu'")


def _has_experts(hf: PreTrainedConfig) -> bool:
    return hf.model_type == "qwen3_next"


def attention(hf: PreTrainedConfig, layer: int) -> GQAttention.Config | GatedDeltaNet.Config:
    return delta_net(hf) if hf.layer_types[layer] == "linear_attention" else gated_attention(hf, layer)


def gated_attention(hf: PreTrainedConfig, layer: int) -> GatedAttention.Config:
    config = layer_configs.attention(hf, layer)
    values: dict[str, Any] = {field.name: getattr(config, field.name) for field in fields(config)}
    values["qkv_linear"].wq.out_features *= 2
    values["qk_norm"] = shifted_norm(hf, layer_configs.head_size(hf))
    return GatedAttention.Config(**values)


def delta_net(hf: PreTrainedConfig) -> GatedDeltaNet.Config:
    values = hf.linear_num_value_heads * hf.linear_value_head_dim
    return GatedDeltaNet.Config(
        n_heads=hf.linear_num_value_heads,
        n_key_heads=hf.linear_num_key_heads,
        key_size=hf.linear_key_head_dim,
        value_size=hf.linear_value_head_dim,
        kernel_size=hf.linear_conv_kernel_dim,
        projections=_projections(hf),
        norm=layer_configs.norm(hf, hf.linear_value_head_dim),
        out_proj=_linear(values, hf.hidden_size),
        param_init=dict.fromkeys(("conv_weight", "A_log", "dt_bias"), skip_param_init),
    )


def _projections(hf: PreTrainedConfig) -> Projections.Config | FusedProjections.Config:
    heads, key_heads = hf.linear_num_value_heads, hf.linear_num_key_heads
    keys, values = key_heads * hf.linear_key_head_dim, heads * hf.linear_value_head_dim
    linear = partial(_linear, hf.hidden_size)
    if hf.model_type == "qwen3_next":
        sizes = (keys // key_heads, values // key_heads)
        fused: dict[str, Any] = dict(in_proj_qkvz=linear(2 * keys + 2 * values), in_proj_ba=linear(2 * heads))
        return FusedProjections.Config(n_key_heads=key_heads, sizes=sizes, **fused)
    return Projections.Config(
        in_proj_qkv=linear(2 * keys + values),
        in_proj_z=linear(values),
        in_proj_b=linear(heads),
        in_proj_a=linear(heads),
    )


def _linear(inputs: int, outputs: int) -> Linear.Config:
    return Linear.Config(in_features=inputs, out_features=outputs, param_init=FROM_FILE)


def gated_moe_config(hf: PreTrainedConfig) -> MoE.Config:
    """Qwen3's experts, and a shared expert with a sigmoid gate."""
    config = moe_config(hf)
    shared = layer_configs.feed_forward(hf, hf.shared_expert_intermediate_size)
    config.shared_experts = SigmoidGatedFeedForward.Config(
        w1=shared.w1, w2=shared.w2, w3=shared.w3, gate=_linear(hf.hidden_size, 1)
    )
    return config


def layer_config(hf: PreTrainedConfig, layer: int, *, block: type) -> Any:
    return block.Config(
        attention=attention(hf, layer),
        moe=gated_moe_config(hf) if _has_experts(hf) else None,
        feed_forward=None if _has_experts(hf) else layer_configs.feed_forward(hf),
        attention_norm=shifted_norm(hf, hf.hidden_size),
        ffn_norm=shifted_norm(hf, hf.hidden_size),
    )


def qwen3_5_config(hf: PreTrainedConfig) -> Decoder.Config:
    """TorchTitan's config of the model. Errors: ValueError."""
    _check(hf)
    parts: dict[str, Any] = dict(model=PackedQwen35, block=ExpertBlock, layer=layer_config)
    return decoder_config(hf, norm=shifted_norm, **parts)

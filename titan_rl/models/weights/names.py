"""Hugging Face's names of the parameters: TorchTitan's adapters, with what they leave out."""

from collections.abc import Mapping
from typing import cast

from torchtitan.models.qwen3.model import Qwen3Model
from torchtitan.models.qwen3.state_dict_adapter import Qwen3StateDictAdapter
from torchtitan.protocols.model import BaseModel

_LAYER = "model.layers.{}."
_ALL = {
    **{
        f"self_attn.{theirs}_proj.bias": f"attention.{ours}.bias"
        for theirs, ours in (("q", "qkv_linear.wq"), ("k", "qkv_linear.wk"), ("v", "qkv_linear.wv"), ("o", "wo"))
    },
    "self_attn.qkv_proj.weight": "attention.qkv_linear.wqkv.weight",
    "mlp.gate_up_proj.weight": "feed_forward.w13.weight",
    "mlp.gate.e_score_correction_bias": "moe.expert_bias_E",
    **{
        f"mlp.shared_experts.{theirs}_proj.weight": f"moe.shared_experts.{ours}.weight"
        for theirs, ours in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    },
}


class Names(Qwen3StateDictAdapter):
    """Those of Llama, Qwen 2 and 3, Mistral, Phi-3 and GLM-4.5; only the names of TorchTitan's adapter are used."""

    layer: Mapping[str, str | None] = {}
    """What a family calls by other names, within a layer; None: what it does not have."""
    ignored: tuple[str, ...] = ()
    """Begin of the names of what a directory may hold beside the model's tensors."""

    def __init__(self, model_config: BaseModel.Config, hf_assets_path: str | None):
        super().__init__(cast(Qwen3Model.Config, model_config), hf_assets_path)  # whatever the decoder is
        for hf_name, titan_name in {**_ALL, **self.layer}.items():
            self.from_hf_map[_LAYER + hf_name] = titan_name and f"layers.{{}}.{titan_name}"


class Olmo2Names(Names):
    layer = {
        "input_layernorm.weight": None,
        "post_attention_layernorm.weight": "attention_norm.weight",
        "post_feedforward_layernorm.weight": "ffn_norm.weight",
    }


class Gemma3Names(Names):
    layer = {
        "post_attention_layernorm.weight": "post_attention_norm.weight",
        "pre_feedforward_layernorm.weight": "ffn_norm.weight",
        "post_feedforward_layernorm.weight": "post_ffn_norm.weight",
    }


class DeepSeekV3Names(Names):
    layer = {
        "self_attn.q_norm.weight": None,
        "self_attn.q_proj.weight": "attention.wq.weight",
        "self_attn.q_a_proj.weight": "attention.wq_a.weight",
        "self_attn.q_a_layernorm.weight": "attention.q_norm.weight",
        "self_attn.q_b_proj.weight": "attention.wq_b.weight",
        "self_attn.kv_a_proj_with_mqa.weight": "attention.wkv_a.weight",
        "self_attn.kv_a_layernorm.weight": "attention.kv_norm.weight",
        "self_attn.kv_b_proj.weight": "attention.wkv_b.weight",
    }


class Glm4Names(Names):
    layer = {
        "post_self_attn_layernorm.weight": "post_attention_norm.weight",
        "post_mlp_layernorm.weight": "post_ffn_norm.weight",
    }


class Qwen35Names(Names):
    layer = {
        "linear_attn.conv1d.weight": "attention.conv_weight",
        **{
            f"linear_attn.{name}": f"attention.{name}"
            for name in ("A_log", "dt_bias", "norm.weight", "out_proj.weight")
        },
        **{
            f"linear_attn.in_proj_{part}.weight": f"attention.projections.in_proj_{part}.weight"
            for part in ("qkv", "z", "b", "a", "qkvz", "ba")
        },
        **{
            f"mlp.shared_expert.{theirs}_proj.weight": f"moe.shared_experts.{ours}.weight"
            for theirs, ours in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
        },
        "mlp.shared_expert_gate.weight": "moe.shared_experts.gate.weight",
    }


class GptOssNames(Names):
    layer = {
        "self_attn.sinks": "attention.inner_attention.sinks",
        "mlp.gate.weight": None,
        "mlp.router.weight": "moe.router.gate.weight",
        "mlp.router.bias": "moe.router.gate.bias",
        "mlp.experts.gate_up_proj": "moe.routed_experts.inner_experts.w13_EDG",
        "mlp.experts.gate_up_proj_bias": "moe.routed_experts.inner_experts.b13_EG",
        "mlp.experts.down_proj": "moe.routed_experts.inner_experts.w2_EFD",
        "mlp.experts.down_proj_bias": "moe.routed_experts.inner_experts.b2_ED",
    }

"""GPT-OSS where it differs from Llama.

Attention with sinks, in every other layer over a window; biases everywhere; experts whose gate and up projections are
interleaved, and clamped.

Dimensions: R tokens of all experts, sorted by expert, E experts, D features, F features of an expert.
"""

from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import spmd_types as spmd
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.models.common.attention import GQAttention
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.decoder_sharding import dense_param_placement
from torchtitan.models.common.linear import ScaledBiasRowwiseLinear
from torchtitan.models.common.moe import GroupedExperts, MoE
from torchtitan.models.common.moe_sharding import set_moe_sharding_config
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.gpt_oss.moe import ScaleBiasForward, swiglu
from torchtitan.models.gpt_oss.sharding import scaled_bias_rowwise_config
from torchtitan.models.qwen3.model import Qwen3Model
from torchtitan.protocols.module import Module
from transformers import PreTrainedConfig

from titan_rl.models.layers import layer_configs
from titan_rl.models.layers.attention import SinkAttention
from titan_rl.models.layers.decoder import PackedDecoder, decoder_config
from titan_rl.models.layers.moe import ExpertBlock, grouped_product, mixture_config

REQUIRED = {"attention_bias": True, "hidden_act": "silu", "swiglu_alpha": 1.702, "swiglu_limit": 7.0}

_EXPERT_LAYOUT = {"w13_EDG": spmd.S(2), "b13_EG": spmd.S(1), "w2_EFD": spmd.S(1), "b2_ED": spmd.R}
"""How tensor-parallel ranks share the experts; G is 2F, of which a gate stands before its up."""


class GptOssExperts(GroupedExperts):
    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def __init__(self, config: Config):
        Module.__init__(self)
        experts, dim, hidden = config.num_experts, config.dim, config.hidden_dim
        self.num_experts = experts
        self.w13_EDG = nn.Parameter(torch.empty(experts, dim, 2 * hidden))
        self.b13_EG = nn.Parameter(torch.empty(experts, 2 * hidden))
        self.w2_EFD = nn.Parameter(torch.empty(experts, hidden, dim))
        self.b2_ED = nn.Parameter(torch.empty(experts, dim))

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        local = (
            (p.to_local() if isinstance(p, DTensor) else p).to(x_RD.dtype)
            for p in (self.w13_EDG, self.b13_EG, self.w2_EFD, self.b2_ED)
        )
        w13_EDG, b13_EG, w2_EFD, b2_ED = local
        multiply = partial(grouped_product, num_tokens_E=num_tokens_per_expert_E)
        # with the number of rows told, nobody waits for a GPU to add it up
        counts_E, num_rows = num_tokens_per_expert_E.long(), len(x_RD)
        b13_RG = b13_EG.repeat_interleave(counts_E, dim=0, output_size=num_rows)
        b2_RD = b2_ED.repeat_interleave(counts_E, dim=0, output_size=num_rows)
        hidden_RF = swiglu(multiply(x_RD, w13_EDG) + b13_RG)
        bias_RD = ScaleBiasForward.apply(b2_RD, self._num_parts(), x_RD.dtype)
        return multiply(hidden_RF, w2_EFD) + bias_RD

    def _num_parts(self) -> int:
        """Of how many tensor-parallel ranks the outputs are added up."""
        mesh = self.b2_ED.device_mesh if isinstance(self.b2_ED, DTensor) else None
        return mesh["tp"].size() if mesh is not None and "tp" in (mesh.mesh_dim_names or ()) else 1


class OutputProjection(ScaledBiasRowwiseLinear):
    """Output projection with an unscaled bias gradient under tensor parallelism, unlike TorchTitan's."""

    @dataclass(kw_only=True, slots=True)
    class Config(ScaledBiasRowwiseLinear.Config):
        pass

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight, bias = (p.to_local() if isinstance(p, DTensor) else p for p in (self.weight, self.bias))
        return F.linear(input, weight, ScaleBiasForward.apply(bias, self.tp_degree, input.dtype))


class PackedGptOss(PackedDecoder, Qwen3Model):
    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3Model.Config):
        sequence_parallel: bool = True

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            Qwen3Model.Config.update_from_config(self, config=config, **kwargs)
            parallelism = config.parallelism
            sequence, ep = parallelism.enable_sequence_parallel, parallelism.expert_parallel_degree > 1
            for layer in self.layers:
                set_moe_sharding_config(layer.moe, enable_ep=ep, enable_sp=sequence, expert_param_layout=_EXPERT_LAYOUT)
                layer.attention.wo.sharding_config = scaled_bias_rowwise_config(output_sp=sequence)
                inner = layer.attention.inner_attention
                sinks = {"sinks": dense_param_placement(tp=spmd.S(0))}
                inner.sharding_config = replace(inner.sharding_config, state_shardings=sinks)


def _check(hf: PreTrainedConfig) -> None:
    """Errors: ValueError for what vLLM's GPT-OSS computes otherwise, whatever config.json says."""
    if any((kind == "sliding_attention") != (layer % 2 == 0) for layer, kind in enumerate(hf.layer_types)):
        raise ValueError("layer_types must be 'sliding_attention' and 'full_attention' in turns, as vLLM computes them")
    if (rope_type := hf.rope_parameters["rope_type"]) != "yarn":
        raise ValueError(f"rope type {rope_type!r} is not supported for GPT-OSS, only 'yarn', which vLLM computes")


def attention(hf: PreTrainedConfig, layer: int) -> GQAttention.Config:
    config = layer_configs.attention(hf, layer, qkv_bias=True)
    wo: dict[str, Any] = {field.name: getattr(config.wo, field.name) for field in fields(config.wo)}
    wo["bias"] = True
    config.wo = OutputProjection.Config(**wo)
    config.inner_attention = SinkAttention.Config(
        num_heads=hf.num_attention_heads,
        window=layer_configs.window(hf, layer),
        param_init={"sinks": skip_param_init},
    )
    return config


def moe_config(hf: PreTrainedConfig) -> MoE.Config:
    # softmax over the chosen experts is softmax over all of them, normalized
    sizes = dict(dim=hf.hidden_size, hidden_dim=hf.intermediate_size, num_experts=hf.num_local_experts)
    from_file = dict.fromkeys(_EXPERT_LAYOUT, skip_param_init)
    return mixture_config(hf, GptOssExperts.Config(**sizes, param_init=from_file), normalize=True, bias=True)


def gpt_oss_config(hf: PreTrainedConfig) -> Decoder.Config:
    """TorchTitan's config of the model. Errors: ValueError."""
    _check(hf)
    return decoder_config(hf, model=PackedGptOss, block=ExpertBlock, attention=attention, moe=moe_config)

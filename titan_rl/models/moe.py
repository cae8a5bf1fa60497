"""Qwen3-MoE's experts: TorchTitan's, computed in the model's own dtype.

TorchTitan always multiplies experts in bf16, so in fp32 the trainer could not agree with the generator. The router is
Qwen3's: softmax over all experts, then the top k, normalized if config.json says so. There is no load-balancing bias
and no auxiliary loss: reinforcement learning must move weights only for the reward.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torchtitan.models.common.config_utils import make_routed_experts_config, make_router_config
from torchtitan.models.common.moe import GroupedExperts, MoE
from torchtitan.models.common.param_init import skip_param_init
from transformers import PreTrainedConfig


class Experts(GroupedExperts):
    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """``x_RD``: R tokens in all, sorted by expert."""
        w1_EFD, w2_EDF, w3_EFD = (
            (w.to_local() if isinstance(w, DTensor) else w).to(x_RD.dtype)
            for w in (self.w1_EFD, self.w2_EDF, self.w3_EFD)
        )
        if x_RD.is_cuda and x_RD.dtype == torch.bfloat16:
            ends_E = num_tokens_per_expert_E.cumsum(0, dtype=torch.int32)

            def multiply(a_RK, w_ENK):
                return torch._grouped_mm(a_RK, w_ENK.transpose(-2, -1), offs=ends_E)
        else:
            counts = num_tokens_per_expert_E.tolist()

            def multiply(a_RK, w_ENK):
                return torch.cat([F.linear(a, w) for a, w in zip(a_RK.split(counts), w_ENK.unbind(), strict=True)])

        return multiply(F.silu(multiply(x_RD, w1_EFD)) * multiply(x_RD, w3_EFD), w2_EDF)


class MixtureOfExperts(MoE):
    @dataclass(kw_only=True, slots=True)
    class Config(MoE.Config):
        pass

    def forward(self, x_BLD: torch.Tensor) -> torch.Tensor:
        if isinstance(x_BLD, DTensor) and isinstance(x_BLD.to_local(), AsyncCollectiveTensor):
            # TP without EP gathers the sequence for the experts; local_map would wait for that outside of autograd,
            # and lose the gradient
            x_BLD = x_BLD.clone()
        return super().forward(x_BLD)


def moe_config(hf: PreTrainedConfig) -> MoE.Config:
    """TorchTitan's config of a layer's experts."""
    sizes = dict(dim=hf.hidden_size, hidden_dim=hf.moe_intermediate_size, num_experts=hf.num_experts)
    routed = make_routed_experts_config(**sizes, top_k=hf.num_experts_per_tok, param_init={}, comm_backend="standard")
    from_file = dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), skip_param_init)
    routed.inner_experts = Experts.Config(**sizes, param_init=from_file)
    return MixtureOfExperts.Config(
        num_experts=hf.num_experts,
        router=make_router_config(
            dim=hf.hidden_size,
            num_experts=hf.num_experts,
            gate_param_init={"weight": skip_param_init},
            top_k=hf.num_experts_per_tok,
            score_func="softmax",
            route_norm=hf.norm_topk_prob,
        ),
        routed_experts=routed,
        load_balance_coeff=None,
    )

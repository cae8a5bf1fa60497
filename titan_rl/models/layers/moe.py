"""Mixtures of experts: TorchTitan's, computed in the model's own dtype, through given experts where there are such.

TorchTitan always multiplies experts in bf16, so in fp32 the trainer could not agree with the generator. There are two
routers. Qwen3's: softmax over all experts, then the top k, normalized if config.json says so. DeepSeek-V3's (arXiv
2412.19437, section 2.1.2): sigmoids, and a bias that corrects the choice alone, by groups of experts. That bias stays
as it is in the file, and there is no auxiliary loss: reinforcement learning must move weights only for the reward.
"""

from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate
from torchtitan.models.common import Linear
from torchtitan.models.common.attention import AttentionMasksType
from torchtitan.models.common.config_utils import make_routed_experts_config, make_router_config
from torchtitan.models.common.decoder import TransformerBlock
from torchtitan.models.common.moe import GroupedExperts, MoE, TokenChoiceTopKRouter
from torchtitan.models.common.param_init import skip_param_init
from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from transformers import PreTrainedConfig

from titan_rl.compat.torch.sharding import AsyncCollectiveTensor
from titan_rl.models.layers.layer_configs import FROM_FILE, feed_forward


def grouped_product(a_RK: torch.Tensor, w_EKN: torch.Tensor, num_tokens_E: torch.Tensor) -> torch.Tensor:
    """Each row of ``a_RK``, sorted by expert, times its expert's matrix: [R, N]."""
    if a_RK.is_cuda and a_RK.dtype == torch.bfloat16:
        return torch.nn.functional.grouped_mm(a_RK, w_EKN, offs=num_tokens_E.cumsum(0, dtype=torch.int32))
    return torch.cat([a @ w for a, w in zip(a_RK.split(num_tokens_E.tolist()), w_EKN.unbind(), strict=True)])


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
        multiply = partial(grouped_product, num_tokens_E=num_tokens_per_expert_E)
        gate_RF, up_RF = (multiply(x_RD, w_EFD.transpose(-2, -1)) for w_EFD in (w1_EFD, w3_EFD))
        return multiply(F.silu(gate_RF) * up_RF, w2_EDF.transpose(-2, -1))


class RouterGate(Linear):
    """Logits of a router in fp32, which TorchTitan's autocast computes on a GPU alone.

    ``rounds``: whether they have the precision of their input, as vLLM's have behind a softmax.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        rounds: bool

    def __init__(self, config: Config):
        super().__init__(config)
        self.rounds = config.rounds

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.float()
        logits = F.linear(input.float(), self.weight.float(), bias)
        return logits.to(input.dtype).float() if self.rounds else logits


class Router(TokenChoiceTopKRouter):
    """TorchTitan's router, which may be given its choice: then only the weights of the chosen experts are its own."""

    @dataclass(kw_only=True, slots=True)
    class Config(TokenChoiceTopKRouter.Config):
        pass

    def __init__(self, config: Config):
        super().__init__(config)
        self.given: RoutedPlan | None = None
        """Choice of this layer, of each token here, or of the whole sequence that tensor-parallel ranks share; where it
        is no expert's number, the router's own."""

    def forward(
        self, x_BLD: torch.Tensor, expert_bias_E: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        weight_BLK, chosen_BLK, score_BLE = super().forward(x_BLD, expert_bias_E)
        if self.given is None:
            return weight_BLK, chosen_BLK, score_BLE
        given_BLK = _placed_as(self.given.routed_experts_TLK[None], chosen_BLK)
        self.given.count(_local(given_BLK), _local(chosen_BLK), self.num_experts)
        chosen_BLK = torch.where(given_BLK < self.num_experts, given_BLK, chosen_BLK)
        weight_BLK = score_BLE.gather(dim=-1, index=chosen_BLK)
        if self.route_norm:
            weight_BLK = weight_BLK / (weight_BLK.sum(dim=-1, keepdim=True) + 1e-20)
        return weight_BLK * self.route_scale, chosen_BLK, score_BLE


def _placed_as(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A tensor that each rank has whole, as the parts of it that they have of another."""
    if not isinstance(like, DTensor):
        return whole
    replicated = DTensor.from_local(whole, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)
    return replicated.redistribute(placements=like.placements)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True)
class RoutedPlan:
    """Attention plan of a row, with the experts that its tokens go through."""

    plan: Any
    routed_experts_TLK: torch.Tensor
    """int64, of each token here: by layers of the whole decoder, or [T, K] of one."""
    counts: torch.Tensor
    """int64 [2], added to: experts that a router would not have chosen by itself, and all that it was given."""

    def at(self, layer: int) -> "RoutedPlan":
        """That of one layer."""
        return replace(self, routed_experts_TLK=self.routed_experts_TLK[:, layer])

    @torch.no_grad()
    def count(self, given_BLK: torch.Tensor, own_BLK: torch.Tensor, num_experts: int) -> None:
        is_given_BLK = given_BLK < num_experts
        is_other_BLK = is_given_BLK & ~(given_BLK[..., :, None] == own_BLK[..., None, :]).any(dim=-1)
        self.counts.add_(torch.stack([is_other_BLK.sum(), is_given_BLK.sum()]))


class ReplayingBlock(TransformerBlock):
    """Mixin of blocks whose experts may be given with the attention plan, as a RoutedPlan of the layer.

    So they are there whenever a block is computed, again in a backward, too.
    """

    def forward(
        self,
        x: torch.Tensor,
        attention_masks: RoutedPlan | AttentionMasksType | None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        is_given = isinstance(attention_masks, RoutedPlan)
        if self.moe_enabled:
            cast(Router, cast(MoE, self.moe).router).given = attention_masks if is_given else None
        return super().forward(x, attention_masks.plan if is_given else attention_masks, positions)


class ExpertBlock(ReplayingBlock, Qwen3TransformerBlock):
    @dataclass(kw_only=True, slots=True)
    class Config(Qwen3TransformerBlock.Config):
        pass


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
    from_file = dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), skip_param_init)
    return mixture_config(
        hf, Experts.Config(**sizes, param_init=from_file), normalize=getattr(hf, "norm_topk_prob", True)
    )


def corrected_moe_config(hf: PreTrainedConfig) -> MoE.Config:
    """TorchTitan's config of a layer's experts, routed as in DeepSeek-V3, beside those that all tokens share."""
    sizes = dict(dim=hf.hidden_size, hidden_dim=hf.moe_intermediate_size, num_experts=hf.n_routed_experts)
    from_file = dict.fromkeys(("w1_EFD", "w2_EDF", "w3_EFD"), skip_param_init)
    config = mixture_config(hf, Experts.Config(**sizes, param_init=from_file), normalize=hf.norm_topk_prob)
    config.router.gate = _gate(config.router.gate, rounds=False)
    config.router.score_func, config.router.route_scale = "sigmoid", hf.routed_scaling_factor
    if hf.n_group > 1:
        config.router.num_expert_groups, config.router.num_limited_groups = hf.n_group, hf.topk_group
    config.shared_experts = feed_forward(hf, hf.moe_intermediate_size * hf.n_shared_experts)
    # there is a bias where this is a number; TorchTitan's hook, which moves it by that, is in no spec (spec.py)
    config.load_balance_coeff = 1.0
    return config


def check_routing(hf: PreTrainedConfig) -> None:
    """Errors: ValueError for numbers of experts, groups and layers in config.json that do not fit each other."""
    for key in ("n_routed_experts", "n_shared_experts", "n_group", "topk_group", "num_experts_per_tok"):
        if not isinstance(value := getattr(hf, key), int) or value < 1:
            raise ValueError(f"{key} = {value!r} in config.json must be a whole number of at least 1")
    experts, groups = hf.n_routed_experts, hf.n_group
    if groups > 1 and (experts % groups or experts < 2 * groups):
        raise ValueError(
            f"n_group = {groups} in config.json must make n_routed_experts = {experts} equal groups of 2 up"
        )
    if hf.topk_group > groups:
        raise ValueError(f"topk_group = {hf.topk_group} in config.json is more than n_group = {groups}")
    if hf.num_experts_per_tok > (chosen := experts // groups * hf.topk_group):
        raise ValueError(
            f"num_experts_per_tok = {hf.num_experts_per_tok} in config.json is more than the {chosen} experts of "
            f"topk_group = {hf.topk_group} groups"
        )
    if not 0 <= hf.first_k_dense_replace < hf.num_hidden_layers:
        raise ValueError(
            f"first_k_dense_replace = {hf.first_k_dense_replace} in config.json must be below num_hidden_layers = "
            f"{hf.num_hidden_layers}: no layer has experts"
        )


def mixture_config(
    hf: PreTrainedConfig, experts: GroupedExperts.Config, *, normalize: bool, bias: bool = False
) -> MoE.Config:
    """``experts`` behind a router; ``normalize``: the chosen ones' weights add up to 1; ``bias``: the router's."""
    routed = make_routed_experts_config(
        dim=experts.dim,
        hidden_dim=experts.hidden_dim,
        num_experts=experts.num_experts,
        top_k=hf.num_experts_per_tok,
        param_init={},
        comm_backend="standard",
    )
    routed.inner_experts = experts
    router = make_router_config(
        dim=experts.dim,
        num_experts=experts.num_experts,
        top_k=hf.num_experts_per_tok,
        gate_param_init=FROM_FILE,
        score_func="softmax",
        route_norm=normalize,
        bias=bias,
    )
    router.gate = _gate(router.gate, rounds=True)
    values: dict[str, Any] = {field.name: getattr(router, field.name) for field in fields(router)}
    router = Router.Config(**values)
    return MixtureOfExperts.Config(
        num_experts=experts.num_experts, router=router, routed_experts=routed, load_balance_coeff=None
    )


def _gate(linear: Linear.Config, *, rounds: bool) -> RouterGate.Config:
    return RouterGate.Config(
        in_features=linear.in_features,
        out_features=linear.out_features,
        bias=linear.bias,
        param_init=linear.param_init,
        rounds=rounds,
    )

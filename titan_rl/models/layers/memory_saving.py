"""RMSNorm and SwiGLU that store little for their backward, on a CPU.

There torch composes both from elementwise operations, and each stores its inputs: for a norm in bf16 two copies in
fp32, for a SwiGLU the activated gate and its product. Computing them again in the backward costs a pass or two. GPUs
have kernels for these, and DTensors (tensor parallelism) implementations of their own, so neither is changed here.

Dimensions: ... leading ones, D features, F features of the feed-forward.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torchtitan.models.common import FeedForward, Linear, RMSNorm

from titan_rl.models.layers.cpu_products import (
    LeanLinear,
    project,
    project_each,
    projected_back,
    weight_gradient,
    widened,
)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and not isinstance(tensor, DTensor)


class _Normalize(torch.autograd.Function):
    """``x / sqrt(mean(x**2) + eps) * weight``, in fp32, to the bit as torch's own (arXiv 1910.07467, equation 4)."""

    @staticmethod
    def forward(ctx: Any, x_D: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        wide_D = x_D.float()
        scale_1 = torch.rsqrt(wide_D.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x_D, weight_D, scale_1)
        return (wide_D * scale_1).mul_(weight_D).to(x_D.dtype)

    @staticmethod
    def backward(ctx: Any, grad_D: torch.Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]  (torch's annotation wants *args)
        x_D, weight_D, scale_1 = ctx.saved_tensors
        normal_D, wide_grad_D = x_D * scale_1, grad_D.float()
        grad_weight_D = None
        if ctx.needs_input_grad[1]:
            grad_weight_D = (wide_grad_D * normal_D).flatten(0, -2).sum(0).to(weight_D.dtype)
        grad_x_D = wide_grad_D * weight_D
        # the output does not change along the normalized direction
        grad_x_D -= normal_D.mul_((grad_x_D * normal_D).mean(-1, keepdim=True))
        return grad_x_D.mul_(scale_1).to(x_D.dtype), grad_weight_D, None


class _GateAndProject(torch.autograd.Function):
    """``(silu(gate) * up) @ down.T`` (arXiv 2002.05202, equation 6), to the bit as torch's own."""

    @staticmethod
    def forward(ctx: Any, gate_F: torch.Tensor, up_F: torch.Tensor, down_DF: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate_F, up_F, down_DF)
        return project(F.silu(gate_F).mul_(up_F), down_DF)

    @staticmethod
    def backward(ctx: Any, grad_D: torch.Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]  (torch's annotation wants *args)
        gate_F, up_F, down_DF = ctx.saved_tensors
        activated_F, grad_down_DF, grad_D = F.silu(gate_F), None, widened(grad_D)
        if ctx.needs_input_grad[2]:
            grad_down_DF = weight_gradient(grad_D, widened(activated_F * up_F), down_DF.dtype)
        grad_F = projected_back(grad_D, down_DF, gate_F.dtype)
        grad_up_F = activated_F.mul_(grad_F)
        return torch.ops.aten.silu_backward(grad_F.mul_(up_F), gate_F), grad_up_F, grad_down_DF


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x`` normalized and scaled, in ``x``'s dtype, computed in the weight's or in a wider one."""
    if _is_plain(x):
        return _Normalize.apply(x, weight, eps)
    return F.rms_norm(x.to(weight.dtype), weight.shape, weight, eps).to(x.dtype)


class LeanRMSNorm(RMSNorm):
    @dataclass(kw_only=True, slots=True)
    class Config(RMSNorm.Config):
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.eps is not None, "TorchTitan's config has a number"
        return rms_norm(x, self.weight, self.eps)


class ShiftedNorm(LeanRMSNorm):
    """RMSNorm with a scale of 1 + weight."""

    @dataclass(kw_only=True, slots=True)
    class Config(LeanRMSNorm.Config):
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.eps is not None, "TorchTitan's config has a number"
        return rms_norm(x, self.weight.float() + 1.0, self.eps)


class LeanFeedForward(FeedForward):
    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = project_each(x, self.w1, self.w3)
        # FSDP gathers all of a block, so w2's weight is available; with an adapter, w2 is more than its weight
        if _is_plain(gate) and type(self.w2) in (Linear, LeanLinear):
            return _GateAndProject.apply(gate, up, self.w2.weight)
        return self.w2(F.silu(gate) * up)

"""Products of bf16 on a CPU, by whichever units are faster (``linear_logprob.multiplies_wide``).

All are exact products of bf16, summed up in fp32 and rounded once. To widen operands costs a pass over them, where the
products of a layer take half of the time.

Dimensions: ... leading ones, I inputs, O outputs.
"""

from dataclasses import dataclass, fields, is_dataclass

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torchtitan.models.common import Linear

from titan_rl.kernels import linear_logprob


def has_products() -> bool:
    """Whether this CPU multiplies bf16 fast, in one way or the other."""
    return torch.cpu._is_avx512_bf16_supported() or linear_logprob.multiplies_wide()


def is_widened(x: torch.Tensor, weight: torch.Tensor | None = None) -> bool:
    """Whether bf16's products with a weight of bf16, which may have been widened before, are faster as fp32's."""
    if x.dtype != torch.bfloat16 or x.device.type != "cpu" or isinstance(x, DTensor):
        return False
    if weight is not None and (weight.dtype not in (torch.bfloat16, torch.float32) or isinstance(weight, DTensor)):
        return False
    return linear_logprob.multiplies_wide()


def as_factor(x: torch.Tensor) -> torch.Tensor:
    """Of several products: widened or rounded once, to what ``multiply`` takes on this CPU."""
    return x.float() if linear_logprob.multiplies_wide() else x.bfloat16()


def multiply(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """``out = left @ right``, batches of matrices of ``as_factor``, summed up in fp32 and rounded once to bf16."""
    return out.copy_(torch.bmm(left, right)) if is_widened(out) else torch.bmm(left, right, out=out)


def project(input_I: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
    """``input @ weight.T + bias``, in the input's dtype."""
    if is_widened(input_I, weight_OI):
        bias_O = None if bias_O is None else bias_O.float()
        return F.linear(input_I.float(), weight_OI.float(), bias_O).to(input_I.dtype)
    return F.linear(input_I, weight_OI, bias_O)


def projected_back(grad_O: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """The gradient of ``project``'s input."""
    if is_widened(grad_O, weight_OI):
        return (grad_O.float() @ weight_OI.float()).to(grad_O.dtype)
    return grad_O @ weight_OI


def weight_gradient(grad_O: torch.Tensor, input_I: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Of ``project``'s weight, [O, I], in that weight's dtype."""
    grad_NO, input_NI = grad_O.flatten(0, -2), input_I.flatten(0, -2)
    if is_widened(grad_NO):
        return (grad_NO.float().T @ input_NI.float()).to(dtype)
    return grad_NO.T @ input_NI


class _WideLinear(torch.autograd.Function):
    """``project`` of bf16 on a CPU that multiplies wide."""

    @staticmethod
    def forward(ctx, input_I: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(input_I, weight_OI)
        return project(input_I, weight_OI, bias_O)

    @staticmethod
    def backward(ctx, grad_O: torch.Tensor):
        input_I, weight_OI = ctx.saved_tensors
        of_input, of_weight, of_bias = ctx.needs_input_grad
        return (
            projected_back(grad_O, weight_OI) if of_input else None,
            weight_gradient(grad_O, input_I, weight_OI.dtype) if of_weight else None,
            grad_O.flatten(0, -2).sum(0) if of_bias else None,
        )


class LeanLinear(Linear):
    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if is_widened(input, self.weight):
            return _WideLinear.apply(input, self.weight, self.bias)
        return super().forward(input)


def with_lean_linears(config):
    """TorchTitan's config of a module whose linear layers, all the way down, are such; others stay as they are."""
    if type(config) is Linear.Config:
        return LeanLinear.Config(**{field.name: getattr(config, field.name) for field in fields(config)})
    if is_dataclass(config) and not isinstance(config, type):
        for field in fields(config):
            if is_dataclass(value := getattr(config, field.name)) and not isinstance(value, type):
                setattr(config, field.name, with_lean_linears(value))
    return config

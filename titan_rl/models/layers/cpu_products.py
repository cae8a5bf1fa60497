"""Products of bf16 on a CPU, by the faster units (``linear_logprob.multiplies_wide``).

All are exact products of bf16, summed up in fp32 and rounded once. To widen operands costs a pass over them, where the
products of a layer take half of the time.

Dimensions: ... leading ones, I inputs, O outputs.
"""

from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torchtitan.models.common import Linear
from torchtitan.models.common.attention import QKVLinear

from titan_rl.kernels import linear_logprob


def has_products() -> bool:
    """Whether this CPU has a fast path for bf16 products."""
    return linear_logprob.has_bf16_units() or linear_logprob.multiplies_wide()


def is_widened(x: torch.Tensor, weight: torch.Tensor | None = None) -> bool:
    """Whether bf16 products with a bf16 (or widened) weight are faster in fp32."""
    if x.dtype != torch.bfloat16 or x.device.type != "cpu" or isinstance(x, DTensor):
        return False
    if weight is not None and (weight.dtype not in (torch.bfloat16, torch.float32) or isinstance(weight, DTensor)):
        return False
    return linear_logprob.multiplies_wide()


def as_factor(x: torch.Tensor) -> torch.Tensor:
    """Operand of several products, converted once to the dtype of ``multiply`` on this CPU."""
    return x.float() if linear_logprob.multiplies_wide() else x.bfloat16()


def multiply(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """``out = left @ right``, batches of matrices of ``as_factor``, summed up in fp32 and rounded once to bf16."""
    return out.copy_(torch.bmm(left, right)) if is_widened(out) else torch.bmm(left, right, out=out)


def widened(x: torch.Tensor) -> torch.Tensor:
    """Tensor widened to fp32 if its bf16 products are faster so, else unchanged."""
    return x.float() if is_widened(x) else x


def project(input_I: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """``input @ weight.T``, in the input's dtype."""
    if is_widened(input_I, weight_OI):
        return F.linear(input_I.float(), weight_OI.float()).to(input_I.dtype)
    return F.linear(input_I, weight_OI)


def projected_back(grad_O: torch.Tensor, weight_OI: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The gradient of ``project``'s input, of ``dtype``. ``grad_O``: ``widened``."""
    return (grad_O @ widened(weight_OI)).to(dtype)


def weight_gradient(grad_O: torch.Tensor, input_I: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Gradient of ``project``'s weight, [O, I], in its ``dtype``, from ``widened`` tensors."""
    return (grad_O.flatten(0, -2).T @ input_I.flatten(0, -2)).to(dtype)


class _WideLinears(torch.autograd.Function):
    """Linear layers of one input in bf16 on a CPU that multiplies wide: it is widened once for all of them, and their
    parts of its gradient are added up before that is rounded. ``parameters``: weight and bias, or None, of each."""

    @staticmethod
    def forward(ctx: Any, input_I: torch.Tensor, *parameters: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        weights, biases = [weight for weight in parameters[::2] if weight is not None], parameters[1::2]
        ctx.save_for_backward(input_I, *weights)
        wide_I = input_I.float()
        wide_biases = (bias if bias is None else bias.float() for bias in biases)
        outputs = (F.linear(wide_I, weight.float(), bias) for weight, bias in zip(weights, wide_biases, strict=True))
        return tuple(output_O.to(input_I.dtype) for output_O in outputs)

    @staticmethod
    def backward(ctx: Any, *grads_O: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input_I, *weights = ctx.saved_tensors
        of_input, *of_parameters = ctx.needs_input_grad
        wide_I = input_I.float() if any(of_parameters[::2]) else None
        grad_NI: torch.Tensor | None = None
        gradients: list[torch.Tensor | None] = []
        for grad_O, weight_OI, of_weight, of_bias in zip(
            grads_O, weights, of_parameters[::2], of_parameters[1::2], strict=True
        ):
            grad_NO = grad_O.float().flatten(0, -2)
            if of_weight and wide_I is not None:
                gradients.append(weight_gradient(grad_NO, wide_I, weight_OI.dtype))
            else:
                gradients.append(None)
            gradients.append(grad_NO.sum(0).to(grad_O.dtype) if of_bias else None)
            if of_input:
                wide_OI = weight_OI.float()
                grad_NI = grad_NO @ wide_OI if grad_NI is None else grad_NI.addmm_(grad_NO, wide_OI)
        return grad_NI if grad_NI is None else grad_NI.to(input_I.dtype).view(input_I.shape), *gradients


def project_each(x_I: torch.Tensor, *linears: Linear) -> tuple[torch.Tensor, ...]:
    """Outputs of several linear layers of one input."""
    if all(type(linear) is LeanLinear and is_widened(x_I, linear.weight) for linear in linears):
        return _WideLinears.apply(x_I, *(tensor for linear in linears for tensor in (linear.weight, linear.bias)))
    return tuple(linear(x_I) for linear in linears)


class LeanLinear(Linear):
    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        pass

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if is_widened(input, self.weight):
            return _WideLinears.apply(input, self.weight, self.bias)[0]
        return super().forward(input)


class LeanQKVLinear(QKVLinear):
    @dataclass(kw_only=True, slots=True)
    class Config(QKVLinear.Config):
        pass

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        if is_widened(x):
            outputs = project_each(x, self.wq, self.wk, self.wv)
            q, k, v = (out.unflatten(-1, (-1, self.head_dim)) for out in outputs)
            return q, k, v
        return super().forward(x)


_LEAN = {Linear.Config: LeanLinear.Config, QKVLinear.Config: LeanQKVLinear.Config}


def with_lean_linears(config: Any) -> Any:
    """TorchTitan's config with every linear layer replaced by its memory-saving form."""
    if type(config) in _LEAN:
        config = _LEAN[type(config)](**{field.name: getattr(config, field.name) for field in fields(config)})
    if is_dataclass(config) and not isinstance(config, type):
        for field in fields(config):
            if is_dataclass(value := getattr(config, field.name)) and not isinstance(value, type):
                setattr(config, field.name, with_lean_linears(value))
    return config

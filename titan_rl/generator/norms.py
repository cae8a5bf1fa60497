"""RMS norms of an engine on a CPU, in the trainer's arithmetic, by vLLM's kernel.

vLLM's own there are some ten operators of torch for each. They normalize the sum with the residual before it is
rounded, where the trainer normalizes what the next layer sees, and round twice in bf16.

Dimensions: T tokens (any leading dimensions), D features.
"""

import torch
from vllm import ir

from titan_rl.compat.vllm.layers import rms_norm_fp32

PROVIDER = "titan_rl"
_VECTOR = 16
"""Features that the kernel processes at once."""


def _has_kernel(x: torch.Tensor, weight: torch.Tensor | None, variance_size: int | None) -> bool:
    is_plain = variance_size is None and weight is not None and weight.dtype == x.dtype
    fits = weight is not None and weight.shape == x.shape[-1:] and weight.is_contiguous()
    return is_plain and fits and not x.shape[-1] % _VECTOR


def _norm_arguments_fit(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    return _has_kernel(x, weight, variance_size)


def _added_arguments_fit(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    return _has_kernel(x, weight, variance_size)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> torch.Tensor:
    """As ``torch.nn.functional.rms_norm``: in fp32, and rounded once. ``x``: [T, D]."""
    assert weight is not None, "others are not given to it"
    return rms_norm_fp32(x.float().contiguous(), weight.float(), epsilon).to(x.dtype)


def fused_add_rms_norm(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of the rounded sum, and that sum. ``x``, ``x_residual``: [T, D]."""
    total = x + x_residual
    return rms_norm(total, weight, epsilon), total


ir.ops.rms_norm.register_impl(PROVIDER, supports_args=_norm_arguments_fit)(rms_norm)
ir.ops.fused_add_rms_norm.register_impl(PROVIDER, supports_args=_added_arguments_fit)(fused_add_rms_norm)

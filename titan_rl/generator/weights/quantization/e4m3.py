"""Weights and activations rounded to E4M3 and back, by vLLM's own functions. Pure.

    scale = largest magnitude of a group / 448,   codes = E4M3(value / scale),   value' = codes * scale in fp32

Groups of a weight are the whole of it, each output channel, or blocks of 128 x 128; those of activations are each
token's features, or 128 of them at a time. No scale depends on another token, so no answer depends on its batch.

Sources: FP8 formats, arXiv 2209.05433; blocks, DeepSeek-V3, arXiv 2412.19437, section 3.3.

Dimensions: O outputs and I inputs of a layer, T tokens.
"""

from collections.abc import Callable
from typing import Literal

import torch

from titan_rl.compat.vllm.quantization import activation_rounding, block_codes, channel_codes
from titan_rl.config.sections.kinds import FP8_BLOCK

Scheme = Literal["fp8_per_tensor", "fp8_per_channel", "fp8_per_block"]
"""vLLM's names."""
_STEP = 2**-3
"""Of a value, at most: E4M3 has three bits behind the leading one."""
_LEAST_STEP = 2**-9 / 448
"""Of the largest value of a group, where codes are subnormal."""
_LEAST_AMAX = 2**-9
"""What vLLM takes a channel's largest magnitude for, if it is less; a block's for 1e-4."""


def quantize_weight(weight_OI: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 codes [O, I] and fp32 scales: [O, 1], or one for each block. Blocks at the ends may be smaller.

    Errors: ValueError for a weight that is not finite, which has no scale."""
    if not torch.isfinite(weight_OI).all():
        raise ValueError("values that are not finite")
    if scheme == "fp8_per_block":
        return block_codes(weight_OI, FP8_BLOCK)
    amax_O1 = weight_OI.abs().amax(-1, keepdim=True)
    return channel_codes(weight_OI, amax_O1.max().expand_as(amax_O1) if scheme == "fp8_per_tensor" else amax_O1)


def dequantize(codes_NI: torch.Tensor, scales: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Values in fp32. ``scales``: [N, 1], or by blocks of columns, and of rows where they are as few."""
    if scheme != "fp8_per_block":
        return codes_NI.float() * scales
    if len(scales) < len(codes_NI):
        scales = scales.repeat_interleave(FP8_BLOCK, 0)[: len(codes_NI)]
    return codes_NI.float() * scales.repeat_interleave(FP8_BLOCK, 1)[:, : codes_NI.shape[1]]


def activation_quantizer(scheme: Scheme) -> Callable[[torch.Tensor], torch.Tensor]:
    """Function that rounds activations [..., I] to E4M3, and gives them back in fp32; what is not finite becomes NaN.

    To be called where vLLM's configuration is set, as in a loader."""
    codes_of = activation_rounding(FP8_BLOCK if scheme == "fp8_per_block" else None)

    def rounded(x_I: torch.Tensor) -> torch.Tensor:
        x_TI = x_I.reshape(-1, x_I.shape[-1])
        return dequantize(*codes_of(x_TI), scheme).reshape(x_I.shape)

    return rounded


def tolerance(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Most that a weight rounded to E4M3, and by a product in ``dtype``, is off at each element, whatever the scheme.

    Half a step of E4M3, and another for kernels that round to scales which are powers of two; a step of ``dtype``."""
    least = _LEAST_STEP * weight.abs().amax().clamp_min(_LEAST_AMAX)
    return (_STEP + torch.finfo(dtype).eps) * weight.abs() + 2 * least

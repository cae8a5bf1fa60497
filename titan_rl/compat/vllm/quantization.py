"""vLLM's online FP8 quantization: its functions of weights and activations."""

import inspect
from collections.abc import Callable

import torch
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape
from vllm.utils.deep_gemm import per_block_cast_to_fp8

from titan_rl.compat.reach import VLLM, Reach

_ONLINE = "vllm.model_executor.layers.quantization.online.fp8"
_QUANT = "vllm.model_executor.layers.quantization.input_quant_fp8:QuantFP8"
REACHES = (
    Reach(f"{_ONLINE}:_fp8_channel_scale", "scale the weights of an output channel as vLLM does"),
    Reach(f"{_ONLINE}:_fp8_quant_per_channel", "round weights to E4M3 as vLLM does"),
    Reach("vllm.utils.deep_gemm:per_block_cast_to_fp8", "round blocks of weights to E4M3 as vLLM does"),
    Reach(f"{_QUANT}.forward_native", "round activations to E4M3 on a CPU as vLLM does"),
)
VLLM.require(REACHES)

from vllm.model_executor.layers.quantization.online.fp8 import _fp8_channel_scale, _fp8_quant_per_channel

_block_codes = inspect.unwrap(per_block_cast_to_fp8)
"""Not compiled, which takes each engine on a CPU seconds and a compiler."""
Codes = tuple[torch.Tensor, torch.Tensor]
"""E4M3 codes in the shape of what they stand for, and scales in fp32."""


def channel_codes(weight_OI: torch.Tensor, amax_O1: torch.Tensor) -> Codes:
    """Codes of a weight, and a scale for each row. ``amax_O1``: the magnitude that becomes 448 in each row."""
    scale_O1 = _fp8_channel_scale(amax_O1)
    return _fp8_quant_per_channel(weight_OI, scale_O1), scale_O1


def block_codes(weight_OI: torch.Tensor, size: int) -> Codes:
    """Codes of a weight, and a scale for each block of ``size`` x ``size``; blocks at the ends may be smaller."""
    return _block_codes(weight_OI, [size, size], use_ue8m0=False)


def activation_rounding(group: int | None) -> Callable[[torch.Tensor], Codes]:
    """Function from activations [T, I] to codes and scales, one a token or one for each ``group`` features of it.

    To be called where vLLM's configuration is set, as in a loader."""
    shape = GroupShape.PER_TOKEN if group is None else GroupShape(1, group)
    return QuantFP8(static=False, group_shape=shape, use_ue8m0=False, compile_native=False).forward_native

"""Layers of vLLM: the output head's projection, packed linear layers, packed experts, a CPU's RMS norm."""

from collections.abc import Callable
from typing import Any

import torch
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.logits_processor import LogitsProcessor

from titan_rl.compat.reach import VLLM, Reach

_LOGITS = "vllm.model_executor.layers.logits_processor:LogitsProcessor"
_LINEAR = "vllm.model_executor.layers.linear:UnquantizedLinearMethod"
REACHES = (
    Reach(f"{_LOGITS}._apply_head", "widen the output head's weight once for each version"),
    Reach(f"{_LOGITS}.head_dtype", "know the dtype of logits"),
    Reach(f"{_LINEAR}.process_weights_after_loading", "pack a linear layer's weight in fp32"),
    Reach("vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm.cpu_linear", "pack or drop a packed weight"),
    Reach("vllm._custom_ops:create_onednn_mm", "pack an fp32 weight"),
    Reach("vllm._custom_ops:onednn_mm", "multiply by a packed fp32 weight"),
    Reach("vllm._custom_ops:rms_norm", "compute an RMS norm on a CPU by one kernel"),
    Reach(
        "vllm.model_executor.layers.fused_moe.fused_moe_method_base:FusedMoEMethodBase.moe_kernel",
        "have experts packed again",
    ),
)
VLLM.require(REACHES)

from vllm import _custom_ops

Projection = Callable[[Any, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Of (lm_head, hidden states, bias or None) to logits."""


def head_projection(processor: LogitsProcessor) -> Projection:
    """What a processor makes logits by."""
    return processor._apply_head


def can_replace_projection(processor: LogitsProcessor, kind: type) -> bool:
    """Whether a processor's projection is vLLM's own or of ``kind``."""
    return isinstance(vars(processor).get("_apply_head"), kind | None)


def set_head_projection(processor: LogitsProcessor, make: Callable[[LogitsProcessor], Projection]) -> None:
    """Replace this one processor's projection by what ``make`` makes of vLLM's own."""
    vars(processor).pop("_apply_head", None)
    processor._apply_head = make(processor)  # pyright: ignore[reportAttributeAccessIssue]  # it is called by place


def packed_fp32(weight_IO: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]:
    """``x @ weight + bias`` by oneDNN, of fp32 x [..., I] and an fp32 bias or None, with the weight packed once."""
    handler = _custom_ops.create_onednn_mm(weight_IO, 32)
    return lambda x_I, bias_O: _custom_ops.onednn_mm(handler, x_I, bias_O)


def rms_norm_fp32(x_TD: torch.Tensor, weight_D: torch.Tensor, epsilon: float) -> torch.Tensor:
    """RMS norm of contiguous fp32 x on a CPU, with D a multiple of 16."""
    out_TD = torch.empty_like(x_TD)
    _custom_ops.rms_norm(out_TD, x_TD, weight_D, epsilon)
    return out_TD


class PackedLinearMethod(UnquantizedLinearMethod):
    """A linear layer's method on a CPU whose weight a subclass packs, with all else of another method."""

    def __init__(self, plain: UnquantizedLinearMethod):
        vars(self).update(vars(plain))  # its constructor would ask for the kernel again

    def product_of(self, weight_OI: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]:
        """``x @ weight.T + bias`` in x's dtype."""
        raise NotImplementedError

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        weight = layer.weight
        assert isinstance(weight, torch.Tensor)
        product = self.product_of(weight)

        def cpu_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            return product(x, bias)

        layer.cpu_linear = cpu_linear  # pyright: ignore[reportArgumentType]  # a module takes any attribute
        layer.weight = torch.nn.Parameter(weight.new_empty(0), requires_grad=False)


def drop_packed_weights(model: torch.nn.Module) -> None:
    """Free the packed copies of linear layers' weights on a CPU; each is made again as its weight comes."""
    for module in model.modules():
        vars(module).pop("cpu_linear", None)


def forget_packed_experts(module: torch.nn.Module) -> None:
    """Have vLLM pack a mixture of experts again on a CPU.

    It packs experts when it sets up their kernel, and keeps that kernel at a later reload. It would then read unpacked
    weights as packed ones.
    """
    method = getattr(module, "quant_method", None)
    if method is not None and getattr(method, "moe_kernel", None) is not None:
        method.moe_kernel = None

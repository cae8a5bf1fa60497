"""vLLM's linear layers in FP8 on a CPU, by emulation: E4M3 values, multiplied and summed up in fp32.

A GPU multiplies codes and scales the sums; here codes are scaled before, which is the same but for the rounding of
fp32. Weights are rounded once a version, as vLLM processes the layer that the channel has filled, and inputs as they
come. On a GPU vLLM's own online quantization does both (engine_arguments.py).
"""

from collections.abc import Callable

import torch
from torch import nn
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.online.fp8 import OnlineLinearBase

from titan_rl.compat.vllm.layers import PackedLinearMethod
from titan_rl.generator.weights.quantization.e4m3 import (
    Scheme,
    activation_quantizer,
    dequantize,
    quantize_weight,
    tolerance,
)
from titan_rl.generator.weights.vllm_linear import packed_product

_ROWS = 512
"""Of unit vectors at a time."""


class QuantizedLinearMethod(PackedLinearMethod):
    """Linear method of vLLM with E4M3 weights and inputs."""

    def __init__(self, plain: UnquantizedLinearMethod, name: str, scheme: Scheme):
        """``name``: of the layer, for messages. To be called where vLLM's configuration is set."""
        super().__init__(plain)
        self._name, self._rounded = name, activation_quantizer(scheme)
        self._scheme: Scheme = scheme

    def product_of(self, weight_OI: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]:
        try:
            codes, scales = quantize_weight(weight_OI, self._scheme)
        except ValueError as error:
            raise ValueError(f"{self._name}.weight has {error}, which E4M3 has no scale for") from None
        product, rounded = packed_product(dequantize(codes, scales, self._scheme)), self._rounded
        return lambda x_I, bias_O: product(rounded(x_I), bias_O).to(x_I.dtype)


def quantize_linears(model: nn.Module, scheme: Scheme) -> None:
    """Set FP8 methods for the linear layers of a model's blocks, before vLLM packs the weights.

    Embeddings and the output head are none of vLLM's linear layers; norms have no products."""
    for name, module in model.named_modules():
        if isinstance(module, LinearBase) and type(module.quant_method) is UnquantizedLinearMethod:
            module.quant_method = QuantizedLinearMethod(module.quant_method, name, scheme)


def quantized_layers(model: nn.Module) -> dict[str, LinearBase]:
    """Layers of a model that multiply in FP8, here or by vLLM, by their names."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, LinearBase) and isinstance(module.quant_method, QuantizedLinearMethod | OnlineLinearBase)
    }


def weight_size(layer: LinearBase) -> tuple[int, int]:
    """Outputs and inputs of this rank's part of a layer."""
    outputs, inputs = layer.output_size_per_partition, layer.input_size_per_partition
    assert isinstance(outputs, int) and isinstance(inputs, int), "vLLM sets both"
    return outputs, inputs


@torch.no_grad()
def is_quantized_from(layer: LinearBase, weight_OI: torch.Tensor) -> bool:
    """Whether a layer's products are those of a weight in E4M3. Unit vectors, which E4M3 has, multiply to its columns.

    So one scale that is twice what it should be is found, by any kernel that computes the layer."""
    method, bounds_OI = layer.quant_method, tolerance(weight_OI, weight_OI.dtype)
    assert isinstance(method, LinearMethodBase), "it multiplies"
    units_II = torch.eye(weight_OI.shape[1], dtype=weight_OI.dtype, device=weight_OI.device)
    for start in range(0, len(units_II), _ROWS):
        columns = slice(start, start + _ROWS)
        off_NO = method.apply(layer, units_II[columns]) - weight_OI[:, columns].T
        if not (off_NO.abs() <= bounds_OI[:, columns].T).all():  # NaN is not, either
            return False
    return True

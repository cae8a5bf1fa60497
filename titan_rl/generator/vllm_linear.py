"""vLLM's linear layers in bf16 on a CPU whose fp32 units are the faster ones: they are packed in fp32.

Products are what they were, exact ones of bf16, summed up in fp32 and rounded once, and so are those that the trainer
makes (models/layers/cpu_products.py). Packed layers take twice the memory, which is what an engine of few sequences would wait
for: it keeps vLLM's own.
"""

from collections.abc import Callable

import torch
from vllm import _custom_ops as ops
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.platforms import current_platform

from titan_rl.config.device_defaults import MIN_WIDE_SEQUENCES
from titan_rl.kernels.linear_logprob import multiplies_wide


def packed_product(wide_OI: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]:
    """``x @ wide.T + bias`` in fp32, of inputs [..., I] and a bias or None, with a weight that is packed for it.

    Twice as fast as with the weight as it is, where that does not fit the caches: SmolLM2's head for 64 tokens 35 ms
    instead of 75 on an x86 CPU with AVX2.
    """
    handler = ops.create_onednn_mm(wide_OI.t(), 32)
    return lambda x_I, bias_O: ops.onednn_mm(handler, x_I.float(), None if bias_O is None else bias_O.float())


class WideLinearMethod(UnquantizedLinearMethod):
    def __init__(self, plain: UnquantizedLinearMethod):
        self._gemm_impl = plain._gemm_impl  # noqa: SLF001  (vLLM's own choice of a kernel)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        weight = layer.weight
        assert isinstance(weight, torch.Tensor)
        product = packed_product(weight.float())

        def cpu_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            return product(x, bias).to(x.dtype)

        layer.cpu_linear = cpu_linear  # pyright: ignore[reportArgumentType]  # a module takes any attribute
        layer.weight = torch.nn.Parameter(weight.new_empty(0), requires_grad=False)


def widen_linears(model: torch.nn.Module, max_num_seqs: int) -> None:
    """Before vLLM packs their weights. ``max_num_seqs``: the most sequences of a step."""
    if not current_platform.is_cpu() or not multiplies_wide() or max_num_seqs < MIN_WIDE_SEQUENCES:
        return
    for module in model.modules():
        if not isinstance(module, LinearBase) or module.params_dtype != torch.bfloat16:
            continue
        if type(module.quant_method) is UnquantizedLinearMethod:
            module.quant_method = WideLinearMethod(module.quant_method)

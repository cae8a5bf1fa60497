"""vLLM's linear layers in bf16 on a CPU whose fp32 units are the faster ones: they are packed in fp32.

Products are what they were, exact ones of bf16, summed up in fp32 and rounded once, and so are those that the trainer
makes (models/layers/cpu_products.py). Packed layers take twice the memory, which is what an engine of few sequences
would wait for: it keeps vLLM's own."""

from collections.abc import Callable

import torch
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.platforms import current_platform

from titan_rl.compat.vllm.layers import PackedLinearMethod, packed_fp32
from titan_rl.config.device_defaults import MIN_WIDE_SEQUENCES
from titan_rl.kernels.linear_logprob import multiplies_wide


def packed_product(wide_OI: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]:
    """``x @ wide.T + bias`` in fp32, of inputs [..., I] and a bias or None, with a weight that is packed for it.

    Twice as fast as with the weight as it is, where that does not fit the caches: SmolLM2's head for 64 tokens 35 ms
    instead of 75 on an x86 CPU with AVX2.
    """
    product = packed_fp32(wide_OI.t())
    return lambda x_I, bias_O: product(x_I.float(), None if bias_O is None else bias_O.float())


class WideLinearMethod(PackedLinearMethod):
    """Linear method of vLLM with weights packed in fp32."""

    def product_of(self, weight_OI: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]:
        product = packed_product(weight_OI.float())
        return lambda x_I, bias_O: product(x_I, bias_O).to(x_I.dtype)


def widen_linears(model: torch.nn.Module, max_num_seqs: int) -> None:
    """Set fp32 linear methods, before vLLM packs the weights. ``max_num_seqs``: the most sequences of a step."""
    if not current_platform.is_cpu() or not multiplies_wide() or max_num_seqs < MIN_WIDE_SEQUENCES:
        return
    for module in model.modules():
        if not isinstance(module, LinearBase) or module.params_dtype != torch.bfloat16:
            continue
        weight = module.weight
        is_matrix = isinstance(weight, torch.Tensor) and weight.ndim == 2  # a convolution's weight has three dimensions
        if is_matrix and type(module.quant_method) is UnquantizedLinearMethod:
            module.quant_method = WideLinearMethod(module.quant_method)

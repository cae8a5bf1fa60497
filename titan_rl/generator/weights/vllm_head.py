"""Output head of vLLM in fp32 on a CPU, widened once for each weight version.

The head of 64 tokens of SmolLM2 takes 60 ms with the widening, 29 without, and 10 when a CPU's bf16 units multiply what
was bf16: two fifths of a decode step, once. Where fp32 units are the faster ones, the weight is packed for them.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.platforms import current_platform

from titan_rl.compat.vllm.layers import can_replace_projection, head_projection, set_head_projection
from titan_rl.generator.weights.vllm_linear import packed_product
from titan_rl.kernels.linear_logprob import exact_bf16_products, multiplies_wide


class _WideHead:
    """Stands where a LogitsProcessor's projection stood."""

    def __init__(self, processor: LogitsProcessor):
        self._project = head_projection(processor)
        self._dtype = processor.head_dtype
        self._product: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor] | None = None

    def __call__(self, lm_head: Any, hidden_states: torch.Tensor, embedding_bias: torch.Tensor | None) -> torch.Tensor:
        if self._dtype in (None, hidden_states.dtype):
            return self._project(lm_head, hidden_states, embedding_bias)
        if self._product is None:
            self._product = self._product_of(lm_head)
        return self._product(hidden_states, embedding_bias)

    def _product_of(self, lm_head: Any) -> Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]:
        weight_VD = lm_head.weight.to(self._dtype)
        if self._dtype == torch.float32 and multiplies_wide():
            return packed_product(weight_VD)
        wide, narrow_VD = SimpleNamespace(weight=weight_VD, quant_method=lm_head.quant_method), lm_head.weight
        project = self._project  # with self the copy would be in a reference cycle, and outlive its version

        def product(hidden_states: torch.Tensor, embedding_bias: torch.Tensor | None) -> torch.Tensor:
            with exact_bf16_products(hidden_states, narrow_VD):
                return project(wide, hidden_states, embedding_bias)

        return product


def widen_head_once(model: torch.nn.Module) -> None:
    """Cache the head in fp32 at the next step. To be called again before the weights change.

    A batch-invariant projection stays as it is."""
    for module in model.modules() if current_platform.is_cpu() else ():
        if isinstance(module, LogitsProcessor) and can_replace_projection(module, _WideHead):
            set_head_projection(module, _WideHead)

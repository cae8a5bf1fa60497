"""vLLM's output head in fp32 on a CPU: its weight is widened once for each version of the weights, not at each step.

The head of 64 tokens of SmolLM2 takes 60 ms with the widening, 29 without, and 10 when a CPU's bf16 units multiply what
was bf16: two fifths of a decode step, once.
"""

from types import SimpleNamespace

import torch
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.platforms import current_platform

from titan_rl.kernels.linear_logprob import exact_bf16_products


class _WideHead:
    """Stands where a LogitsProcessor's projection stood."""

    def __init__(self, processor: LogitsProcessor):
        self._project, self._dtype = processor._apply_head, processor.head_dtype
        self._wide: SimpleNamespace | None = None
        """What the projection asks of a head, with the wide weight."""

    def __call__(self, lm_head, hidden_states: torch.Tensor, embedding_bias: torch.Tensor | None) -> torch.Tensor:
        if self._dtype in (None, hidden_states.dtype):
            return self._project(lm_head, hidden_states, embedding_bias)
        if self._wide is None:
            self._wide = SimpleNamespace(weight=lm_head.weight.to(self._dtype), quant_method=lm_head.quant_method)
        with exact_bf16_products(hidden_states, lm_head.weight):
            return self._project(self._wide, hidden_states, embedding_bias)


def widen_head_once(model: torch.nn.Module) -> None:
    """At the next step, for as long as the weights are what they are then: call it again before they change."""
    for module in model.modules() if current_platform.is_cpu() else ():
        if isinstance(module, LogitsProcessor):
            vars(module).pop("_apply_head", None)
            module._apply_head = _WideHead(module)

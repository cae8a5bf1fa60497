"""Batch-invariant layers (``[debug] batch_invariant``): a token's log-probability has the same bits in every batch.

A generator's batch is a few tokens of many sequences, a trainer's a whole packed row. Libraries add up in another order
for each, so the two sides differ in the last bits. Here the trainer's layers compute by kernels/batch_invariant.py, and
so do those of vLLM (generator/batch_invariance.py). Values are those of the kernels; gradients are those of the layers
in whose place these are, which differ in rounding alone.

Dimensions: D features, V words of the vocabulary, S chosen positions, T tokens of a row, N heads, H head size.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from torchtitan.models.common import Embedding
from torchtitan.models.common.attention import GQAttention
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.llama3.model import Llama3TransformerBlock
from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from torchtitan.protocols.module import Module

from titan_rl.data.storage.sampling_mask import SamplingMask
from titan_rl.kernels.batch_invariant import (
    Implementation,
    PagedSequences,
    batch_invariant_attention,
    batch_invariant_log_softmax,
    batch_invariant_matmul,
    batch_invariant_rms_norm,
    batch_invariant_silu_and_mul,
    with_value,
)
from titan_rl.models.layers.attention import AttentionPlan, BlockPlan, PackedAttention
from titan_rl.models.layers.cpu_products import LeanLinear, LeanQKVLinear
from titan_rl.models.layers.decoder import Float32Head
from titan_rl.models.layers.memory_saving import LeanFeedForward, LeanRMSNorm
from titan_rl.models.layers.rope import HuggingFaceRoPE

POSITIONS_AT_ONCE = 256
"""Of the head, so that a row's logits need not all be held."""


def implementation_on(device: torch.device) -> Implementation:
    return "reference" if device.type == "cpu" else "triton"


def linear(x_I: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> torch.Tensor:
    """``x @ weight.T + bias`` in x's dtype, of inputs [..., I]."""
    rows_MI = x_I.flatten(0, -2)
    out_MO = batch_invariant_matmul(rows_MI, weight_OI, implementation=implementation_on(x_I.device))
    out_O = out_MO.unflatten(0, x_I.shape[:-1])
    return out_O if bias_O is None else out_O + bias_O


class BatchInvariantLinear(LeanLinear):
    @dataclass(kw_only=True, slots=True)
    class Config(LeanLinear.Config):
        pass

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return linear(input, self.weight, self.bias)


class BatchInvariantRMSNorm(LeanRMSNorm):
    @dataclass(kw_only=True, slots=True)
    class Config(LeanRMSNorm.Config):
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.eps is not None, "TorchTitan's config has a number"
        return with_value(super().forward(x), batch_invariant_rms_norm(x, self.weight, self.eps))


class BatchInvariantFeedForward(LeanFeedForward):
    @dataclass(kw_only=True, slots=True)
    class Config(LeanFeedForward.Config):
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.w1(x), self.w3(x)
        return self.w2(with_value(F.silu(gate) * up, batch_invariant_silu_and_mul(gate, up)))


class BatchInvariantRoPE(HuggingFaceRoPE):
    """Rotary embedding whose cosines do not depend on how many positions are computed together."""

    @dataclass(kw_only=True, slots=True)
    class Config(HuggingFaceRoPE.Config):
        pass

    def _precompute_cache(self) -> torch.Tensor:
        config = self.config
        assert isinstance(config, HuggingFaceRoPE.Config)
        # in fp64: what a library does with a vector's remainder is then rounded away
        # on the host on both sides, and in fp32 where a model in bf16 is built
        frequencies = torch.tensor(config.inv_freq, dtype=torch.float32, device="cpu")
        angles = torch.outer(torch.arange(config.max_seq_len, device="cpu").float(), frequencies).double()
        angles = torch.cat([angles, angles], dim=-1)
        cache = torch.cat([angles.cos(), angles.sin()], dim=-1)
        return (cache.float() * config.attention_scaling).to(torch.get_default_device())


class BatchInvariantAttention(PackedAttention):
    @dataclass(kw_only=True, slots=True)
    class Config(PackedAttention.Config):
        pass

    def _attention(
        self,
        q_TNH: torch.Tensor,
        k_TNH: torch.Tensor,
        v_TNH: torch.Tensor,
        plan: AttentionPlan,
        heads: slice,
        *,
        scale: float | None,
        enable_gqa: bool,
    ) -> torch.Tensor:
        assert isinstance(plan, BlockPlan), "the form of attention of layers of a kind of their own"
        computed_TNH = super()._attention(q_TNH, k_TNH, v_TNH, plan, heads, scale=scale, enable_gqa=enable_gqa)
        value_TNH = batch_invariant_attention(
            q_TNH,
            k_TNH[:, None],  # pages of one token
            v_TNH[:, None],
            plan.once(("sequences",), lambda: _sequences(plan, q_TNH.device)),
            scale=scale or q_TNH.shape[-1] ** -0.5,
            implementation=implementation_on(q_TNH.device),
        )
        return with_value(computed_TNH, value_TNH)


def _sequences(plan: BlockPlan, device: torch.device) -> PagedSequences:
    """A row's segments; a page is a token."""
    segments = sorted(plan.segments, key=lambda segment: segment.start)
    starts = [segment.start for segment in segments] + [segments[-1].start + segments[-1].length]
    keys = [
        torch.cat([torch.arange(first, first + count) for first, count in (*each.prefix, (each.start, each.length))])
        for each in segments
    ]
    numbers = torch.tensor(starts), torch.tensor([len(each) for each in keys]), pad_sequence(keys, batch_first=True)
    starts_D1, num_keys_D, pages_DP = (each.int().to(device) for each in numbers)
    return PagedSequences(starts_D1, num_keys_D, pages_DP, max(segment.length for segment in segments))


class BatchInvariantHead(Float32Head):
    """Output head whose log-probabilities are invariant; its other statistics are those of ``Float32Head``."""

    @dataclass(kw_only=True, slots=True)
    class Config(Float32Head.Config):
        pass

    def forward(
        self,
        input: torch.Tensor,
        *,
        target_S: torch.Tensor | None = None,
        temperature: float = 1.0,
        implementation: Implementation = "reference",
        expected_grad: Callable[[torch.Tensor, slice], torch.Tensor] | None = None,
        mask: SamplingMask | None = None,
        **statistics: Any,
    ) -> torch.Tensor:
        if target_S is None:
            return linear(input.float(), self.weight.float(), None)
        assert statistics.get("penalties") is None, "penalized logits have no batch-invariant form"
        # no gradient is computed ahead: it would be of another value than the one that is returned
        rows_KS = super().forward(
            input, target_S=target_S, temperature=temperature, implementation=implementation, mask=mask, **statistics
        )
        with torch.no_grad():
            logprob_S = self._logprobs(input, target_S, temperature, mask)
        return torch.cat([with_value(rows_KS[:1], logprob_S[None]), rows_KS[1:]])

    def _logprobs(
        self, input_SD: torch.Tensor, target_S: torch.Tensor, temperature: float, mask: SamplingMask | None
    ) -> torch.Tensor:
        weight_VD = self.weight.float()
        bits_SB = None if mask is None else torch.from_numpy(mask.bits()).to(target_S.device)
        word_V = torch.arange(len(weight_VD), device=target_S.device)
        logprob_S = torch.empty(len(target_S), device=target_S.device)
        for start in range(0, len(target_S), POSITIONS_AT_ONCE):
            part = slice(start, start + POSITIONS_AT_ONCE)
            logits_SV = linear(input_SD[part].float(), weight_VD, None)
            if bits_SB is not None:
                is_left_SV = bits_SB[part][:, word_V >> 3] >> (word_V & 7).to(torch.uint8) & 1
                logits_SV.masked_fill_(is_left_SV == 0, -torch.inf)
            all_SV = batch_invariant_log_softmax(
                logits_SV, temperature, implementation=implementation_on(logits_SV.device)
            )
            logprob_S[part] = all_SV.gather(1, target_S[part, None])[:, 0]
        return logprob_S


_INVARIANT = {
    LeanLinear.Config: BatchInvariantLinear.Config,
    LeanRMSNorm.Config: BatchInvariantRMSNorm.Config,
    LeanFeedForward.Config: BatchInvariantFeedForward.Config,
    HuggingFaceRoPE.Config: BatchInvariantRoPE.Config,
    PackedAttention.Config: BatchInvariantAttention.Config,
    Float32Head.Config: BatchInvariantHead.Config,
}
_BLOCKS = (Llama3TransformerBlock.Config, Qwen3TransformerBlock.Config)
_KNOWN = {*_INVARIANT, *_BLOCKS, Embedding.Config, GQAttention.Config, LeanQKVLinear.Config}


def why_not_invariant(config: Decoder.Config) -> str:
    """What a model has that no batch-invariant layer computes; empty if there is nothing."""
    for block in config.layers:
        if type(block) not in _BLOCKS:
            return _name(type(block))
    parts = [part for _, part, parent, _ in config.traverse(Module.Config, recurse=True) if parent is not None]
    if any(isinstance(part, PackedAttention.Config) and part.window is not None for part in parts):
        return "sliding windows"
    return ", ".join(sorted({_name(type(part)) for part in parts if type(part) not in _KNOWN}))


def convert_to_batch_invariant(config: Decoder.Config) -> None:
    """Have a model's layers built batch-invariant, if all of them have such a form; else none of them."""
    if why_not_invariant(config):
        return
    # the innermost first: a config that is replaced takes what it holds along
    for _, part, parent, key in reversed(list(config.traverse(Module.Config, recurse=True))):
        if new := _INVARIANT.get(type(part)):
            converted = new(**{field.name: getattr(part, field.name) for field in fields(part)})
            if isinstance(parent, list) and isinstance(key, int):
                parent[key] = converted
            else:
                setattr(parent, str(key), converted)


def _name(kind: type) -> str:
    return kind.__qualname__.removesuffix(".Config")

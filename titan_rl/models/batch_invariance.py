"""Batch-invariant layers (``[debug] batch_invariant``): a token's log-probability has the same bits in every batch.

A generator's batch is a few tokens of many sequences, a trainer's a whole packed row. Libraries add up in another order
for each, so the two sides differ in the last bits. Here the trainer's layers compute by kernels/batch_invariant.py, and
so do those of vLLM (generator/batch_invariance.py). Values are those of the kernels; gradients are those of the layers
in whose place these are, which differ in rounding alone.

Tensor-parallel ranks, of which the two sides may have different numbers, share a product in parts: as many as the side
with more ranks has (``num_parts``), on either side and on every rank. Parts of the columns are products of their own.
Parts of the depth give sums in fp32, which are added by halves and rounded once, wherever each was computed; so no
library adds anything up between ranks.

Dimensions: D features, V words of the vocabulary, S chosen positions, T tokens of a row, N heads, H head size; of a
linear layer I inputs, O outputs; R tensor-parallel ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn.utils.rnn import pad_sequence
from torchtitan.distributed import ParallelDims
from torchtitan.models.common import Embedding
from torchtitan.models.common.attention import GQAttention
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.llama3.model import Llama3TransformerBlock
from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import resolve_placements

from titan_rl.compat.torch.sharding import AsyncCollectiveTensor
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


def linear(
    x_I: torch.Tensor, weight_OI: torch.Tensor, bias_O: torch.Tensor | None, width: int, first: int = 0
) -> torch.Tensor:
    """``x @ weight.T + bias`` in x's dtype, of inputs [..., I].

    ``width``: outputs that are multiplied together, counted from the first one of the whole layer, of which the weight
    has those from ``first`` on. What such a part lacks here is filled up with zeros: a library's product may depend on
    its shape.
    """
    rows_MI, end = x_I.flatten(0, -2), first + len(weight_OI)
    products = []
    for start in range(first - first % width, end, width):
        before, after = max(first - start, 0), max(start + width - end, 0)
        part_OI = weight_OI[max(start - first, 0) : start + width - first]
        if before or after:
            part_OI = F.pad(part_OI, (0, 0, before, after))
        product_MO = batch_invariant_matmul(rows_MI, part_OI, implementation=implementation_on(x_I.device))
        products.append(product_MO[:, before : width - after])
    out_MO = products[0] if len(products) == 1 else torch.cat(products, 1)
    out_O = out_MO.unflatten(0, x_I.shape[:-1])
    return out_O if bias_O is None else out_O + bias_O


def depth_product(x_I: torch.Tensor, weight_OI: torch.Tensor, num_parts: int) -> torch.Tensor:
    """``x @ weight.T`` in fp32 at least, of inputs [..., I] in ``num_parts`` parts."""
    how: dict[str, Any] = dict(
        implementation=implementation_on(x_I.device), out_dtype=torch.promote_types(x_I.dtype, torch.float32)
    )
    parts = zip(x_I.flatten(0, -2).chunk(num_parts, 1), weight_OI.chunk(num_parts, 1), strict=True)
    sums = [batch_invariant_matmul(x_MI, part_OI, **how) for x_MI, part_OI in parts]
    return sum_by_halves(sums).unflatten(0, x_I.shape[:-1])


def sum_by_halves(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum of neighbors, then of neighbors among those sums, until one is left; one without a neighbor stays."""
    while len(parts) > 1:
        pairs = zip(parts[::2], parts[1::2], strict=False)
        parts = [*(left + right for left, right in pairs), *parts[len(parts) // 2 * 2 :]]
    return parts[0]


class _SumOverRanks(torch.autograd.Function):
    """Sum by halves of all ranks' tensors [B, L, D], rounded to ``dtype``: the whole one, or this rank's part of L."""

    @staticmethod
    def forward(
        ctx: Any, part_BLD: torch.Tensor, group: dist.ProcessGroup, is_spread: bool, dtype: torch.dtype
    ) -> torch.Tensor:
        ctx.group, ctx.is_spread = group, is_spread
        if is_spread:
            sent_RBLD = torch.stack(part_BLD.chunk(group.size(), 1))
            parts_RBLD = torch.empty_like(sent_RBLD)
            dist.all_to_all_single(parts_RBLD, sent_RBLD, group=group)
        else:
            parts_RBLD = torch.stack(_of_all_ranks(part_BLD, group))
        return sum_by_halves(parts_RBLD.unbind()).to(dtype)

    @staticmethod
    def backward(ctx: Any, grad_BLD: torch.Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]  (torch's annotation wants *args)
        if ctx.is_spread:
            grad_BLD = torch.cat(_of_all_ranks(grad_BLD, ctx.group), 1)
        return grad_BLD.float(), None, None, None


def _of_all_ranks(x: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    x = x.contiguous()
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x, group=group)
    return parts


def _local(x: torch.Tensor, gradient: Placement | None = None) -> torch.Tensor:
    """This rank's values. ``gradient``: placement of their gradient, where it is not the values' own."""
    if not isinstance(x, DTensor):
        return x
    x_local = x.to_local(grad_placements=None if gradient is None else [gradient])
    return _Arrived.apply(x_local) if isinstance(x_local, AsyncCollectiveTensor) else x_local


class _Arrived(torch.autograd.Function):
    """A collective's result, which by itself is waited for outside of autograd."""

    @staticmethod
    def forward(ctx: Any, x: AsyncCollectiveTensor) -> torch.Tensor:
        return x.wait()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]  (torch's annotation wants *args)
        return grad


def _with_value(computed: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """``with_value``, of this rank's values."""
    if not isinstance(computed, DTensor):
        return with_value(computed, value)
    out = with_value(_local(computed), value)
    return DTensor.from_local(out, computed.device_mesh, computed.placements, run_check=False)


class BatchInvariantLinear(LeanLinear):
    @dataclass(kw_only=True, slots=True)
    class Config(LeanLinear.Config):
        num_parts: int = 1
        cuts_depth: bool = False
        """Whether the parts are of the inputs, and not of the outputs."""

    _placement: Placement = Replicate()
    """Of the output among tensor-parallel ranks, where the depth is cut."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.num_parts, self.cuts_depth = config.num_parts, config.cuts_depth

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        if self.cuts_depth and self._sharding_config is not None:
            # TorchTitan would have a library add up what ranks computed
            out = self._sharding_config.out_dst_shardings
            if out is not None and (mesh := parallel_dims.resolve_shared_mesh([out])) is not None:
                (self._placement,) = resolve_placements(out, mesh)
            self._sharding_config = replace(self._sharding_config, out_src_shardings=None, out_dst_shardings=None)
        super().parallelize(parallel_dims)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.cuts_depth:
            return self._by_depth(input)
        width = self.out_features // self.num_parts
        if not isinstance(input, DTensor):
            return linear(input, self.weight, self.bias, width)
        bias = None if self.bias is None else _local(self.bias)
        out = linear(_local(input, Partial()), _local(self.weight), bias, width)  # gradients of this rank's outputs
        return DTensor.from_local(out, input.device_mesh, [Shard(out.ndim - 1)], run_check=False)

    def _by_depth(self, input: torch.Tensor) -> torch.Tensor:
        if not isinstance(input, DTensor):
            out = depth_product(input, self.weight, self.num_parts).to(input.dtype)
            return out if self.bias is None else out + self.bias
        mesh, is_spread = input.device_mesh, self._placement != Replicate()
        part = depth_product(_local(input), _local(self.weight), self.num_parts // mesh.size())
        out = _SumOverRanks.apply(part, mesh.get_group(), is_spread, input.dtype)
        if self.bias is not None:
            out = out + _local(self.bias, Partial() if is_spread else None)
        return DTensor.from_local(out, mesh, [self._placement], run_check=False)


class BatchInvariantRMSNorm(LeanRMSNorm):
    @dataclass(kw_only=True, slots=True)
    class Config(LeanRMSNorm.Config):
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.eps is not None, "TorchTitan's config has a number"
        return _with_value(super().forward(x), batch_invariant_rms_norm(_local(x), _local(self.weight), self.eps))


class BatchInvariantFeedForward(LeanFeedForward):
    @dataclass(kw_only=True, slots=True)
    class Config(LeanFeedForward.Config):
        pass

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.w1(x), self.w3(x)
        return self.w2(_with_value(F.silu(gate) * up, batch_invariant_silu_and_mul(_local(gate), _local(up))))


class BatchInvariantRoPE(HuggingFaceRoPE):
    """Rotary embedding whose cosines do not depend on how many positions are computed together."""

    @dataclass(kw_only=True, slots=True)
    class Config(HuggingFaceRoPE.Config):
        pass

    def _cosines_and_sines(self) -> torch.Tensor:
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
        num_parts: int = 1

    def __init__(self, config: Config):
        super().__init__(config)
        self.width = -(-config.out_features // config.num_parts)

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
            logits = linear(_local(input, Partial()).float(), _local(self.weight).float(), None, *self._words())
            if not isinstance(input, DTensor):
                return logits
            return DTensor.from_local(logits, input.device_mesh, [Shard(logits.ndim - 1)], run_check=False)
        assert statistics.get("penalties") is None, "penalized logits have no batch-invariant form"
        # no gradient is computed ahead: it would be of another value than the one that is returned
        rows_KS = super().forward(
            input, target_S=target_S, temperature=temperature, implementation=implementation, mask=mask, **statistics
        )
        with torch.no_grad():
            logprob_S = self._logprobs(_local(input), target_S, temperature, mask)
        return torch.cat([with_value(rows_KS[:1], logprob_S[None]), rows_KS[1:]])

    def _logprobs(
        self, input_SD: torch.Tensor, target_S: torch.Tensor, temperature: float, mask: SamplingMask | None
    ) -> torch.Tensor:
        weight_VD, words = _local(self.weight).float(), self._words()
        bits_SB = None if mask is None else torch.from_numpy(mask.bits()).to(target_S.device)
        word_V = torch.arange(len(self.weight), device=target_S.device)
        logprob_S = torch.empty(len(target_S), device=target_S.device)
        for start in range(0, len(target_S), POSITIONS_AT_ONCE):
            part = slice(start, start + POSITIONS_AT_ONCE)
            logits_SV = self._of_all_words(linear(input_SD[part].float(), weight_VD, None, *words))
            if bits_SB is not None:
                is_left_SV = bits_SB[part][:, word_V >> 3] >> (word_V & 7).to(torch.uint8) & 1
                logits_SV.masked_fill_(is_left_SV == 0, -torch.inf)
            all_SV = batch_invariant_log_softmax(
                logits_SV, temperature, implementation=implementation_on(logits_SV.device)
            )
            logprob_S[part] = all_SV.gather(1, target_S[part, None])[:, 0]
        return logprob_S

    def _words(self) -> tuple[int, int]:
        """Words that are multiplied together, and the first one of this rank."""
        if not isinstance(self.weight, DTensor):
            return self.width, 0
        mesh = self.weight.device_mesh
        return self.width, mesh.get_local_rank() * -(-len(self.weight) // mesh.size())  # as torch.chunk splits

    def _of_all_words(self, logits_SV: torch.Tensor) -> torch.Tensor:
        if not isinstance(self.weight, DTensor):
            return logits_SV
        mesh, num_words = self.weight.device_mesh, len(self.weight)
        missing = -(-num_words // mesh.size()) - logits_SV.shape[1]  # the last rank may have fewer
        parts = _of_all_ranks(F.pad(logits_SV, (0, missing)), mesh.get_group())
        return torch.cat(parts, 1)[:, :num_words]


_INVARIANT = {
    LeanLinear.Config: BatchInvariantLinear.Config,
    LeanRMSNorm.Config: BatchInvariantRMSNorm.Config,
    LeanFeedForward.Config: BatchInvariantFeedForward.Config,
    HuggingFaceRoPE.Config: BatchInvariantRoPE.Config,
    PackedAttention.Config: BatchInvariantAttention.Config,
    Float32Head.Config: BatchInvariantHead.Config,
}
_OVER_DEPTH = ("wo", "w2")
"""Linear layers whose inputs tensor-parallel ranks share."""
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


def convert_to_batch_invariant(config: Decoder.Config, num_parts: int = 1) -> None:
    """Have a model's layers built batch-invariant, if all of them have such a form; else none of them.

    ``num_parts``: tensor-parallel ranks of the side that has more."""
    if why_not_invariant(config):
        return
    # the innermost first: a config that is replaced takes what it holds along
    for _, part, parent, key in reversed(list(config.traverse(Module.Config, recurse=True))):
        if new := _INVARIANT.get(type(part)):
            converted: Any = new(**{field.name: getattr(part, field.name) for field in fields(part)})
            if isinstance(converted, BatchInvariantLinear.Config | BatchInvariantHead.Config):
                converted.num_parts = num_parts
            if isinstance(converted, BatchInvariantLinear.Config):
                converted.cuts_depth = num_parts > 1 and key in _OVER_DEPTH
            if isinstance(parent, list) and isinstance(key, int):
                parent[key] = converted
            else:
                setattr(parent, str(key), converted)


def _name(kind: type) -> str:
    return kind.__qualname__.removesuffix(".Config")

"""Causal attention over packed rows in which samples share their prompt, on any device.

A row is a flat sequence of tokens, cut into segments. A segment attends to itself, causally, and to all of the
segments that are its prefix: so the samples of a group share one copy of their prompt. A layer may see a
window of its document only, counted in positions, so the prefix counts as what it is: the tokens just before.

There are two forms. "packed": one call of a flash-attention kernel for the whole row (kernels/packed_attention.py),
without a mask or padding. "blocks", where no such kernel is or fits: segments of similar shape are gathered into padded
blocks and go through ``scaled_dot_product_attention`` together, with a dense mask.

Dimensions: T tokens of a row, D segments of a block, Q queries and K keys of a block's longest segment,
N heads, H head size.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.nn.utils.rnn import pad_sequence
from torchtitan.models.common.attention import GQAttention, VarlenAttention, VarlenMetadata
from torchtitan.models.common.decoder import Decoder
from torchtitan.protocols.module import Module

from titan_rl.data.types import Segment
from titan_rl.kernels.packed_attention import (
    PackedPlan,
    fits_flash,
    has_flash,
    largest_head,
    packed_attention,
    plan_packed,
)
from titan_rl.models.context_parallel import ContextParallel
from titan_rl.models.layers.cpu_attention import scaled_dot_product_attention

Made = TypeVar("Made")


@dataclass(frozen=True)
class Block:
    """Segments of one attention call, as indices into the row, padded with 0."""

    query_DQ: torch.Tensor
    key_DK: torch.Tensor
    prefix_D1: torch.Tensor | None
    """Lengths of the prefixes, whose keys come first. None: no segment has one."""
    valid_DQ: torch.Tensor
    """Whether a query is a real token."""

    def to(self, device: torch.device) -> "Block":
        prefix_D1 = None if self.prefix_D1 is None else self.prefix_D1.to(device)
        return Block(self.query_DQ.to(device), self.key_DK.to(device), prefix_D1, self.valid_DQ.to(device))

    def mask(self, window: int | None, sink: bool) -> torch.Tensor | None:
        """Attention mask [D, Q, K], true where a query sees a key; None: plain causal attention.

        ``window``: how many tokens a query sees, itself included; ``sink``: there is one more key, which all see.
        """
        num_keys = self.key_DK.shape[1]
        narrow = window if window is not None and window < num_keys else None
        if self.prefix_D1 is None and narrow is None and not sink:
            return None
        key_K, place_DQ1 = self._places()
        mask_DQK = key_K <= place_DQ1
        if narrow is not None:
            # a query of the padding must see something, or its softmax is not a number
            mask_DQK = mask_DQK & (key_K > place_DQ1 - narrow) | ~self.valid_DQ[:, :, None]
        return F.pad(mask_DQK, (0, 1), value=True) if sink else mask_DQK

    def sees_before(self, count: int) -> torch.Tensor:
        """Attention mask [D, Q, K] that leaves out the last ``count`` tokens of what a query sees, itself included."""
        key_K, place_DQ1 = self._places()
        return (key_K <= place_DQ1 - count).expand(len(self.query_DQ), -1, -1)

    def _places(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Of keys [K], and of queries [D or 1, Q, 1], in what a segment sees."""
        place_Q = torch.arange(self.query_DQ.shape[1], device=self.key_DK.device)
        place_DQ1 = (place_Q + (0 if self.prefix_D1 is None else self.prefix_D1)).view(-1, len(place_Q), 1)
        return torch.arange(self.key_DK.shape[1], device=self.key_DK.device), place_DQ1


@dataclass(frozen=True)
class BlockPlan:
    """Attention plan of a row by blocks, computed once for all layers."""

    blocks: list[Block]
    output_T: torch.Tensor
    """The place of each token of the row in the blocks' concatenated outputs."""
    segments: list[Segment]
    _made: dict[tuple, Any] = field(default_factory=dict, repr=False)

    def once(self, key: tuple, make: Callable[[], Made]) -> Made:
        """What layers of a kind make of a row, cached by ``key``."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def masks(self, window: int | None, sink: bool = False) -> list[torch.Tensor | None]:
        """Masks of all blocks, cached by window."""
        return self.once(("masks", window, sink), lambda: [block.mask(window, sink) for block in self.blocks])


AttentionPlan = BlockPlan | PackedPlan


@dataclass(frozen=True)
class SpreadPlan:
    """Attention plan of a row whose tokens are spread over ranks."""

    plan: AttentionPlan
    """Of the whole row."""
    context: ContextParallel


Form = Literal["blocks", "packed"]

_PIECE, _SHORT = 128, 32
"""Queries: the most that go together on a CPU, and the least that are worth a block of their own."""


def _pieces(segment: Segment) -> list[Segment]:
    """Of a long one: each has those before it as prefix. A CPU computes all scores of a block, those that are hidden by
    the mask included, which in a segment by itself are half of them."""
    count = -(-segment.length // _PIECE)
    begins = [segment.length * piece // count for piece in range(count + 1)]
    return [
        Segment(
            segment.start + begin, end - begin, (*segment.prefix, (segment.start, begin)) if begin else segment.prefix
        )
        for begin, end in pairwise(begins)
    ]


def _block_key(segment: Segment) -> tuple[bool, int, int]:
    # lengths are rounded up to a power of two, so that a long segment does not pad the short ones
    num_keys = segment.prefix_length + segment.length
    return segment.prefix_length > 0, (max(segment.length, _SHORT) - 1).bit_length(), (num_keys - 1).bit_length()


def _build_block(segments: list[Segment]) -> Block:
    start, length, prefix_length = torch.tensor([[s.start, s.length, s.prefix_length] for s in segments]).T[:, :, None]
    queries = torch.arange(int(length.max()))
    valid_DQ = queries < length
    query_DQ = torch.where(valid_DQ, start + queries, 0)
    if not prefix_length.any():
        return Block(query_DQ, query_DQ, None, valid_DQ)
    keys = [torch.cat([torch.arange(first, first + count) for first, count in _ranges(each)]) for each in segments]
    return Block(query_DQ, pad_sequence(keys, batch_first=True), prefix_length, valid_DQ)


def plan_attention(
    segments: list[Segment], num_tokens: int, device: torch.device, form: Form = "blocks"
) -> AttentionPlan:
    """Attention plan of one row of ``num_tokens`` tokens, which ``segments`` cover without gap or overlap.

    ``form``: what ``attention_form`` chose for the model.
    """
    if form == "packed":
        return plan_packed([_ranges(segment) for segment in segments], num_tokens, device)
    return _plan_blocks(segments, num_tokens, device)


def _plan_blocks(segments: list[Segment], num_tokens: int, device: torch.device) -> BlockPlan:
    by_shape: dict[tuple[bool, int, int], list[Segment]] = defaultdict(list)
    for segment in segments:
        for piece in _pieces(segment) if device.type == "cpu" else [segment]:
            by_shape[_block_key(piece)].append(piece)
    blocks, output_T, offset = [], torch.full((num_tokens,), -1), 0
    for key in sorted(by_shape):
        block = _build_block(by_shape[key])
        places = torch.arange(offset, offset + block.valid_DQ.numel()).view_as(block.valid_DQ)
        output_T[block.query_DQ[block.valid_DQ]] = places[block.valid_DQ]
        offset += block.valid_DQ.numel()
        blocks.append(block.to(device))
    assert int(output_T.min()) >= 0, "a token of the row belongs to no segment"
    return BlockPlan(blocks, output_T.to(device), segments)


def _ranges(segment: Segment) -> list[tuple[int, int]]:
    """All that its last token sees, in order."""
    return [*segment.prefix, (segment.start, segment.length)]


class PackedAttention(VarlenAttention):
    """Attention with an AttentionPlan in place of TorchTitan's masks.

    The arguments have TorchTitan's names, since its sharding config refers to them. Its constructor is not called: that
    one activates another flash-attention library by the GPU's generation, and imports it.
    """

    has_sink = False

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        window: int | None = None
        """How many tokens a query sees, itself included; None: all before it."""
        scale: float | None = None
        """Factor on the scores, where it is not one over the root of the head size."""

    def __init__(self, config: Config):
        Module.__init__(self)
        self.window, self.scale = config.window, config.scale

    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: AttentionPlan | SpreadPlan | VarlenMetadata,
        scale: float | None = None,
        enable_gqa: bool = False,
        **_: Any,
    ) -> torch.Tensor:
        q_TNH, k_TNH, v_TNH = (x_BLNH.flatten(0, 1) for x_BLNH in (q_BLNH, k_BLNH, v_BLNH))
        keywords: dict[str, Any] = {"scale": self.scale or scale, "enable_gqa": enable_gqa}
        if isinstance(attention_masks, SpreadPlan):
            context, num_heads = attention_masks.context, q_TNH.shape[1]
            q_TnH, k_TnH, v_TnH = (context.by_heads(x_LNH, num_heads) for x_LNH in (q_TNH, k_TNH, v_TNH))
            heads = context.heads(num_heads)
            out_TnH = self._attention(q_TnH, k_TnH, v_TnH, attention_masks.plan, heads, **keywords)
            out_TNH = context.by_tokens(out_TnH)
        else:
            assert isinstance(attention_masks, AttentionPlan), "TorchTitan's masks"
            out_TNH = self._attention(q_TNH, k_TNH, v_TNH, attention_masks, slice(None), **keywords)
        return out_TNH.view(*q_BLNH.shape[:2], *out_TNH.shape[1:])

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
        """Of a whole row. ``heads``: which of the rank's heads these are."""
        if isinstance(plan, PackedPlan):
            assert not self.has_sink, "the kernel knows no sinks"
            return packed_attention(q_TNH, k_TNH, v_TNH, plan, window=self.window, scale=scale)
        return self._by_blocks(q_TNH, k_TNH, v_TNH, plan, heads=heads, scale=scale, enable_gqa=enable_gqa)

    def _by_blocks(
        self, q_TNH: torch.Tensor, k_TNH: torch.Tensor, v_TNH: torch.Tensor, plan: BlockPlan, **keywords: Any
    ) -> torch.Tensor:
        outputs = []
        for block, mask_DQK in zip(plan.blocks, plan.masks(self.window, self.has_sink), strict=True):
            out_DNQH = self.attend(
                gather(q_TNH, block.query_DQ),
                gather(k_TNH, block.key_DK),
                gather(v_TNH, block.key_DK),
                attn_mask=None if mask_DQK is None else mask_DQK[:, None],
                is_causal=mask_DQK is None,
                **keywords,
            )
            outputs.append(out_DNQH.transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs).index_select(0, plan.output_T)

    def attend(
        self, q_DNQH: torch.Tensor, k_DNKH: torch.Tensor, v_DNKH: torch.Tensor, *, heads: slice, **keywords: Any
    ) -> torch.Tensor:
        """``heads``: which of the rank's heads these are."""
        return scaled_dot_product_attention(q_DNQH, k_DNKH, v_DNKH, **keywords)


def gather(x_TNH: torch.Tensor, index_DK: torch.Tensor) -> torch.Tensor:
    """Places of a row as blocks [D, N, K, H]."""
    rows = x_TNH.index_select(0, index_DK.flatten())
    return rows.view(*index_DK.shape, *rows.shape[1:]).transpose(1, 2)  # D N K H


class SinkAttention(PackedAttention):
    """Attention with GPT-OSS's sinks: one more key a head, with a learned score and no value.

    It becomes a key like others by one more feature, in which it alone is not zero and a query has the sink's score.
    """

    has_sink = True
    _FEATURES = 8  # GPU kernels want head sizes that are multiples of it

    @dataclass(kw_only=True, slots=True)
    class Config(PackedAttention.Config):
        num_heads: int

    def __init__(self, config: Config):
        super().__init__(config)
        self.sinks = torch.nn.Parameter(torch.empty(config.num_heads))

    def attend(
        self,
        q_DNQH: torch.Tensor,
        k_DNKH: torch.Tensor,
        v_DNKH: torch.Tensor,
        *,
        heads: slice,
        scale: float | None,
        **keywords: Any,
    ) -> torch.Tensor:
        assert scale is not None, "sinks are scaled as scores are"
        sinks_N = self.sinks
        if isinstance(sinks_N, DTensor):  # of this rank's heads
            sinks_N = sinks_N.to_local(grad_placements=sinks_N.placements)
        sinks_N = sinks_N[heads]
        size, more = q_DNQH.shape[-1], self._FEATURES
        score_DNQ1 = (sinks_N / scale).to(q_DNQH.dtype)[:, None, None].expand(*q_DNQH.shape[:-1], 1)
        q_DNQH = F.pad(torch.cat([q_DNQH, score_DNQ1], dim=-1), (0, more - 1))
        k_DNKH, v_DNKH = (F.pad(x_DNKH, (0, more, 0, 1)) for x_DNKH in (k_DNKH, v_DNKH))
        k_DNKH[..., -1, size] = 1.0
        return super().attend(q_DNQH, k_DNKH, v_DNKH, heads=heads, scale=scale, **keywords)[..., :size]


def why_blocks(model_config: Decoder.Config, device: torch.device, dtype: torch.dtype) -> str | None:
    """Reason why a model's rows cannot use the flash-attention kernel; None: they can.

    ``model_config``: TorchTitan's of the model; ``dtype``: that it computes in.
    """
    if not has_flash(device):
        return f"torch has no flash attention for this {device.type}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"flash attention does not compute in {str(dtype).removeprefix('torch.')}"
    layers = [getattr(layer, "attention", None) for layer in model_config.layers]
    supported = [
        attention
        for attention in layers
        if isinstance(attention, GQAttention.Config) and type(attention.inner_attention) is PackedAttention.Config
    ]
    if len(supported) != len(layers):
        return (
            "the model has attention of its own, such as sinks, latents or states, which flash attention does not know"
        )
    largest = largest_head(device)
    for size in sorted({attention.qkv_linear.head_dim for attention in supported}):
        if not fits_flash(dtype, size, largest):
            return f"flash attention takes heads of a multiple of 8 features up to {largest}, and these have {size}"
    return None


def attention_form(model_config: Decoder.Config, device: torch.device, dtype: torch.dtype) -> Form:
    """Form of attention for a model's rows. The arguments are those of ``why_blocks``."""
    return "blocks" if why_blocks(model_config, device, dtype) else "packed"

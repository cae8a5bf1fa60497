"""Causal attention over packed rows in which samples share their prompt, on any device.

A row is a flat sequence of tokens, cut into segments. A segment attends to itself, causally, and to all of its
prefix segment if it has one: so the samples of a group share one copy of their prompt. Segments of similar
shape are gathered into padded blocks and go through ``scaled_dot_product_attention`` together.

Dimensions: T tokens of a row, D segments of a block, Q queries and K keys of a block's longest segment,
N heads, H head size.
"""

from collections import defaultdict
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torchtitan.models.common.attention import VarlenAttention

from titan_rl.data.types import Segment


@dataclass(frozen=True)
class Block:
    """Segments that go through one attention call, as indices into the row, padded with 0."""

    query_DQ: torch.Tensor
    key_DK: torch.Tensor
    mask_DQK: torch.Tensor | None
    """True where a query sees a key. None: no segment has a prefix, so plain causal attention is enough."""


@dataclass(frozen=True)
class AttentionPlan:
    """What every layer needs to know about a row, computed once."""

    blocks: list[Block]
    output_T: torch.Tensor
    """The place of each token of the row in the blocks' concatenated outputs."""


def _block_key(segment: Segment) -> tuple[bool, int]:
    # lengths are rounded up to a power of two, so that a long segment does not pad the short ones
    return segment.prefix_length > 0, (segment.prefix_length + segment.length - 1).bit_length()


def _build_block(segments: list[Segment]) -> tuple[Block, torch.Tensor]:
    """A block, and for each (segment, query) of it whether it is a real token: [D, Q]."""
    start, length, prefix_start, prefix_length = torch.tensor(
        [[s.start, s.length, s.prefix_start, s.prefix_length] for s in segments]
    ).T[:, :, None]
    queries = torch.arange(int(length.max()))
    query_valid = queries < length
    query_DQ = torch.where(query_valid, start + queries, 0)
    if not prefix_length.any():
        return Block(query_DQ, query_DQ, None), query_valid
    keys = torch.arange(int((prefix_length + length).max()))
    in_prefix = keys < prefix_length
    key_DK = torch.where(in_prefix, prefix_start + keys, start + keys - prefix_length)
    key_DK = torch.where(keys < prefix_length + length, key_DK, 0)
    mask_DQK = keys <= (prefix_length + queries)[:, :, None]
    return Block(query_DQ, key_DK, mask_DQK), query_valid


def plan_attention(segments: list[Segment], num_tokens: int, device: torch.device) -> AttentionPlan:
    """The plan of one row of ``num_tokens`` tokens, which ``segments`` cover without gap or overlap."""
    by_shape: dict[tuple[bool, int], list[Segment]] = defaultdict(list)
    for segment in segments:
        by_shape[_block_key(segment)].append(segment)
    blocks, output_T, offset = [], torch.full((num_tokens,), -1), 0
    for key in sorted(by_shape):
        block, query_valid = _build_block(by_shape[key])
        places = torch.arange(offset, offset + query_valid.numel()).view_as(query_valid)
        output_T[block.query_DQ[query_valid]] = places[query_valid]
        offset += query_valid.numel()
        mask = None if block.mask_DQK is None else block.mask_DQK.to(device)
        blocks.append(Block(block.query_DQ.to(device), block.key_DK.to(device), mask))
    assert int(output_T.min()) >= 0, "a token of the row belongs to no segment"
    return AttentionPlan(blocks, output_T.to(device))


class PackedAttention(VarlenAttention):
    """Takes an AttentionPlan where TorchTitan passes its masks.

    The arguments have TorchTitan's names, since its sharding config refers to them.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        pass

    def forward(self, q_BLNH, k_BLNH, v_BLNH, *, attention_masks: AttentionPlan, scale=None, enable_gqa=False, **_):
        q_TNH, k_TNH, v_TNH = (x_BLNH.flatten(0, 1) for x_BLNH in (q_BLNH, k_BLNH, v_BLNH))
        outputs = [self._attend(block, q_TNH, k_TNH, v_TNH, scale, enable_gqa) for block in attention_masks.blocks]
        out_TNH = torch.cat(outputs).index_select(0, attention_masks.output_T)
        return out_TNH.view(*q_BLNH.shape[:2], *out_TNH.shape[1:])

    @staticmethod
    def _attend(block: Block, q_TNH, k_TNH, v_TNH, scale, enable_gqa):
        def gather(x_TNH, index_DK):
            rows = x_TNH.index_select(0, index_DK.flatten())
            return rows.view(*index_DK.shape, *rows.shape[1:]).transpose(1, 2)  # D N K H

        out_DNQH = F.scaled_dot_product_attention(
            gather(q_TNH, block.query_DQ),
            gather(k_TNH, block.key_DK),
            gather(v_TNH, block.key_DK),
            attn_mask=None if block.mask_DQK is None else block.mask_DQK[:, None],
            is_causal=block.mask_DQK is None,
            scale=scale,
            enable_gqa=enable_gqa,
        )
        return out_DNQH.transpose(1, 2).flatten(0, 1)

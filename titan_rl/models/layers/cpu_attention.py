"""Attention in bf16 on a CPU as batched matrix products.

torch's kernel for CPUs multiplies small blocks one by one, which takes three to four times as long where segments are
short (32 segments of 32 tokens behind 80, forward and backward: 14.5 ms against 4.4; segments of 256 behind 128: 40
against 29). Scores are exact products, summed up in fp32; a softmax's probabilities and the gradients of the scores
are rounded to bf16 once, as in that kernel, unless fp32 units multiply them (cpu_products.py). Longer segments go to
torch's: it never holds all scores of a head.

Dimensions: D segments, N query heads, G heads of keys, Q queries, K keys, H head size; B = D * G batches, R = N / G * Q
rows of a batch.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from titan_rl.compat.torch.tensors import softmax_gradient
from titan_rl.kernels.linear_logprob import exact_bf16_products
from titan_rl.models.layers.cpu_products import as_factor, has_products, multiply

_MAX_SCORES = 2**22
"""Held at once: 16 MiB in fp32."""


def scaled_dot_product_attention(
    q_DNQH: torch.Tensor,
    k_DGKH: torch.Tensor,
    v_DGKH: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """torch's function of that name, by what is faster for these inputs. ``attn_mask``: booleans, [D or 1, 1, Q, K]."""
    if not _is_for_products(q_DNQH, k_DGKH, enable_gqa):
        settings = {"attn_mask": attn_mask, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        return F.scaled_dot_product_attention(q_DNQH, k_DGKH, v_DGKH, **settings)
    if is_causal:
        attn_mask = torch.ones(1, 1, q_DNQH.shape[2], k_DGKH.shape[2], dtype=torch.bool).tril()
    scale = q_DNQH.shape[-1] ** -0.5 if scale is None else scale
    return _Products.apply(q_DNQH, k_DGKH, v_DGKH, attn_mask, scale)


def _is_for_products(q_DNQH: torch.Tensor, k_DGKH: torch.Tensor, enable_gqa: bool) -> bool:
    if q_DNQH.device.type != "cpu" or q_DNQH.dtype != torch.bfloat16 or not has_products():
        return False
    (_, heads, queries, _), (_, groups, keys, _) = q_DNQH.shape, k_DGKH.shape
    return (enable_gqa or heads == groups) and heads // groups * queries * keys <= _MAX_SCORES


class _Products(torch.autograd.Function):
    """``softmax(q @ k.T * scale) @ v`` (arXiv 1706.03762, equation 1)."""

    @staticmethod
    def forward(
        ctx: Any,
        q_DNQH: torch.Tensor,
        k_DGKH: torch.Tensor,
        v_DGKH: torch.Tensor,
        mask_D1QK: torch.Tensor | None,
        scale: float,
    ) -> torch.Tensor:
        q_BRH, k_BKH, v_BKH = (_batches(x, k_DGKH.shape[1]) for x in (q_DNQH, k_DGKH, v_DGKH))
        out_BRH = torch.empty(*q_BRH.shape[:2], v_BKH.shape[2], dtype=q_BRH.dtype)
        for part, mask_BQK in _parts(q_DNQH, k_DGKH, mask_D1QK):
            probability_BRK = _probabilities(q_BRH[part], k_BKH[part], mask_BQK, scale)
            multiply(as_factor(probability_BRK), as_factor(v_BKH[part]), out=out_BRH[part])
        ctx.save_for_backward(q_DNQH, k_DGKH, v_DGKH, mask_D1QK)
        ctx.scale = scale
        return out_BRH.view(*q_DNQH.shape[:3], -1)

    @staticmethod
    def backward(ctx: Any, grad_DNQH: torch.Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]  (torch's annotation wants *args)
        """With o = p @ v: dp = do @ v.T, ds = p * (dp - sum(p * dp)) (arXiv 2205.14135, appendix B.2)."""
        q_DNQH, k_DGKH, v_DGKH, mask_D1QK = ctx.saved_tensors
        inputs = (q_DNQH, k_DGKH, v_DGKH, grad_DNQH)
        q_BRH, k_BKH, v_BKH, grad_BRH = (_batches(x, k_DGKH.shape[1]) for x in inputs)
        dq_BRH, dk_BKH, dv_BKH = (torch.empty_like(x) for x in (q_BRH, k_BKH, v_BKH))
        for part, mask_BQK in _parts(q_DNQH, k_DGKH, mask_D1QK):
            q, k, v, grad = (as_factor(x[part]) for x in (q_BRH, k_BKH, v_BKH, grad_BRH))
            probability_BRK = _probabilities(q, k, mask_BQK, ctx.scale)
            multiply(as_factor(probability_BRK).mT, grad, out=dv_BKH[part])
            with exact_bf16_products(grad, v):
                dp_BRK = torch.bmm(grad.float(), v.float().mT)
            ds_BRK = softmax_gradient(dp_BRK, probability_BRK)
            ds_BRK = as_factor(ds_BRK.mul_(ctx.scale))
            multiply(ds_BRK, k, out=dq_BRH[part])
            multiply(ds_BRK.mT, q, out=dk_BKH[part])
        return dq_BRH.view_as(q_DNQH), dk_BKH.view_as(k_DGKH), dv_BKH.view_as(v_DGKH), None, None


def _batches(x_DNQH: torch.Tensor, num_groups: int) -> torch.Tensor:
    """The heads that share keys are one batch's rows: [B, R, H], contiguous."""
    segments, heads, tokens, size = x_DNQH.shape
    return x_DNQH.reshape(segments * num_groups, heads // num_groups * tokens, size)


def _parts(
    q_DNQH: torch.Tensor, k_DGKH: torch.Tensor, mask_D1QK: torch.Tensor | None
) -> Iterator[tuple[slice, torch.Tensor | None]]:
    """Batches whose scores may be held at once, and their masks."""
    (segments, heads, queries, _), (_, groups, keys, _) = q_DNQH.shape, k_DGKH.shape
    at_once = max(1, _MAX_SCORES // (heads // groups * queries * keys))
    for start in range(0, segments * groups, at_once):
        part = slice(start, start + at_once)
        if mask_D1QK is None or len(mask_D1QK) == 1:
            yield part, None if mask_D1QK is None else mask_D1QK[:, 0]
        else:
            segment_B = torch.arange(start, min(start + at_once, segments * groups)) // groups
            yield part, mask_D1QK[:, 0].index_select(0, segment_B)


def _probabilities(
    q_BRH: torch.Tensor, k_BKH: torch.Tensor, mask_BQK: torch.Tensor | None, scale: float
) -> torch.Tensor:
    with exact_bf16_products(q_BRH, k_BKH):
        score_BRK = torch.bmm(q_BRH.float(), k_BKH.float().mT)
    if mask_BQK is None:
        return torch.softmax(score_BRK.mul_(scale), -1)
    by_head_BNQK = score_BRK.view(len(score_BRK), -1, *mask_BQK.shape[1:])
    bias_B1QK = torch.zeros(mask_BQK.shape).masked_fill_(~mask_BQK, -torch.inf)[:, None]
    torch.add(bias_B1QK, by_head_BNQK, alpha=scale, out=by_head_BNQK)
    return torch.softmax(score_BRK, -1)

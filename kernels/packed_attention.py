"""Causal attention over a packed row whose segments share prefixes, as one call of a kernel for lengths that vary.

A segment's keys are those of its prefix and then its own, gathered one after the other. Its queries are the last of
these tokens, and a causal mask that is aligned with the last key (bottom right) is then exactly what each may see. So
there is no mask in memory and no padding, and heads that share keys (GQA) are the kernel's own business.

The gathered copies are not kept for the backward, which gathers again. Where a token was copied, the gradients of its
copies are added up in fp32 and in one order, without atomic operations.

Dimensions: T tokens of the row, K gathered keys, D segments, N heads of queries, G heads of keys, H head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.attention.varlen  # makes its operators known

_ROUNDED = 128
"""Longest lengths are rounded up to a multiple: kernels only size their grids by them."""
_LARGEST_HEAD, _LARGEST_HEAD_ELSEWHERE = 256, 192
_LARGE_HEADS = ((8, 0), (9, 0), (10, 0), (10, 3))
"""Compute capabilities that have the shared memory for the backward of heads of more than 192."""


@dataclass(frozen=True)
class PackedPlan:
    """Attention plan of a row, computed once for all layers."""

    query_ends_D1: torch.Tensor
    """int32: where each segment's queries begin, and where the last one's end. Queries are the row itself."""
    key_ends_D1: torch.Tensor
    """int32: the same of the gathered keys."""
    max_queries: int
    """Of a segment, at most."""
    max_keys: int
    key_K: torch.Tensor | None = None
    """int64: of each gathered key its token. None: nothing is shared, so keys are the row itself."""
    copy_K: torch.Tensor | None = None
    """int64: the gathered keys, sorted by their token."""
    copy_ends_T1: torch.Tensor | None = None
    """int64: where each token's copies begin among these."""


def plan_packed(
    segments: Sequence[Sequence[tuple[int, int]]], num_tokens: int, device: torch.device | str
) -> PackedPlan:
    """The plan of one row of ``num_tokens`` tokens.

    ``segments``: of each the ranges of tokens (start, length) that its last token sees, in order. The last range is the
    segment itself, those before it are its prefix. Together the segments cover the row without gap or overlap.
    """
    segments = sorted(segments, key=lambda ranges: ranges[-1])
    own_D2 = torch.tensor([ranges[-1] for ranges in segments])
    keys_D = torch.tensor([sum(length for _, length in ranges) for ranges in segments])
    query_ends_D1 = _ends(own_D2[:, 1])
    assert own_D2[:, 0].equal(query_ends_D1[:-1]) and int(query_ends_D1[-1]) == num_tokens, "segments do not cover it"
    plan = PackedPlan(
        query_ends_D1=_sent(query_ends_D1.int(), device),
        key_ends_D1=_sent(_ends(keys_D).int(), device),
        max_queries=_rounded(int(own_D2[:, 1].max())),
        max_keys=_rounded(int(keys_D.max())),
    )
    if int(keys_D.sum()) == num_tokens:
        return plan
    key_K = _sent(_tokens(torch.tensor([each for ranges in segments for each in ranges])), device)
    copy_K = key_K.argsort(stable=True)  # on the device: it takes a CPU 10 ms for 150,000 keys
    copy_ends_T1 = torch.searchsorted(key_K[copy_K], torch.arange(num_tokens + 1, device=device))
    return replace(plan, key_K=key_K, copy_K=copy_K, copy_ends_T1=copy_ends_T1)


def _sent(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """To a GPU without waiting for what it does."""
    if torch.device(device).type == "cuda" and torch.cuda.is_available():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _ends(lengths_D: torch.Tensor) -> torch.Tensor:
    return torch.cat([lengths_D.new_zeros(1), lengths_D.cumsum(0)])


def _rounded(length: int) -> int:
    return -(-length // _ROUNDED) * _ROUNDED


def _tokens(ranges_R2: torch.Tensor) -> torch.Tensor:
    """Of ranges (start, length), each token."""
    start_R, length_R = ranges_R2.T
    shift_R = start_R - _ends(length_R)[:-1]
    return shift_R.repeat_interleave(length_R) + torch.arange(int(length_R.sum()))


def has_flash(device: torch.device | str) -> bool:
    """Whether torch has a flash-attention kernel for this device."""
    device = torch.device(device)
    if device.type != "cuda" or not torch.backends.cuda.is_flash_attention_available():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def largest_head(device: torch.device | str) -> int:
    """Largest head size with a backward kernel."""
    capability = torch.cuda.get_device_capability(device)
    return _LARGEST_HEAD if capability in _LARGE_HEADS else _LARGEST_HEAD_ELSEWHERE


def fits_flash(dtype: torch.dtype, head_size: int, largest: int = _LARGEST_HEAD) -> bool:
    """Whether flash attention supports a dtype and head size. ``largest``: head size on the device."""
    return dtype in (torch.bfloat16, torch.float16) and head_size % 8 == 0 and head_size <= largest


def packed_attention(
    q_TNH: torch.Tensor,
    k_TGH: torch.Tensor,
    v_TGH: torch.Tensor,
    plan: PackedPlan,
    *,
    window: int | None = None,
    scale: float | None = None,
    implementation: Literal["auto", "flash", "reference"] = "auto",
) -> torch.Tensor:
    """Attention of each token over its segment, causally, and its whole prefix: [T, N, H].

    The result has the dtype of the queries.

    ``window``: how many tokens a query sees, itself included, None for all; ``scale``: of the scores, by default one
    over the root of the head size; ``implementation``: ``"auto"`` is the reference on a CPU.
    """
    scale = float(q_TNH.shape[-1] ** -0.5) if scale is None else scale
    if implementation == "reference" or (implementation == "auto" and q_TNH.device.type == "cpu"):
        return _reference(q_TNH, k_TGH, v_TGH, plan, window, scale)
    return _Flash.apply(q_TNH, k_TGH, v_TGH, *_lengths(plan), *_copies(plan), window, scale)


_Lengths = tuple[torch.Tensor, torch.Tensor, int, int]
"""Of a plan: where queries and keys of each segment end, and how long the longest are."""


def _lengths(plan: PackedPlan) -> _Lengths:
    return plan.query_ends_D1, plan.key_ends_D1, plan.max_queries, plan.max_keys


def _copies(plan: PackedPlan) -> tuple[torch.Tensor | None, ...]:
    return plan.key_K, plan.copy_K, plan.copy_ends_T1


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0913  (autograd sees no tensor inside of anything else)
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        query_ends: torch.Tensor,
        key_ends: torch.Tensor,
        max_queries: int,
        max_keys: int,
        key_K: torch.Tensor | None,
        copy_K: torch.Tensor | None,
        copy_ends: torch.Tensor | None,
        window: int | None,
        scale: float,
    ) -> torch.Tensor:
        lengths = (query_ends, key_ends, max_queries, max_keys)
        out, logsumexp, state = _flash_forward(q, _gather(k, key_K), _gather(v, key_K), lengths, window, scale)
        ctx.save_for_backward(q, k, v, out, logsumexp, state, query_ends, key_ends, key_K, copy_K, copy_ends)
        ctx.settings = (max_queries, max_keys, window, scale)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]  (torch's annotation wants *args)
        q, k, v, out, logsumexp, state, query_ends, key_ends, key_K, copy_K, copy_ends = ctx.saved_tensors
        max_queries, max_keys, window, scale = ctx.settings
        inputs = (grad, q, _gather(k, key_K), _gather(v, key_K), out, logsumexp)
        lengths = (query_ends, key_ends, max_queries, max_keys)
        grad_q, grad_k, grad_v = _flash_backward(inputs, state, lengths, window, scale)
        grad_k, grad_v = (_add_up(each, copy_K, copy_ends) for each in (grad_k, grad_v))
        return grad_q, grad_k, grad_v, *[None] * 9


def _gather(x_TGH: torch.Tensor, key_K: torch.Tensor | None) -> torch.Tensor:
    return x_TGH if key_K is None else x_TGH.index_select(0, key_K)


def _add_up(grad_KGH: torch.Tensor, copy_K: torch.Tensor | None, copy_ends_T1: torch.Tensor | None) -> torch.Tensor:
    """Of each token, the sum over its copies."""
    if copy_K is None:
        return grad_KGH
    copies_KGH = grad_KGH.index_select(0, copy_K).float()
    return torch.segment_reduce(copies_KGH, "sum", offsets=copy_ends_T1, axis=0, unsafe=True).to(grad_KGH.dtype)


def _window(window: int | None) -> dict[str, Any]:
    """As the kernel counts it: a query's tokens to the left, without itself."""
    return {"is_causal": window is None, "window_size": [-1 if window is None else window - 1, 0]}


def _flash_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: _Lengths, window: int | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The output, the scores' log-sum-exp, and the state of a random generator that nothing is drawn from."""
    return torch.ops.torch_attn._varlen_attn(q, k, v, *lengths, scale=scale, **_window(window))  # noqa: SLF001  (torch's operator, beneath its own wrapper)


def _flash_backward(
    inputs: tuple[torch.Tensor, ...], state: torch.Tensor, lengths: _Lengths, window: int | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of the queries and of the gathered keys and values, of the output's gradient, those, and the output."""
    return torch.ops.torch_attn._varlen_attn_backward(  # noqa: SLF001  (torch's operator, beneath its own wrapper)
        *(*inputs, *lengths), rng_state=state, scale=scale, **_window(window)
    )


def _reference(
    q_TNH: torch.Tensor, k_TGH: torch.Tensor, v_TGH: torch.Tensor, plan: PackedPlan, window: int | None, scale: float
) -> torch.Tensor:
    """By all scores of all tokens with all gathered keys, in fp32 or wider."""
    wide, repeats = torch.promote_types(q_TNH.dtype, torch.float32), q_TNH.shape[1] // k_TGH.shape[1]
    k_KNH, v_KNH = (_gather(x, plan.key_K).to(wide).repeat_interleave(repeats, 1) for x in (k_TGH, v_TGH))
    score_NTK = torch.einsum("tnh,knh->ntk", q_TNH.to(wide), k_KNH) * scale
    seen_TK = _seen(plan, len(q_TNH), len(k_KNH), window)
    probability_NTK = score_NTK.masked_fill(~seen_TK, -torch.inf).softmax(-1)
    return torch.einsum("ntk,knh->tnh", probability_NTK, v_KNH).to(q_TNH.dtype)


def _seen(plan: PackedPlan, num_tokens: int, num_keys: int, window: int | None) -> torch.Tensor:
    """Whether a token sees a gathered key: [T, K]."""
    query_T, key_K = (torch.arange(count, device=plan.key_ends_D1.device) for count in (num_tokens, num_keys))
    segment_T = torch.bucketize(query_T, plan.query_ends_D1[1:], right=True)
    segment_K = torch.bucketize(key_K, plan.key_ends_D1[1:], right=True)
    # where a token's own key is: both are counted from the end of their segment
    place_T = query_T - plan.query_ends_D1[1:][segment_T] + plan.key_ends_D1[1:][segment_T]
    seen_TK = (segment_T[:, None] == segment_K) & (key_K <= place_T[:, None])
    return seen_TK if window is None else seen_TK & (key_K > place_T[:, None] - window)

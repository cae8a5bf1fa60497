"""The operations of a decoder whose rows do not depend, bit for bit, on the batch around them.

Libraries choose another kernel, another split of the sum, for another number of rows; so a token's log-probability
differs between a generator's batch and a trainer's though both compute the same. Here the order of every addition is
fixed by what is computed alone: rows may come in any number, order and company. Norms, SwiGLU and the reference's
attention are made of operations that IEEE 754 rounds in one way, since a library's exponentials differ in a vector's
remainder. Gradients need no such thing and are torch's.

Dimensions: M rows of the batch, K summed over, N columns (of a weight, as torch's linear layers keep it: [N, K]);
of attention T tokens, D sequences, N heads, G heads of keys, H head size, P pages of S tokens.
"""

import math
import os
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # the reference does without
    if TYPE_CHECKING:
        raise
    triton = None

Implementation = Literal["reference", "triton"]

_ROWS, _DEPTH = 64, 512
"""Of the one shape that the reference multiplies: a library with several threads may share a longer sum among them."""
_QUERIES, _KEYS = 16, 64
"""Of the one shape of attention's products."""
_MAX_SCORES = 2**22
"""Held at once: 16 MiB in fp32."""
_LOWEST = -3.0e38
"""Finite, so that what has met no key yet does not take -inf from -inf."""


class PagedSequences(NamedTuple):
    """Sequences of a batch whose keys lie in pages, int32; a sequence's queries are the last of its tokens."""

    query_starts_D1: torch.Tensor
    """Cumulative numbers of queries, from 0 on."""
    num_keys_D: torch.Tensor
    """Tokens of each sequence."""
    pages_DP: torch.Tensor
    """Pages of each sequence's keys, in order (block table)."""
    max_queries: int
    """Of a sequence, at most."""


def batch_invariant_matmul(
    rows_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    *,
    implementation: Implementation = "reference",
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``rows @ weight.T`` [M, N] in ``out_dtype``, or the rows'.

    Numerics: products of 16-bit inputs are exact, sums are fp32 in a fixed order (no part of a sum is computed aside
    and joined later) and rounded once: |error| <= K 2**-24 sum |row| |weight|, and half a step of the output's dtype.
    The reference multiplies blocks of one shape, filled up with zeros, through torch, in fp32 at least: a library sums
    the same shape in the same order, whatever its rows hold (tested on this machine, by permuting rows). Equal bits are
    promised within one implementation and on one kind of device.
    """
    return _Matmul.apply(rows_MK, weight_NK, implementation, out_dtype or rows_MK.dtype)


def batch_invariant_log_softmax(
    logits_MN: torch.Tensor,
    temperature: float = 1.0,
    *,
    implementation: Implementation = "reference",
) -> torch.Tensor:
    """Log-probabilities [M, N] in fp32 of ``logits / temperature``.

    Numerics: fp32; |error| <= 2**-21 (1 + largest |logit / temperature|). Triton sums a row in a fixed number of lanes.
    """
    return _LogSoftmax.apply(logits_MN, temperature, implementation)


@torch.no_grad()
def batch_invariant_rms_norm(x_MN: torch.Tensor, weight_N: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / sqrt(mean(x**2) + eps) * weight`` in x's dtype (arXiv 1910.07467, equation 4); without gradients.

    Numerics: fp32, rounded once; a row is added up by halves.
    """
    wide_MN = x_MN.float()
    mean_M1 = _pairwise_sum(wide_MN * wide_MN) / wide_MN.shape[-1]
    return (wide_MN * (1.0 / (mean_M1 + eps).sqrt()) * weight_N.float()).to(x_MN.dtype)


@torch.no_grad()
def batch_invariant_silu_and_mul(gate_MN: torch.Tensor, up_MN: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` in gate's dtype (arXiv 2002.05202, equation 6); without gradients. Numerics: fp32, rounded
    once."""
    wide_MN = gate_MN.float()
    small_MN = _exp(-wide_MN.abs())
    sigmoid_MN = torch.where(wide_MN >= 0, 1.0, small_MN) / (1.0 + small_MN)
    return (wide_MN * sigmoid_MN * up_MN.float()).to(gate_MN.dtype)


@torch.no_grad()
def batch_invariant_attention(
    q_TNH: torch.Tensor,
    k_PSGH: torch.Tensor,
    v_PSGH: torch.Tensor,
    sequences: PagedSequences,
    *,
    scale: float,
    implementation: Implementation = "reference",
) -> torch.Tensor:
    """Causal attention of sequences over pages of keys [T, N, H] (arXiv 1706.03762, equation 1); without gradients.

    Numerics: fp32, rounded once; keys are met in blocks, counted from the first one, and a block that a query does not
    see changes nothing (online softmax, arXiv 2205.14135, algorithm 1).
    """
    attention = _triton_attention if implementation == "triton" else _reference_attention
    return attention(q_TNH, k_PSGH, v_PSGH, sequences, scale)


def with_value(computed: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """``value``, with the gradients of ``computed``, which is the same but for its rounding."""
    return _WithValue.apply(computed, value)


class _WithValue(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, computed: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]  (torch's annotation wants *args)
        return grad, None


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_MK: torch.Tensor, weight_NK: torch.Tensor, implementation: Implementation, dtype: torch.dtype
    ) -> torch.Tensor:
        ctx.save_for_backward(rows_MK, weight_NK)
        return (_triton_matmul if implementation == "triton" else _reference_matmul)(rows_MK, weight_NK, dtype)

    @staticmethod
    def backward(ctx: Any, grad_MN: torch.Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]  (torch's annotation wants *args)
        rows_MK, weight_NK = ctx.saved_tensors
        dtype = torch.promote_types(rows_MK.dtype, weight_NK.dtype)  # a weight may be kept widened
        of_rows, of_weight, *_ = ctx.needs_input_grad
        grad_MN = grad_MN.to(dtype)
        grad_rows_MK = (grad_MN @ weight_NK.to(dtype)).to(rows_MK.dtype) if of_rows else None
        return grad_rows_MK, (grad_MN.T @ rows_MK.to(dtype)).to(weight_NK.dtype) if of_weight else None, None, None


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_MN: torch.Tensor, temperature: float, implementation: Implementation) -> torch.Tensor:
        if implementation == "triton":
            logprob_MN = _triton_log_softmax(logits_MN, temperature)
        else:
            dtype = torch.promote_types(logits_MN.dtype, torch.float32)
            logprob_MN = torch.log_softmax(logits_MN.to(dtype).contiguous() / temperature, -1)
        ctx.save_for_backward(logprob_MN)
        ctx.temperature, ctx.dtype = temperature, logits_MN.dtype
        return logprob_MN

    @staticmethod
    def backward(ctx: Any, grad_MN: torch.Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]  (torch's annotation wants *args)
        (logprob_MN,) = ctx.saved_tensors
        grad_MN = grad_MN - logprob_MN.exp() * grad_MN.sum(-1, keepdim=True)
        return (grad_MN / ctx.temperature).to(ctx.dtype), None, None


def _reference_matmul(rows_MK: torch.Tensor, weight_NK: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    dtype = torch.promote_types(rows_MK.dtype, torch.float32)
    (_, depth), num_columns = rows_MK.shape, len(weight_NK)
    if num_columns == 1:  # a library has another form for one column, which shares its rows among threads
        weight_NK = torch.cat([weight_NK, weight_NK])
    # memory of our own: the library may look at how its operands are aligned
    own: dict[str, Any] = dict(copy=True, memory_format=torch.contiguous_format)
    weights_NK = [part_NK.to(dtype, **own) for part_NK in weight_NK.split(_DEPTH, 1)]
    blocks_BK = [rows_MK.new_zeros(_ROWS, part_NK.shape[1], dtype=dtype) for part_NK in weights_NK]
    out_MN = rows_MK.new_empty(len(rows_MK), num_columns, dtype=out_dtype)
    for start in range(0, len(rows_MK), _ROWS):
        part_MK = rows_MK[start : start + _ROWS]
        sum_BN: torch.Tensor | None = None
        for block_BK, weight_NK, first in zip(blocks_BK, weights_NK, range(0, depth, _DEPTH), strict=True):
            block_BK[: len(part_MK)] = part_MK[:, first : first + _DEPTH]
            block_BK[len(part_MK) :] = 0
            product_BN = block_BK @ weight_NK.T
            sum_BN = product_BN if sum_BN is None else sum_BN.add_(product_BN)
        assert sum_BN is not None
        out_MN[start : start + _ROWS] = sum_BN[: len(part_MK), :num_columns]
    return out_MN


def _pairwise_sum(x_MN: torch.Tensor) -> torch.Tensor:
    """Sums of rows [M, 1]: the second half is added to the first one, until one number is left."""
    width = 1 << (x_MN.shape[-1] - 1).bit_length()
    x_MN = torch.nn.functional.pad(x_MN, (0, width - x_MN.shape[-1]))
    while width > 1:
        width //= 2
        x_MN = x_MN[..., :width] + x_MN[..., width:]
    return x_MN


def _exp(x: torch.Tensor) -> torch.Tensor:
    """Exponential of fp32 numbers that are not positive: 2**k exp(r) with |r| <= log(2) / 2, by Taylor's series.

    |error| <= 2**-22 exp(x); 0 below the smallest normal number.
    """
    power = (x.clamp(min=-90.0) * math.log2(math.e)).round_()
    rest = x.clamp(min=-90.0) - power * 0.693359375
    rest -= power * (math.log(2) - 0.693359375)
    series = torch.full_like(rest, 1 / math.factorial(7))
    for degree in range(6, -1, -1):
        series = series.mul_(rest).add_(1 / math.factorial(degree))
    scale = ((power.int() + 127) << 23).view(torch.float32)
    return torch.where(x < -87.0, 0.0, series.mul_(scale))


def _reference_attention(
    q_TNH: torch.Tensor,
    k_PSGH: torch.Tensor,
    v_PSGH: torch.Tensor,
    sequences: PagedSequences,
    scale: float,
) -> torch.Tensor:
    """Tiles of queries of all sequences together. Dimensions: B tiles, Q queries of one, R = N / G * Q rows of a
    product, C keys of a block."""
    tiles = [
        (sequence, first, min(_QUERIES, end - first), num_keys - end + first)
        for sequence, ((start, end), num_keys) in enumerate(
            zip(pairwise(sequences.query_starts_D1.tolist()), sequences.num_keys_D.tolist(), strict=True)
        )
        for first in range(start, end, _QUERIES)
    ]
    tiles.sort(key=lambda tile: -(tile[2] + tile[3]))  # those that see a block of keys are the first ones
    out_TNH = torch.empty_like(q_TNH)
    at_once = max(1, _MAX_SCORES // (q_TNH.shape[1] * _QUERIES * _KEYS))
    for start in range(0, len(tiles), at_once):
        _attend_tiles(tiles[start : start + at_once], q_TNH, k_PSGH, v_PSGH, sequences.pages_DP, scale, out_TNH)
    return out_TNH


def _attend_tiles(
    tiles: list[tuple[int, int, int, int]],
    q_TNH: torch.Tensor,
    k_PSGH: torch.Tensor,
    v_PSGH: torch.Tensor,
    pages_DP: torch.Tensor,
    scale: float,
    out_TNH: torch.Tensor,
) -> None:
    """``tiles``: of each its sequence, its first row, its number of queries, and the place of the first one among the
    sequence's keys."""
    (_, page, groups, size), share = k_PSGH.shape, q_TNH.shape[1] // k_PSGH.shape[2]
    sequence_B, first_B, count_B, place_B = torch.tensor(tiles, device=q_TNH.device).T
    # products are of one shape, so a tile is filled up with its last query; all else is of those that some tile has
    width = int(count_B.max())
    query_Q = torch.arange(_QUERIES, device=q_TNH.device)
    of_tile_BQ = torch.minimum(query_Q, count_B[:, None] - 1)
    q_BRH = q_TNH[first_B[:, None] + of_tile_BQ].float().unflatten(2, (groups, share))  # B Q G R H
    q_BRH = q_BRH.permute(0, 2, 3, 1, 4).reshape(len(tiles) * groups, share * _QUERIES, size)
    place_BQ1 = (place_B[:, None] + of_tile_BQ)[:, :width, None].repeat_interleave(groups, 0)
    num_keys_B = place_B + count_B
    largest_BRQ1 = q_BRH.new_full((len(q_BRH), share, width, 1), _LOWEST)
    sum_BRQ1, out_BRQH = torch.zeros_like(largest_BRQ1), q_BRH.new_zeros(len(q_BRH), share, width, size)
    for start in range(0, int(num_keys_B.max()), _KEYS):
        active = int((num_keys_B > start).sum())
        part = slice(active * groups)
        key_C = torch.arange(start, start + _KEYS, device=q_TNH.device)
        safe_BC = torch.minimum(key_C, num_keys_B[:active, None] - 1)
        at_BC = pages_DP[sequence_B[:active, None], safe_BC // page].long(), safe_BC % page
        k_BCH, v_BCH = (x[at_BC].float().transpose(1, 2).flatten(0, 1).contiguous() for x in (k_PSGH, v_PSGH))
        product_BRC = torch.bmm(q_BRH[part], k_BCH.mT)
        score_BRQC = product_BRC.unflatten(1, (share, _QUERIES))[:, :, :width] * scale
        unseen_B1QC = (key_C > place_BQ1[part])[:, None]
        score_BRQC.masked_fill_(unseen_B1QC, _LOWEST)
        new_BRQ1 = torch.maximum(largest_BRQ1[part], score_BRQC.amax(-1, keepdim=True))
        weight_BRQC = _exp(score_BRQC - new_BRQ1).masked_fill_(unseen_B1QC, 0.0)
        kept_BRQ1 = _exp(largest_BRQ1[part] - new_BRQ1)
        largest_BRQ1[part] = new_BRQ1
        sum_BRQ1[part] = sum_BRQ1[part] * kept_BRQ1 + _pairwise_sum(weight_BRQC)
        filled_BRC = torch.nn.functional.pad(weight_BRQC, (0, 0, 0, _QUERIES - width)).flatten(1, 2)
        value_BRQH = torch.bmm(filled_BRC, v_BCH).unflatten(1, (share, _QUERIES))[:, :, :width]
        out_BRQH[part] = out_BRQH[part] * kept_BRQ1 + value_BRQH
    out_BQGRH = (out_BRQH / sum_BRQ1).unflatten(0, (len(tiles), groups)).permute(0, 3, 1, 2, 4)
    is_real_BQ = query_Q[:width] < count_B[:, None]
    out_TNH[(first_B[:, None] + query_Q[:width])[is_real_BQ]] = out_BQGRH.flatten(2, 3)[is_real_BQ].to(out_TNH.dtype)


def _triton_matmul(rows_MK: torch.Tensor, weight_NK: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    (num_rows, depth), num_columns = rows_MK.shape, len(weight_NK)
    rows_MK, weight_NK = rows_MK.contiguous(), weight_NK.contiguous()
    out_MN = torch.empty(num_rows, num_columns, dtype=out_dtype, device=rows_MK.device)
    if out_MN.numel():
        # never tuned by the number of rows: another configuration may be another order of addition
        settings = _MATMUL_16 if rows_MK.element_size() == 2 else _MATMUL_32
        settings = settings | {"EVEN_K": depth % settings["BLOCK_K"] == 0}
        tiles = triton.cdiv(num_rows, settings["BLOCK_M"]) * triton.cdiv(num_columns, settings["BLOCK_N"])
        inputs = rows_MK, weight_NK, out_MN, num_rows, num_columns, depth
        _matmul_kernel[(tiles,)](*inputs, **settings)
    return out_MN


def _triton_log_softmax(logits_MN: torch.Tensor, temperature: float) -> torch.Tensor:
    logits_MN = logits_MN.contiguous()
    out_MN = torch.empty(logits_MN.shape, dtype=torch.float32, device=logits_MN.device)
    if out_MN.numel():
        # fused, the quotient by a temperature would be subtracted from before it is rounded: an engine stores it
        settings: dict[str, Any] = dict(BLOCK=_LANES, num_warps=8, enable_fp_fusion=False)
        _log_softmax_kernel[(len(logits_MN),)](logits_MN, out_MN, logits_MN.shape[1], float(temperature), **settings)
    return out_MN


def _triton_attention(
    q_TNH: torch.Tensor,
    k_PSGH: torch.Tensor,
    v_PSGH: torch.Tensor,
    sequences: PagedSequences,
    scale: float,
) -> torch.Tensor:
    q_TNH, out_TNH = q_TNH.contiguous(), torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
    (_, heads, size), (_, page, groups, _) = q_TNH.shape, k_PSGH.shape
    query_starts_D1, num_keys_D, pages_DP, max_queries = sequences
    assert k_PSGH.stride() == v_PSGH.stride() and v_PSGH.shape[-1] == size and pages_DP.stride(1) == 1
    grid = (len(num_keys_D), triton.cdiv(max_queries, _QUERIES), heads)
    inputs = q_TNH, k_PSGH, v_PSGH, out_TNH, query_starts_D1, num_keys_D, pages_DP, pages_DP.stride(0), page
    _attention_kernel[grid](
        *inputs,
        *k_PSGH.stride(),
        scale,
        HEADS=heads,
        SHARE=heads // groups,
        SIZE=size,
        BLOCK_Q=_QUERIES,
        BLOCK_K=_KEYS,
        BLOCK_H=max(16, triton.next_power_of_2(size)),
        num_warps=4,
        num_stages=2,
        enable_fp_fusion=False,
    )
    return out_TNH


_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_LANES = 64 if _INTERPRETED else 4096


def _tile(rows: int, columns: int, depth: int, num_warps: int, num_stages: int) -> dict[str, Any]:
    size = (16, 32, 64) if _INTERPRETED else (rows, columns, depth)
    return dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), size, strict=True), num_warps=num_warps, num_stages=num_stages)


_MATMUL_16 = _tile(128, 128, 64, num_warps=8, num_stages=4)
_MATMUL_32 = _tile(64, 64, 32, num_warps=4, num_stages=3)

if TYPE_CHECKING or triton is not None:
    # the interpreter multiplies bfloat16 as if its bits were integers; in fp32 the products are the same
    _WIDEN = tl.constexpr(_INTERPRETED)

    # one program for every number of rows: not even the compiler may treat some of them apart
    @triton.jit(do_not_specialize=["M"])
    def _matmul_kernel(
        rows,
        weight,
        out,
        M,
        N,
        K,
        BLOCK_M: tl.constexpr,
        BLOCK_N: tl.constexpr,
        BLOCK_K: tl.constexpr,
        EVEN_K: tl.constexpr,
    ):
        """A tile of the product; eight tiles of rows share the columns that are in the L2 cache."""
        program = tl.program_id(0)
        across, down = tl.cdiv(N, BLOCK_N), tl.cdiv(M, BLOCK_M)
        group_start = program // (8 * across) * 8
        group_size = tl.minimum(down - group_start, 8)
        within = program % (8 * across)
        rows_M = (group_start + within % group_size) * BLOCK_M + tl.arange(0, BLOCK_M)
        columns_N = within // group_size * BLOCK_N + tl.arange(0, BLOCK_N)
        # past the end the last row and column are read again, and nothing is written
        safe_M, safe_N = tl.minimum(rows_M, M - 1).to(tl.int64), tl.minimum(columns_N, N - 1).to(tl.int64)
        depth_K = tl.arange(0, BLOCK_K)
        rows_at = rows + safe_M[:, None] * K + depth_K[None, :]
        weight_at = weight + safe_N[None, :] * K + depth_K[:, None]
        sums_MN = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, K, BLOCK_K):
            if EVEN_K:
                rows_MK, weight_KN = tl.load(rows_at + start), tl.load(weight_at + start)
            else:
                inside_K = depth_K < K - start
                rows_MK = tl.load(rows_at + start, mask=inside_K[None, :], other=0.0)
                weight_KN = tl.load(weight_at + start, mask=inside_K[:, None], other=0.0)
            if _WIDEN:
                rows_MK, weight_KN = rows_MK.to(tl.float32), weight_KN.to(tl.float32)
            sums_MN = tl.dot(rows_MK, weight_KN, sums_MN, input_precision="ieee")
        inside = (rows_M < M)[:, None] & (columns_N < N)[None, :]
        tl.store(out + safe_M[:, None] * N + columns_N[None, :], sums_MN.to(out.dtype.element_ty), mask=inside)

    @triton.jit
    def _log_softmax_kernel(logits, out, N, temperature, BLOCK: tl.constexpr):
        """A row: each lane's largest value and sum, then the row's, then the results, from the cache."""
        row = tl.program_id(0).to(tl.int64) * N
        lanes_N = tl.arange(0, BLOCK)
        # finite, so that a lane that has met nothing yet does not take -inf from -inf
        largest_N = tl.full((BLOCK,), -3.0e38, tl.float32)
        sum_N = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, N, BLOCK):
            inside_N = lanes_N < N - start
            value_N = tl.load(logits + row + start + lanes_N, mask=inside_N, other=float("-inf")).to(tl.float32)
            value_N = value_N / temperature
            new_N = tl.maximum(largest_N, value_N)
            sum_N = sum_N * tl.exp(largest_N - new_N) + tl.exp(value_N - new_N)
            largest_N = new_N
        largest = tl.max(largest_N, 0)
        log_total = largest + tl.log(tl.sum(sum_N * tl.exp(largest_N - largest), 0))
        for start in range(0, N, BLOCK):
            inside_N = lanes_N < N - start
            value_N = tl.load(logits + row + start + lanes_N, mask=inside_N, other=0.0).to(tl.float32)
            tl.store(out + row + start + lanes_N, value_N / temperature - log_total, mask=inside_N)

    # one program for pages of every size: the trainer's are single tokens, an engine's are blocks of them
    @triton.jit(
        do_not_specialize=["page", "pages_stride", "page_stride", "token_stride", "group_stride", "feature_stride"]
    )
    def _attention_kernel(  # noqa: PLR0913  (a kernel's arguments are pointers and numbers)
        q,
        k,
        v,
        out,
        query_starts,
        num_keys,
        pages,
        pages_stride,
        page,
        page_stride,
        token_stride,
        group_stride,
        feature_stride,
        scale,
        HEADS: tl.constexpr,
        SHARE: tl.constexpr,
        SIZE: tl.constexpr,
        BLOCK_Q: tl.constexpr,
        BLOCK_K: tl.constexpr,
        BLOCK_H: tl.constexpr,
    ):
        """A tile of a sequence's queries, of one head. SHARE heads read the same keys."""
        sequence, head = tl.program_id(0), tl.program_id(2)
        first = tl.load(query_starts + sequence)
        count = tl.load(query_starts + sequence + 1) - first
        # where the tile's queries are among the sequence's tokens
        query_Q = tl.program_id(1) * BLOCK_Q + tl.arange(0, BLOCK_Q)
        place_Q = tl.load(num_keys + sequence) - count + query_Q
        is_query_Q = query_Q < count
        feature_H = tl.arange(0, BLOCK_H)
        is_feature_H = feature_H < SIZE
        at_QH = ((first + query_Q).to(tl.int64)[:, None] * HEADS + head) * SIZE + feature_H[None, :]
        is_real_QH = is_query_Q[:, None] & is_feature_H[None, :]
        q_QH = tl.load(q + at_QH, mask=is_real_QH, other=0.0)
        largest_Q = tl.full((BLOCK_Q,), -3.0e38, tl.float32)
        sum_Q = tl.zeros((BLOCK_Q,), tl.float32)
        sum_QH = tl.zeros((BLOCK_Q, BLOCK_H), tl.float32)
        end = tl.max(tl.where(is_query_Q, place_Q, -1), 0) + 1
        for start in range(0, end, BLOCK_K):
            key_K = start + tl.arange(0, BLOCK_K)
            is_key_K = key_K < end
            page_K = tl.load(pages + sequence * pages_stride + key_K // page, mask=is_key_K, other=0).to(tl.int64)
            at_K = page_K * page_stride + (key_K % page) * token_stride + (head // SHARE) * group_stride
            at_KH = at_K[:, None] + feature_H[None, :] * feature_stride
            is_real_KH = is_key_K[:, None] & is_feature_H[None, :]
            k_KH = tl.load(k + at_KH, mask=is_real_KH, other=0.0)
            v_KH = tl.load(v + at_KH, mask=is_real_KH, other=0.0).to(tl.float32)
            if _WIDEN:
                q_QH, k_KH = q_QH.to(tl.float32), k_KH.to(tl.float32)
            score_QK = tl.dot(q_QH, tl.trans(k_KH), input_precision="ieee") * scale
            is_seen_QK = key_K[None, :] <= place_Q[:, None]
            new_Q = tl.maximum(largest_Q, tl.max(tl.where(is_seen_QK, score_QK, -3.0e38), 1))
            weight_QK = tl.where(is_seen_QK, tl.exp(score_QK - new_Q[:, None]), 0.0)
            kept_Q = tl.exp(largest_Q - new_Q)
            largest_Q = new_Q
            sum_Q = sum_Q * kept_Q + tl.sum(weight_QK, 1)
            sum_QH = sum_QH * kept_Q[:, None] + tl.dot(weight_QK, v_KH, input_precision="ieee")
        out_QH = sum_QH / tl.where(sum_Q > 0, sum_Q, 1.0)[:, None]  # a tile may be behind its sequence's queries
        tl.store(out + at_QH, out_QH.to(out.dtype.element_ty), mask=is_real_QH)

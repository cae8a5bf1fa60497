"""A matrix product and a log-softmax whose rows do not depend, bit for bit, on the batch around them.

Libraries choose another kernel, another split of the sum, for another number of rows; so a token's log-probability
differs between a generator's batch and a trainer's though both compute the same. Here the order of every addition is
fixed by what is multiplied alone: rows may come in any number, order and company. Gradients need no such thing and are
torch's.

Dimensions: M rows of the batch, K summed over, N columns (of a weight, as torch's linear layers keep it: [N, K]).
"""

import os
from typing import TYPE_CHECKING, Any, Literal

import torch

try:
    import triton
    import triton.language as tl
except ImportError:  # the reference does without
    if TYPE_CHECKING:
        raise
    triton = None

Implementation = Literal["reference", "triton"]

_ROWS = 64
"""Of the one shape that the reference multiplies."""


def batch_invariant_matmul(
    rows_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    *,
    implementation: Implementation = "reference",
) -> torch.Tensor:
    """``rows @ weight.T`` [M, N] in the inputs' dtype.

    Numerics: products of 16-bit inputs are exact, sums are fp32 in a fixed order (no part of a sum is computed aside
    and joined later) and rounded once: |error| <= K 2**-24 sum |row| |weight|, and half a step of the output's dtype.
    The reference multiplies blocks of one shape, filled up with zeros, through torch, in fp32 at least: a library sums
    the same shape in the same order, whatever its rows hold (tested on this machine, by permuting rows). Equal bits are
    promised within one implementation, on one kind of device, and with one number of threads.
    """
    return _Matmul.apply(rows_MK, weight_NK, implementation)


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


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_MK: torch.Tensor, weight_NK: torch.Tensor, implementation: Implementation
    ) -> torch.Tensor:
        ctx.save_for_backward(rows_MK, weight_NK)
        return (_triton_matmul if implementation == "triton" else _reference_matmul)(rows_MK, weight_NK)

    @staticmethod
    def backward(ctx: Any, grad_MN: torch.Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]  (torch's annotation wants *args)
        rows_MK, weight_NK = ctx.saved_tensors
        grad_rows_MK = grad_MN @ weight_NK if ctx.needs_input_grad[0] else None
        return grad_rows_MK, grad_MN.T @ rows_MK if ctx.needs_input_grad[1] else None, None


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


def _reference_matmul(rows_MK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    dtype = torch.promote_types(rows_MK.dtype, torch.float32)
    weight_NK = weight_NK.to(dtype).contiguous()
    # memory of our own: the library may look at how its operands are aligned
    block_BK = torch.zeros(_ROWS, rows_MK.shape[1], dtype=dtype, device=rows_MK.device)
    out_MN = rows_MK.new_empty(len(rows_MK), len(weight_NK))
    for start in range(0, len(rows_MK), _ROWS):
        part_MK = rows_MK[start : start + _ROWS]
        block_BK[: len(part_MK)] = part_MK
        block_BK[len(part_MK) :] = 0
        out_MN[start : start + _ROWS] = (block_BK @ weight_NK.T)[: len(part_MK)]
    return out_MN


def _triton_matmul(rows_MK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    (num_rows, depth), num_columns = rows_MK.shape, len(weight_NK)
    rows_MK, weight_NK = rows_MK.contiguous(), weight_NK.contiguous()
    out_MN = torch.empty(num_rows, num_columns, dtype=rows_MK.dtype, device=rows_MK.device)
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
        settings: dict[str, Any] = dict(BLOCK=_LANES, num_warps=8)
        _log_softmax_kernel[(len(logits_MN),)](logits_MN, out_MN, logits_MN.shape[1], float(temperature), **settings)
    return out_MN


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

"""Log-probabilities and entropies straight from hidden states and the vocabulary's weight.

The logits [tokens, vocabulary] never exist: forward and backward go over them in tiles, and the backward computes them
again, four products where logits in full cost three, unless all of them are few enough to be kept (in their tiles).
The outer loop is over words, so that each word's weight is read, and its gradient written, once. Left out: the
reduction of the hidden states' gradient over the ranks of a spread vocabulary, which is the caller's (as it is behind
any column-parallel layer).

Dimensions: S tokens, D hidden size, V words of the vocabulary (under a group, those that this rank holds).
"""

import os
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

try:
    import triton
    import triton.language as tl
except ImportError:  # the reference does without
    triton = None

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_CPU_TILE_TOKENS, _CPU_TILE_SIZE = 4096, 2**22
"""16 MiB. Smaller tiles are no faster, and threads wait for each other once an operation on a tile (LOG.md)."""
_KEPT_LOGITS = 2**26
"""256 MiB: those of 1,365 tokens over SmolLM2's words, whose backward then costs what it does with logits in full."""
_GPU_TILE_TOKENS, _GPU_TILE_SIZE = 16384, 3 * 2**26
"""The gradient's tile in bf16 is 384 MiB."""


@dataclass(frozen=True)
class _Head:
    """What makes logits of products, and where the work is done."""

    temperature: float
    soft_cap: float | None
    first_word: int
    group: dist.ProcessGroup | None
    tile_tokens: int
    tile_words: int
    kept_logits: int
    triton: bool


def linear_logprob(
    hidden_SD: torch.Tensor,
    weight_VD: torch.Tensor,
    target_S: torch.Tensor,
    *,
    bias_V: torch.Tensor | None = None,
    temperature: float = 1.0,
    soft_cap: float | None = None,
    first_word: int = 0,
    group: dist.ProcessGroup | None = None,
    tile_tokens: int | None = None,
    tile_words: int | None = None,
    kept_logits: int = _KEPT_LOGITS,
    implementation: Literal["reference", "triton"] = "reference",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target and entropy of its distribution, [S] each; both may be differentiated.

    Logits are ``hidden @ weight.T + bias``, then ``soft_cap * tanh(logits / soft_cap)``, then over ``temperature``;
    they must be finite, and targets must be words of the vocabulary. With a group, the rank holds the words from
    ``first_word`` on, ranks exchange four numbers a token, all get the same results and must compute the same loss;
    the hidden states' gradient is then this rank's part of a sum over the group.

    Numerics: inputs of 16 bits are multiplied exactly and accumulated in fp32; softmax, entropy and everything else are
    fp32 (float64 if the inputs are). Forward, against float64 on the same inputs: error <= 2**-22 * (1 + largest norm
    of a hidden state * largest norm of a word's weight) / temperature. Backward: the reference's products are fp32;
    Triton's round the gradient of the logits to the inputs' dtype (bf16: each entry by 2**-9 of itself) and accumulate
    in fp32. Gradients are rounded once, at the end, to the inputs' dtypes.

    Memory beyond inputs and gradients: the reference holds two tiles (16 MiB each), a block of the weight in fp32 and,
    until its backward, all logits if they are no more than ``kept_logits`` (256 MiB by default; 0: none). Triton keeps
    none, and holds a tile (384 MiB in bf16) and the hidden states' gradient in fp32 twice.
    """
    on_triton = implementation == "triton"
    num_tokens = max(len(hidden_SD), 1)
    tokens, size = (_GPU_TILE_TOKENS, _GPU_TILE_SIZE) if on_triton else (_CPU_TILE_TOKENS, _CPU_TILE_SIZE)
    tile_tokens = min(tile_tokens or tokens, num_tokens)
    # few tokens may take more words at a time, but a block of the weight is held too
    tile_words = tile_words or min(size // tile_tokens, 16384 if on_triton else 8192)
    if on_triton and hidden_SD.dtype != weight_VD.dtype:  # its products want one dtype
        dtype = torch.promote_types(hidden_SD.dtype, weight_VD.dtype)
        hidden_SD, weight_VD = hidden_SD.to(dtype), weight_VD.to(dtype)
    head = _Head(temperature, soft_cap, first_word, group, tile_tokens, tile_words, kept_logits, on_triton)
    return _LinearLogprob.apply(hidden_SD, weight_VD, bias_V, target_S, head)


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_SD, weight_VD, bias_V, target_S, head: _Head):
        local_S = target_S - head.first_word
        inputs = hidden_SD.detach(), weight_VD.detach(), bias_V, local_S, head
        are_few = len(hidden_SD) * len(weight_VD) <= head.kept_logits
        ctx.kept = _Kept(are_few and any(ctx.needs_input_grad))
        max_S, sums_3S = _triton_statistics(*inputs) if head.triton else _reference_statistics(*inputs, ctx.kept)
        if head.group is not None:
            local_max_S = max_S.clone()
            dist.all_reduce(max_S, op=dist.ReduceOp.MAX, group=head.group)
            sums_3S[:2] *= (local_max_S - max_S).exp()
            dist.all_reduce(sums_3S, group=head.group)
        total_S, expected_S, target_logit_S = sums_3S
        log_total_S = total_S.log() + max_S
        logprob_S, entropy_S = target_logit_S - log_total_S, log_total_S - expected_S / total_S
        ctx.save_for_backward(hidden_SD, weight_VD, bias_V, local_S, log_total_S, entropy_S)
        ctx.head = head
        ctx.set_materialize_grads(False)
        return logprob_S, entropy_S

    @staticmethod
    def backward(ctx, grad_logprob_S, grad_entropy_S):
        hidden_SD, weight_VD, bias_V, local_S, log_total_S, entropy_S = ctx.saved_tensors
        head, needed = ctx.head, ctx.needs_input_grad
        if grad_logprob_S is None:
            grad_logprob_S = torch.zeros_like(log_total_S)
        tokens = _Tokens(hidden_SD, local_S, log_total_S, entropy_S, grad_logprob_S.contiguous(), grad_entropy_S)
        gradients = _Gradients(hidden_SD, weight_VD, bias_V, needed[:3], head)
        for words in _slices(len(weight_VD), head.tile_words):
            block_VD = weight_VD[words] if head.triton else weight_VD[words].to(log_total_S.dtype)
            for rows in _slices(len(hidden_SD), head.tile_tokens):
                tile = tokens.at(rows, words, block_VD.dtype)
                inputs = tile, block_VD, None if bias_V is None else bias_V[words], head, gradients.buffer
                if head.triton:
                    grad_SV = _triton_gradient_tile(*inputs)
                else:
                    logits_SV = ctx.kept.pop(rows, words)
                    grad_SV = _reference_gradient(
                        tile, _logits_again(*inputs) if logits_SV is None else logits_SV, head
                    )
                gradients.add(grad_SV, tile.hidden_SD, block_VD, rows, words)
        return *gradients.finished(), None, None


def _slices(length: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


@dataclass(frozen=True)
class _Tokens:
    """What the backward knows of each token; ``local_S`` counts from the first word of the block."""

    hidden_SD: torch.Tensor
    local_S: torch.Tensor
    log_total_S: torch.Tensor
    entropy_S: torch.Tensor
    grad_logprob_S: torch.Tensor
    grad_entropy_S: torch.Tensor | None

    def at(self, rows: slice, words: slice, dtype: torch.dtype) -> "_Tokens":
        return _Tokens(
            self.hidden_SD[rows].to(dtype),
            self.local_S[rows] - words.start,
            self.log_total_S[rows],
            self.entropy_S[rows],
            self.grad_logprob_S[rows],
            None if self.grad_entropy_S is None else self.grad_entropy_S[rows].contiguous(),
        )


class _Kept:
    """Tiles of logits from the forward that the backward need not compute again: all of them, or none.

    The backward takes them out, for it makes gradients of them in place; a second one computes them again.
    """

    def __init__(self, keeps: bool):
        self._keeps, self._tiles = keeps, {}

    def tile(self, rows: slice, words: slice, buffer: torch.Tensor) -> torch.Tensor:
        """Memory for a tile's logits: kept, or the buffer's."""
        shape = rows.stop - rows.start, words.stop - words.start
        if not self._keeps:
            return buffer[: shape[0] * shape[1]].view(shape)
        tile = self._tiles[rows.start, words.start] = buffer.new_empty(shape)
        return tile

    def pop(self, rows: slice, words: slice) -> torch.Tensor | None:
        return self._tiles.pop((rows.start, words.start), None)


class _Gradients:
    """Gradients of hidden states, weight and bias, added up tile by tile in the accumulating dtype."""

    def __init__(self, hidden_SD, weight_VD, bias_V, needed, head: _Head):
        self.dtype = torch.promote_types(hidden_SD.dtype, torch.float32)
        self.inputs = hidden_SD, weight_VD, bias_V
        self.hidden_SD = hidden_SD.new_zeros(hidden_SD.shape, dtype=self.dtype) if needed[0] else None
        self.weight_VD = torch.empty_like(weight_VD) if needed[1] else None
        self.bias_V = torch.empty_like(bias_V) if needed[2] else None
        size = head.tile_tokens * min(head.tile_words, len(weight_VD))
        tile_dtype = hidden_SD.dtype if head.triton else self.dtype
        self.buffer = hidden_SD.new_empty(size, dtype=tile_dtype)

    def add(self, grad_SV, hidden_SD, block_VD, rows: slice, words: slice) -> None:
        first, last = rows.start == 0, rows.stop == len(self.inputs[0])
        if self.hidden_SD is not None:
            _add_product(self.hidden_SD[rows], grad_SV, block_VD)
        if self.weight_VD is not None:
            out_VD = self.weight_VD[words]
            if first and last and grad_SV.dtype == out_VD.dtype:
                torch.mm(grad_SV.T, hidden_SD, out=out_VD)
            else:
                if first:
                    self._block_VD = torch.zeros_like(out_VD, dtype=self.dtype)
                _add_product(self._block_VD, grad_SV.T, hidden_SD)
                if last:
                    out_VD.copy_(self._block_VD)
        if self.bias_V is not None:
            if first:
                self._block_V = torch.zeros_like(self.bias_V[words], dtype=self.dtype)
            self._block_V += grad_SV.sum(0, dtype=self.dtype)
            if last:
                self.bias_V[words] = self._block_V

    def finished(self):
        if len(self.inputs[0]) == 0:  # no token, no tile: nothing has been written
            for gradient in (self.weight_VD, self.bias_V):
                if gradient is not None:
                    gradient.zero_()
        hidden_SD = None if self.hidden_SD is None else self.hidden_SD.to(self.inputs[0].dtype)
        return hidden_SD, self.weight_VD, self.bias_V


def _add_product(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """``out += left @ right``, accumulated in out's dtype."""
    if left.dtype == out.dtype:
        out.addmm_(left, right)
    elif left.is_cuda:
        out += torch.mm(left, right, out_dtype=out.dtype)
    else:  # no such product on a CPU
        out.addmm_(left.to(out.dtype), right.to(out.dtype))


# The reference


def _reference_logits(hidden_SD, block_VD, block_V, head: _Head, out_SV: torch.Tensor) -> torch.Tensor:
    torch.mm(hidden_SD, block_VD.T, out=out_SV)
    if block_V is not None:
        out_SV += block_V
    if head.soft_cap is not None:
        return out_SV.div_(head.soft_cap).tanh_().mul_(head.soft_cap / head.temperature)
    return out_SV if head.temperature == 1 else out_SV.div_(head.temperature)


def _reference_statistics(hidden_SD, weight_VD, bias_V, local_S, head: _Head, kept: _Kept):
    """The largest logit; and sums over words: exp(logit - largest), the same times the logit, the target's logit."""
    dtype = torch.promote_types(hidden_SD.dtype, torch.float32)
    max_S = hidden_SD.new_full((len(hidden_SD),), -torch.inf, dtype=dtype)
    sums_3S = hidden_SD.new_zeros((3, len(hidden_SD)), dtype=dtype)
    buffers = hidden_SD.new_empty((2, head.tile_tokens * min(head.tile_words, len(weight_VD))), dtype=dtype)
    for words in _slices(len(weight_VD), head.tile_words):
        block_VD, block_V = weight_VD[words].to(dtype), None if bias_V is None else bias_V[words]
        for rows in _slices(len(hidden_SD), head.tile_tokens):
            tile_SV = kept.tile(rows, words, buffers[0])
            logits_SV = _reference_logits(hidden_SD[rows].to(dtype), block_VD, block_V, head, tile_SV)
            new_max_S = torch.maximum(max_S[rows], logits_SV.amax(-1))
            sums_3S[:2, rows] *= (max_S[rows] - new_max_S).exp()
            max_S[rows] = new_max_S
            here_S, index_S = _in_block(local_S[rows] - words.start, len(block_VD))
            sums_3S[2, rows] += torch.where(here_S, logits_SV.gather(1, index_S[:, None])[:, 0], 0)
            exp_SV = buffers[1, : logits_SV.numel()].view(logits_SV.shape)
            torch.sub(logits_SV, new_max_S[:, None], out=exp_SV).exp_()
            sums_3S[0, rows] += exp_SV.sum(-1)
            sums_3S[1, rows] += exp_SV.mul_(logits_SV).sum(-1)
    return max_S, sums_3S


def _in_block(local_S: torch.Tensor, num_words: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether a token's target is in the block, and where (0 if it is not)."""
    here_S = (local_S >= 0) & (local_S < num_words)
    return here_S, torch.where(here_S, local_S, 0)


def _logits_again(tokens: _Tokens, block_VD, block_V, head: _Head, buffer: torch.Tensor) -> torch.Tensor:
    shape = len(tokens.hidden_SD), len(block_VD)
    return _reference_logits(tokens.hidden_SD, block_VD, block_V, head, buffer[: shape[0] * shape[1]].view(shape))


def _reference_gradient(tokens: _Tokens, grad_SV: torch.Tensor, head: _Head) -> torch.Tensor:
    """Logits become the gradient of their products, in place.

    That of a logit is g [target] - p (g + e (log p + entropy)), g and e being those of log-probability and entropy.
    """
    slope_SV = None
    if head.soft_cap is not None:
        slope_SV = 1 - (grad_SV * (head.temperature / head.soft_cap)).square_()
    grad_SV -= tokens.log_total_S[:, None]
    scale_S = tokens.grad_logprob_S / head.temperature
    if tokens.grad_entropy_S is None:
        grad_SV.exp_().mul_(-scale_S[:, None])
    else:
        entropy_scale_S = tokens.grad_entropy_S / head.temperature
        factor_SV = grad_SV * -entropy_scale_S[:, None]
        factor_SV -= (scale_S + entropy_scale_S * tokens.entropy_S)[:, None]
        grad_SV.exp_().mul_(factor_SV)
    here_S, index_S = _in_block(tokens.local_S, grad_SV.shape[1])
    grad_SV.scatter_add_(1, index_S[:, None], torch.where(here_S, scale_S, 0)[:, None])
    return grad_SV if slope_SV is None else grad_SV.mul_(slope_SV)


# Triton


def _triton_statistics(hidden_SD, weight_VD, bias_V, local_S, head: _Head):
    """As the reference's; programs share a token's words out among ``splits`` and their parts are joined here."""
    num_tokens, num_words = len(hidden_SD), len(weight_VD)
    if num_tokens == 0 or num_words == 0:
        return _reference_statistics(hidden_SD, weight_VD, bias_V, local_S, head, _Kept(False))
    hidden_SD, weight_VD = _rows_contiguous(hidden_SD), _rows_contiguous(weight_VD)
    splits = max(1, min(triton.cdiv(8 * 128 * 128, num_tokens), triton.cdiv(num_words, 2048), 256))
    words_per_split = triton.cdiv(triton.cdiv(num_words, splits), 256) * 256
    splits = triton.cdiv(num_words, words_per_split)
    parts_4NS = torch.empty((4, splits, num_tokens), dtype=torch.float32, device=hidden_SD.device)
    _statistics_kernel[lambda meta: (triton.cdiv(num_tokens, meta["BLOCK_S"]) * splits,)](
        *(hidden_SD, weight_VD, bias_V, local_S, parts_4NS),
        *(num_tokens, num_words, hidden_SD.shape[1], hidden_SD.stride(0), weight_VD.stride(0)),
        *(words_per_split, splits, 1 / head.temperature, head.soft_cap or 0.0),
        HAS_BIAS=bias_V is not None,
        HAS_CAP=head.soft_cap is not None,
    )
    max_NS, total_NS, expected_NS, target_logit_NS = parts_4NS
    max_S = max_NS.amax(0)
    scale_NS = (max_NS - max_S).exp()
    return max_S, torch.stack([(scale_NS * total_NS).sum(0), (scale_NS * expected_NS).sum(0), target_logit_NS.sum(0)])


def _triton_gradient_tile(tokens: _Tokens, block_VD, block_V, head: _Head, buffer: torch.Tensor) -> torch.Tensor:
    hidden_SD, block_VD = _rows_contiguous(tokens.hidden_SD), _rows_contiguous(block_VD)
    shape = len(hidden_SD), len(block_VD)
    grad_SV = buffer[: shape[0] * shape[1]].view(shape)
    has_entropy = tokens.grad_entropy_S is not None
    _gradient_kernel[lambda meta: (triton.cdiv(shape[0], meta["BLOCK_S"]) * triton.cdiv(shape[1], meta["BLOCK_V"]),)](
        *(hidden_SD, block_VD, block_V, tokens.local_S, tokens.log_total_S, tokens.entropy_S, tokens.grad_logprob_S),
        *(tokens.grad_entropy_S if has_entropy else tokens.grad_logprob_S, grad_SV),
        *(*shape, hidden_SD.shape[1], hidden_SD.stride(0), block_VD.stride(0)),
        *(1 / head.temperature, head.soft_cap or 0.0),
        HAS_BIAS=block_V is not None,
        HAS_CAP=head.soft_cap is not None,
        HAS_ENTROPY=has_entropy,
    )
    return grad_SV


def _rows_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


if triton is not None:
    # the interpreter multiplies bfloat16 as if its bits were integers; in fp32 the products are the same
    _WIDEN = tl.constexpr(_INTERPRETED)

    if _INTERPRETED:
        _CONFIGS = [triton.Config({"BLOCK_S": 16, "BLOCK_V": 64, "BLOCK_D": 64})]
    else:
        _CONFIGS = [
            triton.Config({"BLOCK_S": s, "BLOCK_V": v, "BLOCK_D": d}, num_warps=warps, num_stages=stages)
            for s, v, d, warps, stages in [
                *((128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (256, 128, 64, 8, 3), (256, 128, 64, 8, 4)),
                *((128, 128, 64, 8, 4), (128, 128, 128, 8, 3), (128, 128, 64, 4, 3), (64, 256, 64, 8, 4)),
                *((64, 128, 64, 4, 4), (32, 128, 64, 4, 4), (64, 64, 32, 4, 3)),
            ]
        ]

    @triton.jit
    def _logits_tile(
        hidden_at,
        weight_at,
        bias,
        words_V,
        is_word_V,
        D,
        inverse_temperature,
        soft_cap,
        BLOCK_S: tl.constexpr,
        BLOCK_V: tl.constexpr,
        BLOCK_D: tl.constexpr,
        EVEN_D: tl.constexpr,
        HAS_BIAS: tl.constexpr,
        HAS_CAP: tl.constexpr,
    ):
        """Logits [BLOCK_S, BLOCK_V] and, if they are capped, the slope of the cap (else 1)."""
        dims_D = tl.arange(0, BLOCK_D)
        products_SV = tl.zeros((BLOCK_S, BLOCK_V), tl.float32)
        for start in range(0, D, BLOCK_D):
            if EVEN_D:
                hidden_SD = tl.load(hidden_at + start)
                weight_DV = tl.load(weight_at + start)
            else:
                inside_D = dims_D < D - start
                hidden_SD = tl.load(hidden_at + start, mask=inside_D[None, :], other=0.0)
                weight_DV = tl.load(weight_at + start, mask=inside_D[:, None], other=0.0)
            if _WIDEN:
                hidden_SD, weight_DV = hidden_SD.to(tl.float32), weight_DV.to(tl.float32)
            products_SV = tl.dot(hidden_SD, weight_DV, products_SV, input_precision="ieee")
        if HAS_BIAS:
            products_SV += tl.load(bias + words_V, mask=is_word_V, other=0.0).to(tl.float32)[None, :]
        slope_SV = tl.full((1, 1), 1.0, tl.float32)
        if HAS_CAP:
            # tanh by the exponential that is needed anyway, written so that it cannot overflow
            small_SV = tl.exp(-2.0 * tl.abs(products_SV / soft_cap))
            tanh_SV = (1.0 - small_SV) / (1.0 + small_SV)
            products_SV = soft_cap * tl.where(products_SV < 0, -tanh_SV, tanh_SV)
            slope_SV = 1.0 - tanh_SV * tanh_SV
        return products_SV * inverse_temperature, slope_SV

    _even_D = {"EVEN_D": lambda arguments: arguments["D"] % arguments["BLOCK_D"] == 0}

    @triton.autotune(_CONFIGS, key=["V", "D"])
    @triton.heuristics(_even_D)
    @triton.jit
    def _statistics_kernel(
        hidden,
        weight,
        bias,
        target,
        parts,
        S,
        V,
        D,
        hidden_stride,
        weight_stride,
        words_per_split,
        num_splits,
        inverse_temperature,
        soft_cap,
        BLOCK_S: tl.constexpr,
        BLOCK_V: tl.constexpr,
        BLOCK_D: tl.constexpr,
        EVEN_D: tl.constexpr,
        HAS_BIAS: tl.constexpr,
        HAS_CAP: tl.constexpr,
    ):
        """One block of tokens over one split of the words, by online softmax.

        Programs that run at one time are 16 blocks of tokens by all splits: their hidden states and the words that
        they are at fit into the L2 cache.
        """
        program = tl.program_id(0)
        num_blocks = tl.cdiv(S, BLOCK_S)
        group_start = program // (16 * num_splits) * 16
        group_size = tl.minimum(num_blocks - group_start, 16)
        within = program % (16 * num_splits)
        split = within // group_size
        rows_S = (group_start + within % group_size) * BLOCK_S + tl.arange(0, BLOCK_S)
        is_row_S = rows_S < S
        # rows past the end read the last one's memory and write nothing: no mask inside the product's loop
        safe_S = tl.minimum(rows_S, S - 1).to(tl.int64)
        dims_D = tl.arange(0, BLOCK_D)
        hidden_at = hidden + safe_S[:, None] * hidden_stride + dims_D[None, :]
        target_S = tl.load(target + safe_S)
        max_S = tl.full((BLOCK_S,), float("-inf"), tl.float32)
        total_S = tl.zeros((BLOCK_S,), tl.float32)
        expected_S = tl.zeros((BLOCK_S,), tl.float32)
        target_logit_S = tl.zeros((BLOCK_S,), tl.float32)
        first = split * words_per_split
        last = tl.minimum(first + words_per_split, V)
        for start in range(first, last, BLOCK_V):
            words_V = start + tl.arange(0, BLOCK_V)
            is_word_V = words_V < last
            safe_V = tl.minimum(words_V, V - 1).to(tl.int64)
            weight_at = weight + safe_V[None, :] * weight_stride + dims_D[:, None]
            logits_SV, _ = _logits_tile(
                hidden_at,
                weight_at,
                bias,
                words_V,
                is_word_V,
                D,
                inverse_temperature,
                soft_cap,
                BLOCK_S,
                BLOCK_V,
                BLOCK_D,
                EVEN_D,
                HAS_BIAS,
                HAS_CAP,
            )
            new_max_S = tl.maximum(max_S, tl.max(tl.where(is_word_V[None, :], logits_SV, float("-inf")), 1))
            exp_SV = tl.where(is_word_V[None, :], tl.exp(logits_SV - new_max_S[:, None]), 0.0)
            scale_S = tl.exp(max_S - new_max_S)
            total_S = total_S * scale_S + tl.sum(exp_SV, 1)
            expected_S = expected_S * scale_S + tl.sum(exp_SV * logits_SV, 1)
            is_target_SV = (words_V[None, :] == target_S[:, None]) & is_word_V[None, :]
            target_logit_S += tl.sum(tl.where(is_target_SV, logits_SV, 0.0), 1)
            max_S = new_max_S
        out = parts + split * S + rows_S
        part = num_splits * S
        tl.store(out, max_S, mask=is_row_S)
        tl.store(out + part, total_S, mask=is_row_S)
        tl.store(out + 2 * part, expected_S, mask=is_row_S)
        tl.store(out + 3 * part, target_logit_S, mask=is_row_S)

    @triton.autotune(_CONFIGS, key=["V", "D"])
    @triton.heuristics(_even_D)
    @triton.jit
    def _gradient_kernel(
        hidden,
        weight,
        bias,
        target,
        log_total,
        entropy,
        grad_logprob,
        grad_entropy,
        grad,
        S,
        V,
        D,
        hidden_stride,
        weight_stride,
        inverse_temperature,
        soft_cap,
        BLOCK_S: tl.constexpr,
        BLOCK_V: tl.constexpr,
        BLOCK_D: tl.constexpr,
        EVEN_D: tl.constexpr,
        HAS_BIAS: tl.constexpr,
        HAS_CAP: tl.constexpr,
        HAS_ENTROPY: tl.constexpr,
    ):
        """The logits of a tile again, and at once the gradient of their products, in the inputs' dtype."""
        program = tl.program_id(0)
        num_blocks, num_word_blocks = tl.cdiv(S, BLOCK_S), tl.cdiv(V, BLOCK_V)
        group_start = program // (8 * num_word_blocks) * 8
        group_size = tl.minimum(num_blocks - group_start, 8)
        within = program % (8 * num_word_blocks)
        rows_S = (group_start + within % group_size) * BLOCK_S + tl.arange(0, BLOCK_S)
        words_V = within // group_size * BLOCK_V + tl.arange(0, BLOCK_V)
        is_row_S, is_word_V = rows_S < S, words_V < V
        safe_S, safe_V = tl.minimum(rows_S, S - 1).to(tl.int64), tl.minimum(words_V, V - 1).to(tl.int64)
        dims_D = tl.arange(0, BLOCK_D)
        logits_SV, slope_SV = _logits_tile(
            hidden + safe_S[:, None] * hidden_stride + dims_D[None, :],
            weight + safe_V[None, :] * weight_stride + dims_D[:, None],
            bias,
            words_V,
            is_word_V,
            D,
            inverse_temperature,
            soft_cap,
            BLOCK_S,
            BLOCK_V,
            BLOCK_D,
            EVEN_D,
            HAS_BIAS,
            HAS_CAP,
        )
        logprob_SV = logits_SV - tl.load(log_total + safe_S)[:, None]
        scale_S = tl.load(grad_logprob + safe_S)
        factor_SV = scale_S[:, None]
        if HAS_ENTROPY:
            grad_entropy_S = tl.load(grad_entropy + safe_S)
            factor_SV += grad_entropy_S[:, None] * (logprob_SV + tl.load(entropy + safe_S)[:, None])
        is_target_SV = words_V[None, :] == tl.load(target + safe_S)[:, None]
        grad_SV = tl.where(is_target_SV, scale_S[:, None], 0.0) - tl.exp(logprob_SV) * factor_SV
        grad_SV *= slope_SV * inverse_temperature
        out = grad + safe_S[:, None] * V + words_V[None, :]
        tl.store(out, grad_SV.to(grad.dtype.element_ty), mask=is_row_S[:, None] & is_word_V[None, :])

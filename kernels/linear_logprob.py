"""Log-probabilities and entropies straight from hidden states and the vocabulary's weight.

The logits [tokens, vocabulary] never exist: forward and backward go over them in tiles. A backward that knows nothing
before its turn computes them again, four products where logits in full cost three; its outer loop is over words, so
that each word's weight is read, and its gradient written, once. Told beforehand what gradient its log-probabilities
will get, the reference makes do with three: it goes over the tokens in chunks, and makes a chunk's gradients of the
logits that it has at hand. Left out: the reduction of the hidden states' gradient over the ranks of a spread
vocabulary, which is the caller's (as it is behind any column-parallel layer).

Dimensions: S tokens, D hidden size, V words of the vocabulary (under a group, those that this rank holds), B bytes of
a bit for each word of all ranks.
"""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
import torch.distributed as dist

try:
    import triton
    import triton.language as tl
except ImportError:  # the reference does without
    if TYPE_CHECKING:
        raise
    triton = None

_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_CPU_TILE_TOKENS, _CPU_TILE_SIZE = 4096, 2**22
"""16 MiB. Smaller tiles are no faster, and threads wait for each other once an operation on a tile (LOG.md)."""
_CPU_CHUNK_SIZE, _CPU_CHUNK_TOKENS = 2**24, 256
"""Of logits that are at hand at once: 64 MiB, or so many tokens', lest the weight's gradient be added up too often."""
_CPU_KEPT_SIZE = 2**27
"""Of the logits' gradients that are kept in bf16: 256 MiB."""
_GPU_TILE_TOKENS, _GPU_TILE_SIZE = 16384, 3 * 2**26
"""The gradient's tile in bf16 is 384 MiB."""
_LEFT_OUT = -1e30
"""Logit of a word that is left out: its probability is 0, and no arithmetic makes it NaN, as that of -inf does."""


ExpectedGrad = Callable[[torch.Tensor, slice], torch.Tensor]
"""What gradient some tokens' log-probabilities will get, by these log-probabilities and the tokens."""
_Needed = tuple[bool, bool, bool]
"""Whether hidden states, weight and bias are to have a gradient."""
_Gradient = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""Of hidden states, weight and bias."""
_Statistics = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Log-probabilities, entropies, and the logarithm of the softmax's denominator, [S] each."""


class TilePenalties(Protocol):
    """Penalties of some tokens' logits, which a tile of logits takes, part by part, before words are left out."""

    @property
    def scales_gradients(self) -> bool:
        """Whether the derivative of any penalized logit is another than 1."""
        ...

    def at(self, rows: slice) -> "TilePenalties":
        """Penalties of some of these tokens."""
        ...

    def parts(self, num_rows: int, first_word: int, num_words: int) -> list[slice]:
        """Rows of a tile, of words from ``first_word`` on, that are penalized at once, lest that take much memory."""
        ...

    def apply(self, logits_SV: torch.Tensor, first_word: int, temperature: float) -> None:
        """Penalize a part's logits over ``temperature``, of words from ``first_word`` on, in place."""
        ...

    def derivatives(
        self, logits_SV: torch.Tensor, first_word: int, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Places [E] of penalized logits in a part, and the derivative of each by what it was before."""
        ...


@dataclass(frozen=True)
class _Head:
    """What makes logits of products, and where the work is done."""

    temperature: float
    soft_cap: float | None
    first_word: int
    group: dist.ProcessGroup | None
    tile_tokens: int
    tile_words: int
    triton: bool


def linear_logprob(  # noqa: PLR0913  (a head's settings, most of which most heads leave as they are)
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
    expected_grad: ExpectedGrad | None = None,
    mask_SB: torch.Tensor | None = None,
    penalties: TilePenalties | None = None,
    implementation: Literal["reference", "triton"] = "reference",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probability of each target and entropy of its distribution, [S] each; both may be differentiated.

    Logits are ``hidden @ weight.T + bias``, then ``soft_cap * tanh(logits / soft_cap)``, then over ``temperature``;
    they must be finite, and targets must be words of the vocabulary. With a group, the rank holds the words from
    ``first_word`` on, ranks exchange four numbers a token, all get the same results and must compute the same loss;
    the hidden states' gradient is then this rank's part of a sum over the group.

    ``mask_SB`` (uint8) cuts each token's distribution down to some words and renormalizes it: bit v % 8 of byte v // 8
    is set where word v, of all ranks' words, is kept, the target among them. A word that is left out has probability 0.
    ``penalties`` change logits before that; the reference alone takes them, and without a soft cap.

    Numerics: inputs of 16 bits are multiplied exactly and accumulated in fp32; softmax, entropy and everything else are
    fp32 (float64 if the inputs are). Forward, against float64 on the same inputs: error <= 2**-22 * (1 + largest norm
    of a hidden state * largest norm of a word's weight) / temperature. Backward: the reference's products are fp32;
    Triton's, and the reference's of bf16 on a CPU that multiplies bf16, round the gradient of the logits to the inputs'
    dtype (bf16: each entry by 2**-9 of itself) and accumulate in fp32. Gradients are rounded once, at the end, to the
    inputs' dtypes.

    ``expected_grad(logprob_S, tokens)`` says what gradient these tokens will get, these being their log-probabilities:
    possible where the loss is a sum over tokens. It saves the reference a product of four and is never trusted: if the
    backward is handed anything else than what was expected, to the bit, it computes the gradients anew.

    Memory beyond inputs and gradients: the reference holds two tiles (16 MiB each) and a block of the weight in fp32,
    and what penalties take for a part of a tile (models/layers/penalties.py: 8 MiB).
    With an expected gradient it holds a chunk of logits (64 MiB or 256 tokens'), a tile and, of a weight in 16 bits, a
    copy and the gradient in fp32; where a CPU multiplies bf16, instead of that gradient those of all logits in bf16, as
    long as they take no more than 256 MiB. Triton, which expects nothing, holds a tile (384 MiB in bf16) and the hidden
    states' gradient in fp32 twice.
    """
    on_triton = implementation == "triton"
    assert penalties is None or (not on_triton and soft_cap is None), "the reference penalizes logits, uncapped ones"
    num_tokens = max(len(hidden_SD), 1)
    tokens, size = (_GPU_TILE_TOKENS, _GPU_TILE_SIZE) if on_triton else (_CPU_TILE_TOKENS, _CPU_TILE_SIZE)
    if on_triton or not torch.is_grad_enabled():
        expected_grad = None
    if expected_grad is not None:
        tokens = max(_CPU_CHUNK_SIZE // max(len(weight_VD), 1), _CPU_CHUNK_TOKENS)
    tile_tokens = min(tile_tokens or tokens, num_tokens)
    # few tokens may take more words at a time, but a block of the weight is held too
    tile_words = tile_words or min(size // tile_tokens, 16384 if on_triton else 8192)
    if on_triton and hidden_SD.dtype != weight_VD.dtype:  # its products want one dtype
        dtype = torch.promote_types(hidden_SD.dtype, weight_VD.dtype)
        hidden_SD, weight_VD = hidden_SD.to(dtype), weight_VD.to(dtype)
    head = _Head(temperature, soft_cap, first_word, group, tile_tokens, tile_words, on_triton)
    mask_SB = None if mask_SB is None else mask_SB.contiguous()
    return _LinearLogprob.apply(hidden_SD, weight_VD, bias_V, target_S, mask_SB, penalties, head, expected_grad)


class Workspace:
    """Memory of what a call needs while it runs, and of the gradient of the weight that it gives.

    Calls inside of it (``with``) use one memory, one after the other: the weight's gradient is lost with the next call,
    whose forward must not come between a forward and its backward. These are the largest blocks of a training step.
    Allocated for each row anew, among activations of ever other sizes, they would fit into nothing that was freed
    before. It is given back at the end, and taken at the next beginning.
    """

    def __init__(self) -> None:
        self._memory: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}
        self._sizes: dict[tuple[str, torch.dtype, torch.device], int] = {}
        self._num_calls = 0

    def __enter__(self) -> None:
        for key, size in self._sizes.items():
            self._memory[key] = torch.empty(size, dtype=key[1], device=key[2])
        _entered.append(self)

    def begin_call(self) -> int:
        """Number of a forward."""
        self._num_calls += 1
        return self._num_calls

    def check_last(self, call: int) -> None:
        """Errors: AssertionError for a backward whose forward was not the last one."""
        assert call == self._num_calls, "two calls of an output head in one forward have one gradient's memory"

    def __exit__(self, *_: object) -> None:
        _entered.pop()
        self._memory.clear()

    def empty(self, name: str, like: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialized, on ``like``'s device."""
        key, size = (name, dtype, like.device), math.prod(shape)
        if key not in self._memory or len(self._memory[key]) < size:
            self._memory[key], self._sizes[key] = like.new_empty(size, dtype=dtype), size
        return self._memory[key][:size].view(shape)


_entered: list[Workspace] = []
_OF_WEIGHT = "gradient of weight"


def _empty(name: str, like: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Of the workspace that this call is in, if it is in one."""
    return _entered[-1].empty(name, like, shape, dtype) if _entered else like.new_empty(shape, dtype=dtype)


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_SD: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        target_S: torch.Tensor,
        mask_SB: torch.Tensor | None,
        penalties: TilePenalties | None,
        head: _Head,
        expected_grad: ExpectedGrad | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        local_S = target_S - head.first_word
        detached = hidden_SD.detach(), weight_VD.detach(), None if bias_V is None else bias_V.detach()
        inputs = *detached, local_S, mask_SB, penalties, head
        ctx.expected, ctx.workspace = None, _entered[-1] if _entered and ctx.needs_input_grad[1] else None
        ctx.call = 0 if ctx.workspace is None else ctx.workspace.begin_call()
        with exact_bf16_products(hidden_SD, weight_VD):
            if expected_grad is not None and any(ctx.needs_input_grad):
                found, ctx.expected = _forward_and_expected_backward(*inputs, ctx.needs_input_grad[:3], expected_grad)
            else:
                found = _normalized(*(_triton_statistics if head.triton else _reference_statistics)(*inputs), head)
        logprob_S, entropy_S, log_total_S = found
        ctx.save_for_backward(hidden_SD, weight_VD, bias_V, local_S, mask_SB, log_total_S, entropy_S)
        ctx.head, ctx.penalties = head, penalties
        ctx.set_materialize_grads(False)
        return logprob_S, entropy_S

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  (torch's annotation wants *args)
        ctx: Any, grad_logprob_S: torch.Tensor | None, grad_entropy_S: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden_SD, weight_VD, bias_V, local_S, mask_SB, log_total_S, entropy_S = ctx.saved_tensors
        if ctx.workspace is not None:
            ctx.workspace.check_last(ctx.call)
        if grad_logprob_S is None:
            grad_logprob_S = torch.zeros_like(log_total_S)
        (expected_S, gradients), ctx.expected = ctx.expected or (None, None), None  # they can be given away once
        if expected_S is None or grad_entropy_S is not None or not torch.equal(expected_S, grad_logprob_S):
            found = log_total_S, entropy_S, grad_logprob_S.contiguous(), grad_entropy_S
            tokens = _Tokens(hidden_SD, local_S, mask_SB, ctx.penalties, ctx.head.first_word, *found)
            with exact_bf16_products(hidden_SD, weight_VD):
                gradients = _backward_again(tokens, weight_VD, bias_V, ctx.needs_input_grad[:3], ctx.head)
        assert gradients is not None
        return *gradients, None, None, None, None, None


def has_bf16_units() -> bool:
    """Whether this CPU has AVX-512's instructions for products of bf16."""
    return torch.cpu.get_capabilities().get("avx512_bf16", False)


@cache
def multiplies_wide() -> bool:
    """Whether this CPU multiplies bf16 faster when it is widened to fp32: products of bf16 are exact there.

    Without AMX, Intel's bf16 instructions are half as fast as its fp32 ones (4,096²: 161 against 326 GFLOP/s on two
    cores), and where an x86 CPU has none, oneDNN's substitute a fifth. By what the CPU is and not by the clock: results
    depend on it, in their last bits.
    """
    has = torch.cpu.get_capabilities()
    if has.get("architecture") != "x86_64" or has.get("amx_tile", False):
        return False
    return has.get("cpu_name", "").startswith("Intel") or not has_bf16_units()


@contextmanager
def exact_bf16_products(a: torch.Tensor, b: torch.Tensor) -> Iterator[None]:
    """Use a CPU's bf16 units for fp32 products of bf16 values, where they are faster.

    They round what they are given to bf16, which changes neither hidden states nor weights, and sum up in fp32.
    """
    # torch makes the attribute by replacing the module's class, which a checker does not see
    matmul = torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
    before, is_bf16 = matmul.fp32_precision, a.dtype == b.dtype == torch.bfloat16
    if is_bf16 and a.device.type == "cpu" and not multiplies_wide():
        matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def _normalized(max_S: torch.Tensor, sums_3S: torch.Tensor, head: _Head) -> _Statistics:
    """Log-probabilities, entropies, and the logarithm of the softmax's denominator, over all ranks' words."""
    if head.group is not None:
        local_max_S = max_S.clone()
        dist.all_reduce(max_S, op=dist.ReduceOp.MAX, group=head.group)
        sums_3S[:2] *= (local_max_S - max_S).exp()
        dist.all_reduce(sums_3S, group=head.group)
    total_S, expected_S, target_logit_S = sums_3S
    log_total_S = total_S.log() + max_S
    return target_logit_S - log_total_S, log_total_S - expected_S / total_S, log_total_S


def _forward_and_expected_backward(
    hidden_SD: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    local_S: torch.Tensor,
    mask_SB: torch.Tensor | None,
    penalties: TilePenalties | None,
    head: _Head,
    needed: _Needed,
    expected_grad: ExpectedGrad,
) -> tuple[_Statistics, tuple[torch.Tensor, _Gradient]]:
    """All logits of a chunk of tokens are kept, in tiles; its statistics known, they become their own gradient."""
    if _can_be_kept(hidden_SD, weight_VD):
        gradients = _KeptGradients(hidden_SD, weight_VD, bias_V, needed)
    else:
        gradients = _Gradients(hidden_SD, weight_VD, bias_V, needed, words_outside=False)
    if weight_VD.dtype != gradients.dtype:  # once, and not for every chunk twice
        weight_VD = _empty("weight", weight_VD, weight_VD.shape, gradients.dtype).copy_(weight_VD)
    logits = _empty("logits", hidden_SD, (head.tile_tokens * len(weight_VD),), gradients.dtype)
    logprob_S, entropy_S, log_total_S, expected_S = (
        hidden_SD.new_empty(len(hidden_SD), dtype=gradients.dtype) for _ in range(4)
    )
    tokens = _Tokens(hidden_SD, local_S, mask_SB, penalties, head.first_word, log_total_S, entropy_S, expected_S, None)
    for rows in _slices(len(hidden_SD), head.tile_tokens):
        changes = None if mask_SB is None else mask_SB[rows], None if penalties is None else penalties.at(rows)
        chunk = hidden_SD[rows], weight_VD, bias_V, local_S[rows], *changes, head
        found = _normalized(*_reference_statistics(*chunk, kept=logits), head)
        logprob_S[rows], entropy_S[rows], log_total_S[rows] = found
        expected_S[rows] = expected_grad(logprob_S[rows], rows)
        for words in _slices(len(weight_VD), head.tile_words):
            tile, block_VD = tokens.at(rows, words, gradients.dtype), weight_VD[words]
            shape = len(tile.hidden_SD), len(block_VD)
            logits_SV = _tile(logits, *shape, start=words.start * shape[0])
            gradients.add(_reference_gradient(tile, logits_SV, head), tile.hidden_SD, block_VD, rows, words)
    return (logprob_S, entropy_S, log_total_S), (expected_S, gradients.finished())


def _backward_again(
    tokens: "_Tokens", weight_VD: torch.Tensor, bias_V: torch.Tensor | None, needed: _Needed, head: _Head
) -> _Gradient:
    """The gradients, from logits that are computed again."""
    gradients = _Gradients(tokens.hidden_SD, weight_VD, bias_V, needed, words_outside=True)
    gradient_tile = _triton_gradient_tile if head.triton else _reference_gradient_tile
    dtype = tokens.hidden_SD.dtype if head.triton else gradients.dtype
    memory = _tile_memory(tokens.hidden_SD, weight_VD, head, dtype)
    for words in _slices(len(weight_VD), head.tile_words):
        block_VD, block_V = weight_VD[words].to(dtype), None if bias_V is None else bias_V[words]
        for rows in _slices(len(tokens.hidden_SD), head.tile_tokens):
            tile = tokens.at(rows, words, dtype)
            grad_SV = gradient_tile(tile, block_VD, block_V, head, memory)
            gradients.add(grad_SV, tile.hidden_SD, block_VD, rows, words)
    return gradients.finished()


def _slices(length: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


@dataclass(frozen=True)
class _Tokens:
    """What the backward knows of each token; ``local_S`` counts from the first word of the block."""

    hidden_SD: torch.Tensor
    local_S: torch.Tensor
    mask_SB: torch.Tensor | None
    penalties: TilePenalties | None
    first_word: int
    """Of the block, among all ranks' words."""
    log_total_S: torch.Tensor
    entropy_S: torch.Tensor
    grad_logprob_S: torch.Tensor
    grad_entropy_S: torch.Tensor | None

    def at(self, rows: slice, words: slice, dtype: torch.dtype) -> "_Tokens":
        return _Tokens(
            self.hidden_SD[rows].to(dtype),
            self.local_S[rows] - words.start,
            None if self.mask_SB is None else self.mask_SB[rows],
            None if self.penalties is None else self.penalties.at(rows),
            self.first_word + words.start,
            self.log_total_S[rows],
            self.entropy_S[rows],
            self.grad_logprob_S[rows],
            None if self.grad_entropy_S is None else self.grad_entropy_S[rows].contiguous(),
        )


class _Sum:
    """The gradient of a parameter, added up block by block of its words in ``dtype``.

    If words are in the outer loop, a block is whole before the next begins, and is rounded then to the parameter's
    dtype; otherwise all of it is kept in ``dtype`` to the end.
    """

    def __init__(self, name: str, parameter: torch.Tensor, dtype: torch.dtype, words_outside: bool):
        self.name, self.parameter, self.dtype = name, parameter, dtype
        self.out = _empty(name, parameter, parameter.shape, parameter.dtype if words_outside else dtype)

    def block(self, words: slice, first: bool) -> torch.Tensor:
        """To add to; zero at first."""
        out = self.out[words]
        if out.dtype == self.dtype:
            return out.zero_() if first else out
        if first:
            self._block = torch.zeros_like(out, dtype=self.dtype)
        return self._block

    def end_block(self, words: slice) -> None:
        if self.out.dtype != self.dtype:
            self.out[words] = self._block

    def finished(self, has_blocks: bool) -> torch.Tensor:
        if not has_blocks:
            return torch.zeros_like(self.parameter)
        if self.out.dtype == self.parameter.dtype:
            return self.out
        return _empty(self.name, self.parameter, self.parameter.shape, self.parameter.dtype).copy_(self.out)


class _Gradients:
    """Gradients of hidden states, weight and bias, added up tile by tile in the accumulating dtype."""

    def __init__(
        self,
        hidden_SD: torch.Tensor,
        weight_VD: torch.Tensor,
        bias_V: torch.Tensor | None,
        needed: _Needed,
        *,
        words_outside: bool,
    ):
        self.dtype = torch.promote_types(hidden_SD.dtype, torch.float32)
        self.hidden_dtype, self.num_tokens = hidden_SD.dtype, len(hidden_SD)
        self.hidden_SD = hidden_SD.new_zeros(hidden_SD.shape, dtype=self.dtype) if needed[0] else None
        self.weight = _Sum(_OF_WEIGHT, weight_VD, self.dtype, words_outside) if needed[1] else None
        has_bias = needed[2] and bias_V is not None
        self.bias = _Sum("gradient of bias", bias_V, self.dtype, words_outside) if has_bias else None

    def add(
        self, grad_SV: torch.Tensor, hidden_SD: torch.Tensor, block_VD: torch.Tensor, rows: slice, words: slice
    ) -> None:
        first, last = rows.start == 0, rows.stop == self.num_tokens
        if self.hidden_SD is not None:
            _add_product(self.hidden_SD[rows], grad_SV, block_VD)
        if self.weight is not None:
            if first and grad_SV.dtype == self.weight.out.dtype and (last or self.weight.out.dtype == self.dtype):
                torch.mm(grad_SV.T, hidden_SD, out=self.weight.out[words])
            else:
                _add_product(self.weight.block(words, first), grad_SV.T, hidden_SD)
                if last:
                    self.weight.end_block(words)
        if self.bias is not None:
            self.bias.block(words, first).add_(grad_SV.sum(0, dtype=self.dtype))
            if last:
                self.bias.end_block(words)

    def finished(self) -> _Gradient:
        hidden_SD = None if self.hidden_SD is None else self.hidden_SD.to(self.hidden_dtype)
        weight_VD, bias_V = (sum and sum.finished(self.num_tokens > 0) for sum in (self.weight, self.bias))
        return hidden_SD, weight_VD, bias_V


def _can_be_kept(hidden_SD: torch.Tensor, weight_VD: torch.Tensor) -> bool:
    is_bf16 = hidden_SD.dtype == weight_VD.dtype == torch.bfloat16 and hidden_SD.device.type == "cpu"
    is_fast = has_bf16_units() and not multiplies_wide()
    return is_bf16 and is_fast and len(hidden_SD) * len(weight_VD) <= _CPU_KEPT_SIZE


class _KeptGradients(_Gradients):
    """Of bf16 on a CPU that multiplies it. What would be rounded for each product is rounded once and kept, of all
    logits, and multiplied at once: products that give bf16 take half the time, and nothing is added up in memory."""

    def __init__(self, hidden_SD: torch.Tensor, weight_VD: torch.Tensor, bias_V: torch.Tensor | None, needed: _Needed):
        super().__init__(hidden_SD, weight_VD, bias_V, (False, False, needed[2]), words_outside=False)
        self.inputs, self.needed = (hidden_SD, weight_VD), needed
        shape = len(hidden_SD), len(weight_VD)
        self.grad_SV = _empty("gradient of logits", hidden_SD, shape, hidden_SD.dtype)

    def add(
        self, grad_SV: torch.Tensor, hidden_SD: torch.Tensor, block_VD: torch.Tensor, rows: slice, words: slice
    ) -> None:
        self.grad_SV[rows, words] = grad_SV
        super().add(grad_SV, hidden_SD, block_VD, rows, words)

    def finished(self) -> _Gradient:
        hidden_SD, weight_VD = self.inputs
        of_hidden_SD = torch.mm(self.grad_SV, weight_VD) if self.needed[0] else None
        of_weight_VD = None
        if self.needed[1]:
            of_weight_VD = _empty(_OF_WEIGHT, weight_VD, weight_VD.shape, weight_VD.dtype)
            torch.mm(self.grad_SV.T, hidden_SD, out=of_weight_VD)
        return of_hidden_SD, of_weight_VD, super().finished()[2]


def _add_product(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """``out += left @ right``, accumulated in out's dtype."""
    if left.dtype == out.dtype:
        out.addmm_(left, right)
    elif left.is_cuda:
        out += torch.mm(left, right, out_dtype=out.dtype)
    else:  # no such product on a CPU
        out.addmm_(left.to(out.dtype), right.to(out.dtype))


# The reference


def _reference_logits(
    hidden_SD: torch.Tensor, block_VD: torch.Tensor, block_V: torch.Tensor | None, head: _Head, out_SV: torch.Tensor
) -> torch.Tensor:
    torch.mm(hidden_SD, block_VD.T, out=out_SV)
    if block_V is not None:
        out_SV += block_V
    if head.soft_cap is not None:
        return out_SV.div_(head.soft_cap).tanh_().mul_(head.soft_cap / head.temperature)
    return out_SV if head.temperature == 1 else out_SV.div_(head.temperature)


def _reference_statistics(
    hidden_SD: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    local_S: torch.Tensor,
    mask_SB: torch.Tensor | None,
    penalties: TilePenalties | None,
    head: _Head,
    kept: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logit; and sums over words: exp(logit - largest), the same times the logit, the target's logit.

    ``kept``: memory for all logits of these tokens, no more than a tile has; they are left there, tile by tile.
    """
    dtype = torch.promote_types(hidden_SD.dtype, torch.float32)
    max_S = hidden_SD.new_full((len(hidden_SD),), -torch.inf, dtype=dtype)
    sums_3S = hidden_SD.new_zeros((3, len(hidden_SD)), dtype=dtype)
    logits = _tile_memory(hidden_SD, weight_VD, head, dtype) if kept is None else kept
    exps = _tile_memory(hidden_SD, weight_VD, head, dtype)
    for words in _slices(len(weight_VD), head.tile_words):
        block_VD, block_V = weight_VD[words].to(dtype), None if bias_V is None else bias_V[words]
        for rows in _slices(len(hidden_SD), head.tile_tokens):
            shape = rows.stop - rows.start, len(block_VD)
            tile_SV = _tile(logits, *shape, start=0 if kept is None else words.start * shape[0])
            logits_SV = _reference_logits(hidden_SD[rows].to(dtype), block_VD, block_V, head, tile_SV)
            if penalties is not None:
                _penalize(logits_SV, penalties.at(rows), head.first_word + words.start, head.temperature)
            if mask_SB is not None:
                _leave_out(logits_SV, mask_SB[rows], head.first_word + words.start)
            new_max_S = torch.maximum(max_S[rows], logits_SV.amax(-1))
            sums_3S[:2, rows] *= (max_S[rows] - new_max_S).exp()
            max_S[rows] = new_max_S
            here_S, index_S = _in_block(local_S[rows] - words.start, len(block_VD))
            sums_3S[2, rows] += torch.where(here_S, logits_SV.gather(1, index_S[:, None])[:, 0], 0)
            exp_SV = _tile(exps, *shape)
            torch.sub(logits_SV, new_max_S[:, None], out=exp_SV).exp_()
            sums_3S[0, rows] += exp_SV.sum(-1)
            sums_3S[1, rows] += exp_SV.mul_(logits_SV).sum(-1)
    return max_S, sums_3S


def _penalize(logits_SV: torch.Tensor, penalties: TilePenalties, first_word: int, temperature: float) -> None:
    """Penalize a tile's logits over ``temperature``, of words from ``first_word`` on, in place."""
    for rows in penalties.parts(len(logits_SV), first_word, logits_SV.shape[1]):
        penalties.at(rows).apply(logits_SV[rows], first_word, temperature)


def _leave_out(logits_SV: torch.Tensor, mask_SB: torch.Tensor, first_word: int) -> None:
    """Cut the logits of words from ``first_word`` on down to those that are kept, in place."""
    words_V = torch.arange(first_word, first_word + logits_SV.shape[1], device=logits_SV.device)
    bits_SV = mask_SB.index_select(1, words_V >> 3).bitwise_right_shift_((words_V & 7).to(torch.uint8))
    logits_SV.masked_fill_(bits_SV.bitwise_and_(1) == 0, _LEFT_OUT)


def _tile_memory(hidden_SD: torch.Tensor, weight_VD: torch.Tensor, head: _Head, dtype: torch.dtype) -> torch.Tensor:
    """Room for the largest tile."""
    return hidden_SD.new_empty(head.tile_tokens * min(head.tile_words, len(weight_VD)), dtype=dtype)


def _tile(memory: torch.Tensor, num_tokens: int, num_words: int, start: int = 0) -> torch.Tensor:
    return memory[start : start + num_tokens * num_words].view(num_tokens, num_words)


def _in_block(local_S: torch.Tensor, num_words: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether a token's target is in the block, and where (0 if it is not)."""
    here_S = (local_S >= 0) & (local_S < num_words)
    return here_S, torch.where(here_S, local_S, 0)


def _reference_gradient_tile(
    tokens: _Tokens, block_VD: torch.Tensor, block_V: torch.Tensor | None, head: _Head, memory: torch.Tensor
) -> torch.Tensor:
    tile_SV = _tile(memory, len(tokens.hidden_SD), len(block_VD))
    logits_SV = _reference_logits(tokens.hidden_SD, block_VD, block_V, head, tile_SV)
    if tokens.penalties is not None:
        _penalize(logits_SV, tokens.penalties, tokens.first_word, head.temperature)
    if tokens.mask_SB is not None:
        _leave_out(logits_SV, tokens.mask_SB, tokens.first_word)
    return _reference_gradient(tokens, logits_SV, head)


def _reference_gradient(tokens: _Tokens, grad_SV: torch.Tensor, head: _Head) -> torch.Tensor:
    """Logits become the gradient of their products, in place."""
    if (penalties := tokens.penalties) is None or not penalties.scales_gradients:
        return _part_gradient(tokens, grad_SV, head)
    for rows in penalties.parts(len(grad_SV), tokens.first_word, grad_SV.shape[1]):
        part_SV = grad_SV[rows]
        places_E, derivative_E = penalties.at(rows).derivatives(part_SV, tokens.first_word, head.temperature)
        _part_gradient(tokens.at(rows, slice(0, None), tokens.hidden_SD.dtype), part_SV, head)
        part_SV.view(-1)[places_E] *= derivative_E
    return grad_SV


def _part_gradient(tokens: _Tokens, grad_SV: torch.Tensor, head: _Head) -> torch.Tensor:
    """Logits become the gradient of what they were before penalties, as if these were constants, in place.

    That of a logit is g [target] - p (g + e (log p + entropy)), g and e being those of log-probability and entropy.
    """
    slope_SV = None
    if head.soft_cap is not None:
        capped_SV = grad_SV.clamp(min=-head.soft_cap / head.temperature)  # that of a word left out is below the cap
        slope_SV = 1 - capped_SV.mul_(head.temperature / head.soft_cap).square_()
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


def _triton_statistics(
    hidden_SD: torch.Tensor,
    weight_VD: torch.Tensor,
    bias_V: torch.Tensor | None,
    local_S: torch.Tensor,
    mask_SB: torch.Tensor | None,
    penalties: TilePenalties | None,
    head: _Head,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference's; programs share a token's words out among ``splits`` and their parts are joined here."""
    num_tokens, num_words = len(hidden_SD), len(weight_VD)
    if num_tokens == 0 or num_words == 0:
        return _reference_statistics(hidden_SD, weight_VD, bias_V, local_S, mask_SB, penalties, head)
    hidden_SD, weight_VD = _rows_contiguous(hidden_SD), _rows_contiguous(weight_VD)
    splits = max(1, min(triton.cdiv(8 * 128 * 128, num_tokens), triton.cdiv(num_words, 2048), 256))
    words_per_split = triton.cdiv(triton.cdiv(num_words, splits), 256) * 256
    splits = triton.cdiv(num_words, words_per_split)
    parts_4NS = torch.empty((4, splits, num_tokens), dtype=torch.float32, device=hidden_SD.device)
    _statistics_kernel[lambda meta: (triton.cdiv(num_tokens, meta["BLOCK_S"]) * splits,)](
        *(hidden_SD, weight_VD, bias_V, local_S, mask_SB, parts_4NS),
        *(num_tokens, num_words, hidden_SD.shape[1], hidden_SD.stride(0), weight_VD.stride(0)),
        *(0 if mask_SB is None else mask_SB.stride(0), head.first_word),
        *(words_per_split, splits, 1 / head.temperature, head.soft_cap or 0.0),
        HAS_BIAS=bias_V is not None,
        HAS_CAP=head.soft_cap is not None,
        HAS_MASK=mask_SB is not None,
        **_blocks("statistics", hidden_SD),
    )
    max_NS, total_NS, expected_NS, target_logit_NS = parts_4NS
    max_S = max_NS.amax(0)
    scale_NS = (max_NS - max_S).exp()
    return max_S, torch.stack([(scale_NS * total_NS).sum(0), (scale_NS * expected_NS).sum(0), target_logit_NS.sum(0)])


def _triton_gradient_tile(
    tokens: _Tokens, block_VD: torch.Tensor, block_V: torch.Tensor | None, head: _Head, memory: torch.Tensor
) -> torch.Tensor:
    hidden_SD, block_VD = _rows_contiguous(tokens.hidden_SD), _rows_contiguous(block_VD)
    shape = len(hidden_SD), len(block_VD)
    grad_SV = _tile(memory, *shape)
    has_entropy = tokens.grad_entropy_S is not None
    _gradient_kernel[lambda meta: (triton.cdiv(shape[0], meta["BLOCK_S"]) * triton.cdiv(shape[1], meta["BLOCK_V"]),)](
        *(hidden_SD, block_VD, block_V, tokens.local_S, tokens.log_total_S, tokens.entropy_S, tokens.grad_logprob_S),
        *(tokens.grad_entropy_S if has_entropy else tokens.grad_logprob_S, tokens.mask_SB, grad_SV),
        *(*shape, hidden_SD.shape[1], hidden_SD.stride(0), block_VD.stride(0)),
        *(0 if tokens.mask_SB is None else tokens.mask_SB.stride(0), tokens.first_word),
        *(1 / head.temperature, head.soft_cap or 0.0),
        HAS_BIAS=block_V is not None,
        HAS_CAP=head.soft_cap is not None,
        HAS_ENTROPY=has_entropy,
        HAS_MASK=tokens.mask_SB is not None,
        **_blocks("gradient", hidden_SD),
    )
    return grad_SV


_LARGE = {
    "statistics": {"BLOCK_S": 128, "BLOCK_V": 128, "BLOCK_D": 64, "num_warps": 8, "num_stages": 4},
    "gradient": {"BLOCK_S": 128, "BLOCK_V": 256, "BLOCK_D": 64, "num_warps": 8, "num_stages": 3},
}
"""Tiles for 16-bit inputs. Of eleven on an H200, within 7 % of the fastest at all sizes; one that is faster for the
statistics takes ptxas 20 seconds (LOG.md)."""
_SMALL = {"BLOCK_S": 128, "BLOCK_V": 128, "BLOCK_D": 64, "num_warps": 4, "num_stages": 3}
_LEAST = {"BLOCK_S": 64, "BLOCK_V": 64, "BLOCK_D": 32, "num_warps": 4, "num_stages": 3}
"""For fp32, and for GPUs with less shared memory."""
_LARGE_BYTES, _SMALL_BYTES = 144 << 10, 96 << 10
"""Shared memory that a block needs: data-center GPUs since A100 have the former, others since Ampere the latter."""
_FOR_INTERPRETER = {"BLOCK_S": 16, "BLOCK_V": 64, "BLOCK_D": 64}


def _blocks(kernel: Literal["statistics", "gradient"], hidden_SD: torch.Tensor) -> dict[str, Any]:
    """The kernel's tile, by the GPU and the inputs' dtype. It is chosen without the clock, so that sums are added up in
    one order, and nothing is compiled that is not used."""
    if _INTERPRETED:
        return _FOR_INTERPRETER
    shared_bytes = _shared_bytes(hidden_SD.device)
    if hidden_SD.element_size() != 2 or shared_bytes < _SMALL_BYTES:
        return _LEAST
    return _LARGE[kernel] if shared_bytes >= _LARGE_BYTES else _SMALL


@cache
def _shared_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor


def _rows_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


if TYPE_CHECKING or triton is not None:
    # the interpreter multiplies bfloat16 as if its bits were integers; in fp32 the products are the same
    _WIDEN, _MASKED = tl.constexpr(_INTERPRETED), tl.constexpr(_LEFT_OUT)

    @triton.jit
    def _logits_tile(  # noqa: PLR0913  (a kernel's arguments are pointers and numbers)
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

    @triton.jit
    def _only_kept(logits_SV, mask, mask_stride, first_word, safe_S, safe_V):
        """The logits, those of words that are left out replaced. ``mask``: a bit for each word of all ranks."""
        words_V = first_word + safe_V
        bytes_SV = tl.load(mask + safe_S[:, None] * mask_stride + (words_V >> 3)[None, :])
        bits_SV = (bytes_SV.to(tl.int32) >> (words_V & 7).to(tl.int32)[None, :]) & 1
        return tl.where(bits_SV != 0, logits_SV, _MASKED)

    _even_D = {"EVEN_D": lambda arguments: arguments["D"] % arguments["BLOCK_D"] == 0}

    @triton.heuristics(_even_D)
    @triton.jit
    def _statistics_kernel(  # noqa: PLR0913  (a kernel's arguments are pointers and numbers)
        hidden,
        weight,
        bias,
        target,
        mask,
        parts,
        S,
        V,
        D,
        hidden_stride,
        weight_stride,
        mask_stride,
        first_word,
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
        HAS_MASK: tl.constexpr,
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
            if HAS_MASK:
                logits_SV = _only_kept(logits_SV, mask, mask_stride, first_word, safe_S, safe_V)
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

    @triton.heuristics(_even_D)
    @triton.jit
    def _gradient_kernel(  # noqa: PLR0913  (a kernel's arguments are pointers and numbers)
        hidden,
        weight,
        bias,
        target,
        log_total,
        entropy,
        grad_logprob,
        grad_entropy,
        mask,
        grad,
        S,
        V,
        D,
        hidden_stride,
        weight_stride,
        mask_stride,
        first_word,
        inverse_temperature,
        soft_cap,
        BLOCK_S: tl.constexpr,
        BLOCK_V: tl.constexpr,
        BLOCK_D: tl.constexpr,
        EVEN_D: tl.constexpr,
        HAS_BIAS: tl.constexpr,
        HAS_CAP: tl.constexpr,
        HAS_ENTROPY: tl.constexpr,
        HAS_MASK: tl.constexpr,
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
        if HAS_MASK:
            logits_SV = _only_kept(logits_SV, mask, mask_stride, first_word, safe_S, safe_V)
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

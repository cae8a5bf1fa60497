"""Discounted sums from the end of each segment to its start: returns, and generalized advantage estimates.

Both are y[t] = x[t] + d y[t+1] with y = 0 past a segment's last token. Such a step is an affine map, and maps compose
associatively, so that blocks of tokens are scanned in parallel. A truncated episode's value past its end is added to
its last reward, times the discount, by the caller. Left out: gradients (both are targets).

Dimensions: T tokens of packed rows, whose segments are runs of tokens.
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


def last_tokens(offsets_N: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Mask of segments' last tokens, bool [T], for N segments with offsets [N + 1]; empty ones are skipped."""
    last_T = torch.zeros(num_tokens, dtype=torch.bool, device=offsets_N.device)
    last_T[offsets_N[1:][offsets_N.diff() > 0] - 1] = True
    return last_T


def discounted_returns(
    rewards_T: torch.Tensor,
    last_T: torch.Tensor,
    discount: float,
    *,
    implementation: Literal["reference", "triton"] = "reference",
) -> torch.Tensor:
    """Discounted returns of each token within its segment.

    Numerics: fp32, in the order of a tree; the reference in float64, rounded once. |error| <= 2**-20 times the sum of
    the magnitudes. Tokens behind the last end belong to a segment that ends with the row.
    """
    if implementation == "reference":
        return _reference_scan(rewards_T.double(), last_T, discount).to(rewards_T.dtype)
    return _triton_scan(rewards_T, None, last_T, discount, 1.0)[0]


def advantages_and_returns(
    rewards_T: torch.Tensor,
    values_T: torch.Tensor,
    last_T: torch.Tensor,
    discount: float,
    trace: float,
    *,
    implementation: Literal["reference", "triton"] = "reference",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalized advantage estimates (arXiv 1506.02438, equation 16), and returns: estimates plus values.

    ``trace`` is the paper's lambda; numerics as ``discounted_returns``.
    """
    if implementation == "reference":
        next_T = torch.zeros_like(values_T, dtype=torch.float64)
        next_T[:-1] = torch.where(last_T[:-1], 0, values_T[1:].double())
        surprise_T = rewards_T.double() + discount * next_T - values_T.double()
        advantages_T = _reference_scan(surprise_T, last_T, discount * trace)
        return advantages_T.to(values_T.dtype), (advantages_T + values_T.double()).to(values_T.dtype)
    advantages_T, returns_T = _triton_scan(rewards_T, values_T, last_T, discount, trace)
    assert returns_T is not None
    return advantages_T, returns_T


def _reference_scan(x_T: torch.Tensor, last_T: torch.Tensor, factor: float) -> torch.Tensor:
    """By doubling: after k rounds each token holds the sum of its 2**k next ones, itself included."""
    sums_T, reach_T = x_T.clone(), torch.where(last_T, 0.0, torch.full_like(x_T, factor))
    reach_T[-1:] = 0
    distance = 1
    while distance < len(x_T) and reach_T.any():
        # a segment must not hear of what is not finite in the one behind it
        heard_T = torch.where(reach_T[:-distance] == 0, 0, reach_T[:-distance] * sums_T[distance:])
        sums_T[:-distance] += heard_T
        reach_T[:-distance] *= reach_T[distance:].clone()
        reach_T[-distance:] = 0
        distance *= 2
    return sums_T


def _triton_scan(
    rewards_T: torch.Tensor, values_T: torch.Tensor | None, last_T: torch.Tensor, discount: float, trace: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """One read and one write of each tensor."""
    num_tokens = len(rewards_T)
    rewards_T, last_T = rewards_T.contiguous(), last_T.contiguous()
    values_T = None if values_T is None else values_T.contiguous()
    sums_T = torch.empty_like(rewards_T)
    returns_T = None if values_T is None else torch.empty_like(rewards_T)
    num_blocks = triton.cdiv(num_tokens, _BLOCK)
    if num_blocks:
        # a word for each block, and the count of blocks that have begun
        carries = torch.zeros(num_blocks + 1, dtype=torch.int64, device=rewards_T.device)
        settings: dict[str, Any] = dict(BLOCK=_BLOCK, num_warps=8)
        _scan_kernel[(num_blocks,)](
            *(rewards_T, values_T, last_T.view(torch.uint8), sums_T, returns_T, carries, num_tokens, num_blocks),
            *(float(discount), float(discount * trace)),
            **settings,
        )
    return sums_T, returns_T


_BLOCK = 16 if os.environ.get("TRITON_INTERPRET") == "1" else 2048

if TYPE_CHECKING or triton is not None:

    @triton.jit
    def _compose(left_factor, left_sum, right_factor, right_sum):
        """Of affine maps y -> sum + factor y: the right one after the left one."""
        heard = tl.where(right_factor == 0, 0.0, right_factor * left_sum)  # not 0 times what is not finite
        return left_factor * right_factor, right_sum + heard

    @triton.jit
    def _scan_kernel(
        rewards,
        values,
        last,
        sums,
        returns,
        carries,
        T,
        num_blocks,
        discount,
        factor,
        BLOCK: tl.constexpr,
    ):
        """A block of tokens, which needs one number of the block behind it: the sum at that one's first token.

        Blocks are numbered from the row's end in the order in which programs begin, so that a program waits only for
        programs that run. A number is published as one word, its bits and a mark, so that no fence is needed. A block
        in which a segment ends publishes before it waits: the chain of waits is no longer than the longest segment.
        """
        block = num_blocks - 1 - tl.atomic_add(carries + num_blocks, 1).to(tl.int32)
        tokens_T = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside_T = tokens_T < T
        ends_T = (tl.load(last + tokens_T, mask=inside_T, other=1) != 0) | (tokens_T >= T - 1)
        x_T = tl.load(rewards + tokens_T, mask=inside_T, other=0.0).to(tl.float32)
        value_T = x_T * 0.0
        if values is not None:
            value_T = tl.load(values + tokens_T, mask=inside_T, other=0.0).to(tl.float32)
            next_T = tl.load(values + tokens_T + 1, mask=inside_T & (ends_T == 0), other=0.0).to(tl.float32)
            x_T += discount * next_T - value_T
        factors_T = tl.where(ends_T, 0.0, factor)
        reach_T, sums_T = tl.associative_scan((factors_T, x_T), 0, _compose, reverse=True)
        is_first_T = tl.arange(0, BLOCK) == 0
        reach = tl.sum(tl.where(is_first_T, reach_T, 0.0), 0)
        first = tl.sum(tl.where(is_first_T, sums_T, 0.0), 0)
        # triton's annotation says that a sum may be a tuple, which it is of tuples
        is_closed = tl.sum(ends_T.to(tl.int32), 0) > 0  # pyright: ignore[reportOperatorIssue]
        if is_closed:
            _publish(carries + block, first)
        carry = 0.0
        if tl.sum(tl.where(tl.arange(0, BLOCK) == BLOCK - 1, factors_T, 0.0), 0) != 0:
            word = tl.atomic_add(carries + block + 1, 0)
            while word == 0:
                word = tl.atomic_add(carries + block + 1, 0)
            carry = (word & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True).to(tl.float32, bitcast=True)
        if is_closed == 0:
            _publish(carries + block, first + reach * carry)
        sums_T += tl.where(reach_T == 0, 0.0, reach_T * carry)
        tl.store(sums + tokens_T, sums_T, mask=inside_T)
        if values is not None:
            tl.store(returns + tokens_T, sums_T + value_T, mask=inside_T)

    @triton.jit
    def _publish(word, number):
        bits = number.to(tl.uint32, bitcast=True).to(tl.int64)
        tl.atomic_xchg(word, bits | (1 << 32))

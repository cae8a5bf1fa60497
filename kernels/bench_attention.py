"""Attention of samples that share a prompt, both ways: one call over gathered keys, and a dense mask over blocks.

Both are torch's own kernels; what is measured is which of them a row can be given to, and at what cost. The floor is
the products that the mask leaves, at the rate of a large product: two in the forward and five in the backward.

Dimensions: T tokens of the row, N heads of queries, G heads of keys, H head size; B samples, Q tokens of each, K keys.
"""

import functools
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F

# siblings, whose folder Python has put first on the path
from bench_measure import Bench, hold, relative
from packed_attention import packed_attention, plan_packed

Prompt = tuple[int, int, int]
"""Samples, tokens of each, tokens of the prompt before them."""


def bench_attention(bench: Bench) -> None:
    heads, groups, size = bench.sizes.heads
    flash = "reference" if bench.device == "cpu" else "flash"
    for prompt in bench.sizes.shared_prompts:
        leaves = _problem(bench, prompt)
        upstream = torch.randn_like(leaves[0])
        floor = 14 * heads * size * _pairs(prompt) / bench.operations_per_s
        shape = f"{prompt[0]} x {prompt[1]} behind {prompt[2]}, heads {heads} / {groups} of {size}"
        row = functools.partial(
            bench.add, "packed_attention", shape, floor=floor, gradients=sum(leaf.nbytes for leaf in leaves)
        )
        for by, way in ((flash, _packed(prompt, flash, bench.device)), ("dense mask", _masked(prompt, bench.device))):
            step = functools.partial(_forward_backward, leaves, upstream, way)
            found = row(by=by, run=step)
            if "milliseconds" in found:
                found |= _errors(bench, by, flash) | {"equal_bits_again": _same(step)}
            if by == "flash" and "milliseconds" in found:
                hold(found, "output_relative_error", 0.01, at_most=True)
                hold(found, "gradient_relative_error", 0.01, at_most=True)


def _problem(bench: Bench, prompt: Prompt, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    torch.manual_seed(0)
    (samples, each, before), (heads, groups, size) = prompt, bench.sizes.heads
    tokens = before + samples * each
    return [
        torch.randn(tokens, count, size, device=bench.device, dtype=dtype, requires_grad=True)
        for count in (heads, groups, groups)
    ]


def _pairs(prompt: Prompt) -> int:
    """A query and a key that it sees."""
    samples, each, before = prompt
    return before * (before + 1) // 2 + samples * (each * before + each * (each + 1) // 2)


def _packed(prompt: Prompt, implementation: Literal["flash", "reference"], device: str) -> Callable:
    samples, each, before = prompt
    own = [(before + each * sample, each) for sample in range(samples)]
    plan = plan_packed([[(0, before)], *([(0, before), segment] for segment in own)], before + samples * each, device)
    return lambda q_TNH, k_TGH, v_TGH: packed_attention(q_TNH, k_TGH, v_TGH, plan, implementation=implementation)


def _masked(prompt: Prompt, device: str) -> Callable:
    """The prompt by itself, and all samples as one block."""
    samples, each, before = prompt
    query_BQ = before + torch.arange(samples * each, device=device).view(samples, each)
    key_BK = torch.cat([torch.arange(before, device=device).expand(samples, -1), query_BQ], 1)
    seen_QK = torch.ones(each, before + each, dtype=torch.bool, device=device).tril(before)

    def attend(q_TNH: torch.Tensor, k_TGH: torch.Tensor, v_TGH: torch.Tensor) -> torch.Tensor:
        q_1NTH, k_1GTH, v_1GTH = (x[None, :before].transpose(1, 2) for x in (q_TNH, k_TGH, v_TGH))
        out_1NTH = F.scaled_dot_product_attention(q_1NTH, k_1GTH, v_1GTH, is_causal=True, enable_gqa=True)
        q_BNQH, k_BGKH, v_BGKH = (
            x[index].transpose(1, 2) for x, index in ((q_TNH, query_BQ), (k_TGH, key_BK), (v_TGH, key_BK))
        )
        mask_BQK = seen_QK[None, None].expand(samples, -1, -1, -1)
        out_BNQH = F.scaled_dot_product_attention(q_BNQH, k_BGKH, v_BGKH, attn_mask=mask_BQK, enable_gqa=True)
        return torch.cat([out_1NTH.transpose(1, 2).flatten(0, 1), out_BNQH.transpose(1, 2).flatten(0, 1)])

    return attend


def _forward_backward(leaves: list[torch.Tensor], upstream: torch.Tensor, way: Callable) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(way(*leaves), leaves, upstream)


def _same(step: Callable) -> bool:
    """Whether gradients come out to the bit twice."""
    return all(map(torch.equal, step(), step()))


def _errors(bench: Bench, by: str, flash: Literal["flash", "reference"]) -> dict[str, float]:
    """On a smaller row, whose scores in float64 there is memory for."""
    prompt = bench.sizes.checked_prompt
    way = _packed(prompt, flash, bench.device) if by == flash else _masked(prompt, bench.device)
    leaves = _problem(bench, prompt)
    exact_leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
    found, exact = way(*leaves), _packed(prompt, "reference", bench.device)(*exact_leaves)
    upstream = torch.randn_like(found)
    gradients = torch.autograd.grad(found, leaves, upstream)
    exact_gradients = torch.autograd.grad(exact, exact_leaves, upstream.double())
    return {
        "output_relative_error": relative(found.detach(), exact.detach()),
        "gradient_relative_error": max(map(relative, gradients, exact_gradients)),
    }

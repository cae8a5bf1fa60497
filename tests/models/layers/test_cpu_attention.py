"""Attention by matrix products is that of torch, in its results and in its gradients."""

import pytest
import torch
import torch.nn.functional as F

from titan_rl.kernels import linear_logprob
from titan_rl.models.layers import cpu_attention

SEGMENTS, HEADS, SIZE = 3, 6, 16


@pytest.fixture(autouse=True, params=["bf16 units", "fp32 units"])
def any_cpu(monkeypatch, request):
    """Products are right on every CPU; they are only not faster on all."""
    monkeypatch.setattr(linear_logprob, "has_bf16_units", lambda: True)
    monkeypatch.setattr(linear_logprob, "multiplies_wide", lambda: request.param == "fp32 units")


def inputs(groups: int, prefix: int, queries: int = 20) -> tuple[torch.Tensor, ...]:
    """As PackedAttention hands them over: views of [D, tokens, heads, H]."""
    generator = torch.Generator().manual_seed(7)
    shapes = ((HEADS, queries), (groups, prefix + queries), (groups, prefix + queries), (HEADS, queries))
    made = (torch.randn(SEGMENTS, tokens, heads, SIZE, generator=generator) for heads, tokens in shapes)
    return tuple(x.bfloat16().transpose(1, 2) for x in made)


def results(attend, q, k, v, grad, **settings):
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out = attend(q, k, v, enable_gqa=True, **settings)
    return out.detach(), *torch.autograd.grad(out, (q, k, v), grad)


@pytest.mark.parametrize("max_scores", [cpu_attention._MAX_SCORES, 6000])
@pytest.mark.parametrize("groups", [1, 2, HEADS])
@pytest.mark.parametrize("form", ["causal", "mask", "mask of each segment", "all", "scale"])
def test_products_are_attention(monkeypatch, form, groups, max_scores):
    monkeypatch.setattr(cpu_attention, "_MAX_SCORES", max_scores)
    prefix = 0 if form == "causal" else 12
    tensors = inputs(groups, prefix)
    prefixes = torch.tensor([12, 5, 0] if form == "mask of each segment" else [12])
    mask = torch.arange(32) <= torch.arange(20)[:, None] + prefixes[:, None, None]
    settings = {"causal": {"is_causal": True}, "all": {}, "scale": {"scale": 0.7}}.get(
        form, {"attn_mask": mask[:, None]}
    )
    found = results(cpu_attention.scaled_dot_product_attention, *tensors, **settings)
    assert cpu_attention._is_for_products(*tensors[:2], True)
    wanted = results(F.scaled_dot_product_attention, *(x.double() for x in tensors), **settings)
    torch_s = results(F.scaled_dot_product_attention, *tensors, **settings)
    for ours, exact, other in zip(found, wanted, torch_s, strict=True):
        error, its = ((x.double() - exact).norm() / exact.norm() for x in (ours, other))
        assert error <= max(1.2 * its, 2**-8)


def test_scores_are_exact_products():
    """Two keys whose scores differ by less than bf16 can say at their size are told apart."""
    q = torch.tensor([[[[256.0, 1.0]]]], dtype=torch.bfloat16)
    k = torch.tensor([[[[1.0, 0.0], [1.0, 0.5]]]], dtype=torch.bfloat16)
    v = torch.tensor([[[[1.0], [0.0]]]], dtype=torch.bfloat16)
    out = cpu_attention.scaled_dot_product_attention(q, k, v, scale=1.0)
    assert float(out) == pytest.approx(1 / (1 + torch.e**0.5), rel=2**-8)


@pytest.mark.parametrize("change", ["float32", "a long segment", "a CPU without bf16"])
def test_what_products_are_not_for_goes_to_torch(monkeypatch, change):
    q, k, *_ = inputs(2, 12)
    if change == "float32":
        q, k = q.float(), k.float()
    elif change == "a long segment":
        monkeypatch.setattr(cpu_attention, "_MAX_SCORES", 3 * 20 * 32 - 1)
    else:
        monkeypatch.setattr(linear_logprob, "has_bf16_units", lambda: False)
        monkeypatch.setattr(linear_logprob, "multiplies_wide", lambda: False)
    assert not cpu_attention._is_for_products(q, k, True)

"""Attention by gathered keys is that under a dense mask, forward and backward, whatever is shared.

The kernel itself needs a GPU. Here a loop over segments takes its place among torch's operators and is told what the
kernel is told, so everything around it is what a GPU runs.
"""

import pytest
import torch
from flash_on_cpu import flash_on_cpu

from titan_rl.kernels import packed_attention as module
from titan_rl.kernels.packed_attention import fits_flash, has_flash, packed_attention, plan_packed

CPU = torch.device("cpu")
ROWS = {
    "one token": [[(0, 1)]],
    "one segment": [[(0, 9)]],
    "segments that share nothing": [[(0, 5)], [(5, 1)], [(6, 130)]],
    "a group": [[(0, 6)], [(0, 6), (6, 4)], [(0, 6), (10, 1)], [(0, 6), (11, 7)]],
    "two groups and a row's padding": [[(0, 3)], [(0, 3), (3, 4)], [(7, 5)], [(7, 5), (12, 2)], [(14, 6)]],
    "a tree of several levels": [
        [(0, 4)],
        [(0, 4), (4, 3)],
        [(0, 4), (4, 3), (7, 5)],
        [(0, 4), (4, 3), (7, 5), (12, 2)],
        [(0, 4), (4, 3), (7, 5), (14, 1)],
        [(0, 4), (15, 6)],
    ],
    "out of order": [[(5, 2), (0, 5)], [(5, 2)]],
}
HEADS = {"one each": (2, 2), "shared": (6, 2), "one for all": (4, 1)}
every_row = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
every_heads = pytest.mark.parametrize("heads", HEADS.values(), ids=HEADS)
every_window = pytest.mark.parametrize("window", [None, 1, 3, 500])


def dense_mask(row, window: int | None) -> torch.Tensor:
    """[T, T], token by token."""
    num_tokens = sum(ranges[-1][1] for ranges in row)
    seen_TT = torch.zeros(num_tokens, num_tokens, dtype=torch.bool)
    for ranges in row:
        tokens = [token for start, length in ranges for token in range(start, start + length)]
        for place in range(len(tokens) - ranges[-1][1], len(tokens)):
            first = 0 if window is None else max(0, place + 1 - window)
            seen_TT[tokens[place], tokens[first : place + 1]] = True
    return seen_TT


def dense(q_TNH, k_TGH, v_TGH, row, window, scale) -> torch.Tensor:
    k_TNH, v_TNH = (x.repeat_interleave(q_TNH.shape[1] // x.shape[1], 1) for x in (k_TGH, v_TGH))
    q_NTH, k_NTH, v_NTH = (x.transpose(0, 1) for x in (q_TNH, k_TNH, v_TNH))
    settings = dict(attn_mask=dense_mask(row, window), scale=scale)
    return torch.nn.functional.scaled_dot_product_attention(q_NTH, k_NTH, v_NTH, **settings).transpose(0, 1)


@pytest.fixture
def kernel():
    with flash_on_cpu():
        yield


def leaves_of(row, heads, dtype=torch.float64) -> list[torch.Tensor]:
    torch.manual_seed(0)
    num_tokens = sum(ranges[-1][1] for ranges in row)
    return [torch.randn(num_tokens, n, 8, dtype=dtype, requires_grad=True) for n in (heads[0], heads[1], heads[1])]


@every_row
@every_heads
@every_window
@pytest.mark.parametrize("implementation", ["reference", "flash"])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_it_is_attention_under_a_dense_mask(kernel, row, heads, window, implementation, scale):
    leaves = leaves_of(row, heads)
    plan = plan_packed(row, len(leaves[0]), CPU)
    out = packed_attention(*leaves, plan, window=window, scale=scale, implementation=implementation)
    expected = dense(*leaves, row, window, scale)
    assert torch.allclose(out, expected, atol=1e-12)
    upstream = torch.randn_like(out)
    for found, wanted in zip(*(torch.autograd.grad(x, leaves, upstream) for x in (out, expected)), strict=True):
        # the copies' gradients are added up in fp32
        assert torch.allclose(found, wanted, atol=1e-5 if implementation == "flash" else 1e-12)


def test_gradients_of_many_copies_are_added_up_without_rounding_between(kernel):
    """64 samples behind one prompt, in bf16: the error is that of one rounding, not of 64."""
    row = [[(0, 3)], *([(0, 3), (3 + 2 * sample, 2)] for sample in range(64))]
    leaves = leaves_of(row, (2, 2), torch.bfloat16)
    plan = plan_packed(row, len(leaves[0]), CPU)
    upstream = torch.rand_like(leaves[0])
    found = torch.autograd.grad(packed_attention(*leaves, plan, implementation="flash"), leaves, upstream)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    wanted = torch.autograd.grad(dense(*wide, row, None, None), wide, upstream.double())
    error = float((found[2][:3].double() - wanted[2][:3]).abs().max() / wanted[2][:3].abs().max())
    assert error < 2**-8
    again = torch.autograd.grad(packed_attention(*leaves, plan, implementation="flash"), leaves, upstream)
    assert all(map(torch.equal, found, again))


def test_nothing_is_gathered_where_nothing_is_shared():
    plan = plan_packed(ROWS["segments that share nothing"], 136, CPU)
    assert plan.key_K is None and plan.query_ends_D1.tolist() == plan.key_ends_D1.tolist() == [0, 5, 6, 136]
    assert plan.max_queries == plan.max_keys == 256


def test_a_plan_says_where_keys_are():
    plan = plan_packed([[(0, 2)], [(0, 2), (2, 1)], [(0, 2), (3, 1)]], 4, CPU)
    assert plan.key_K.tolist() == [0, 1, 0, 1, 2, 0, 1, 3] and plan.key_ends_D1.tolist() == [0, 2, 5, 8]
    assert plan.copy_K.tolist() == [0, 2, 5, 1, 3, 6, 4, 7] and plan.copy_ends_T1.tolist() == [0, 3, 6, 7, 8]
    assert (plan.max_queries, plan.max_keys) == (128, 128)


@pytest.mark.parametrize("row", [[[(0, 3)]], [[(0, 2)], [(3, 1)]], [[(0, 3)], [(2, 2)]]])
def test_a_row_that_is_not_covered_is_no_row(row):
    with pytest.raises(AssertionError, match="do not cover"):
        plan_packed(row, 4, CPU)


@every_row
@every_window
def test_the_kernel_takes_what_it_is_given(row, window):
    """Shapes and arguments, by torch's own description of the kernel on tensors without memory."""
    num_tokens = sum(ranges[-1][1] for ranges in row)
    like = dict(device="meta", dtype=torch.bfloat16, requires_grad=True)
    leaves = [torch.empty(num_tokens, heads, 64, **like) for heads in (6, 2, 2)]
    out = packed_attention(*leaves, plan_packed(row, num_tokens, "meta"), window=window)
    assert out.shape == (num_tokens, 6, 64) and out.device.type == "meta" and out.dtype == torch.bfloat16
    gradients = torch.autograd.grad(out, leaves, torch.empty_like(out))
    assert [each.shape for each in gradients] == [leaf.shape for leaf in leaves]


def test_what_the_kernel_is_told_of_a_window():
    assert module._window(None) == {"is_causal": True, "window_size": [-1, 0]}
    assert module._window(3) == {"is_causal": False, "window_size": [2, 0]}


def test_where_the_kernel_is():
    assert not has_flash(CPU)
    assert fits_flash(torch.bfloat16, 128) and fits_flash(torch.float16, 64) and fits_flash(torch.bfloat16, 256)
    assert not fits_flash(torch.float32, 128) and not fits_flash(torch.bfloat16, 100)
    assert not fits_flash(torch.bfloat16, 264) and not fits_flash(torch.bfloat16, 256, largest=192)


@pytest.mark.gpu
@pytest.mark.skipif(not has_flash("cuda"), reason="flash attention needs a GPU")
@every_row
@every_heads
@every_window
def test_the_kernel_itself(row, heads, window):
    torch.manual_seed(0)
    num_tokens = sum(ranges[-1][1] for ranges in row)
    like = dict(device="cuda", dtype=torch.bfloat16, requires_grad=True)
    leaves = [torch.randn(num_tokens, n, 64, **like) for n in (heads[0], heads[1], heads[1])]
    plan, wide = plan_packed(row, num_tokens, "cuda"), [leaf.detach().double().requires_grad_() for leaf in leaves]
    out = packed_attention(*leaves, plan, window=window)
    expected = packed_attention(*wide, plan, window=window, implementation="reference")
    upstream = torch.randn_like(out)
    gradients = torch.autograd.grad(out, leaves, upstream), torch.autograd.grad(expected, wide, upstream.double())
    for found, wanted in [(out, expected), *zip(*gradients, strict=True)]:
        assert (found.double() - wanted).norm() <= 0.01 * wanted.norm() + 1e-3

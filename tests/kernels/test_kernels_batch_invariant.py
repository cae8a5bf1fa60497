"""Rows of a product and of a log-softmax: right, and the same bits in every batch; check_* run interpreted."""

import pytest
import torch
from kernel_checks import poison, run_interpreted

from titan_rl.kernels.batch_invariant import batch_invariant_log_softmax, batch_invariant_matmul

SHAPES = [(1, 5, 7), (33, 576, 40), (130, 64, 33)]
"""M, K and N: one row; SmolLM2's depth; columns that fill no block."""


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    poison(monkeypatch)


def operands(num_rows, depth, num_columns, dtype):
    torch.manual_seed(num_rows)
    return torch.randn(num_rows, depth).to(dtype), torch.randn(num_columns, depth).to(dtype)


def compare(implementation, shape, dtype) -> None:
    rows_MK, weight_NK = operands(*shape, dtype)
    product_MN = batch_invariant_matmul(rows_MK, weight_NK, implementation=implementation)
    exact_MN = rows_MK.double() @ weight_NK.double().T
    bound_MN = shape[1] * 2**-24 * (rows_MK.double().abs() @ weight_NK.double().abs().T)
    if dtype == torch.bfloat16:  # the interpreter truncates: a whole step
        bound_MN += 2**-7 * exact_MN.abs()
    assert product_MN.dtype == dtype and ((product_MN.double() - exact_MN).abs() <= bound_MN).all()
    logits_MN = 4 * product_MN
    logprob_MN = batch_invariant_log_softmax(logits_MN, 0.7, implementation=implementation)
    bound = 2**-21 * (1 + logits_MN.double().abs().max() / 0.7)
    exact_MN = torch.log_softmax(logits_MN.double() / 0.7, -1)
    assert logprob_MN.dtype == torch.float32 and (logprob_MN.double() - exact_MN).abs().max() <= bound


def same_bits(implementation, num_rows, sizes, dtype) -> None:
    """In smaller batches, in another order, and beside rows that are huge.

    Not in another order for the interpreter: numpy's product looks at a row's place in its tile, as hardware does not.
    """
    rows_MK, weight_NK = operands(num_rows, 96, 70, dtype)

    def both(rows_MK):
        product_MN = batch_invariant_matmul(rows_MK, weight_NK, implementation=implementation)
        return torch.cat(
            [product_MN.float(), batch_invariant_log_softmax(product_MN, implementation=implementation)], 1
        )

    whole = both(rows_MK)
    for size in sizes:
        assert torch.equal(both(rows_MK[:size]), whole[:size]), size
    if implementation == "reference":
        order = torch.randperm(num_rows)
        assert torch.equal(both(rows_MK[order]), whole[order])
    company_MK = rows_MK.clone()
    company_MK[1::2] = 1e30
    assert torch.equal(both(company_MK)[::2], whole[::2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_reference(shape, dtype):
    compare("reference", shape, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def check_triton(shape, dtype):
    compare("triton", shape, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_the_reference_are_the_same_in_every_batch(dtype):
    same_bits("reference", 300, [*range(1, 131), 200, 299], dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def check_rows_are_the_same_in_every_batch(dtype):
    same_bits("triton", 40, [1, 2, 15, 16, 17, 33], dtype)


def test_gradcheck():
    torch.manual_seed(0)
    rows_MK, weight_NK = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 5), (4, 5)))

    def both(rows_MK, weight_NK):
        return batch_invariant_log_softmax(batch_invariant_matmul(rows_MK, weight_NK), 0.7)

    assert torch.autograd.gradcheck(both, (rows_MK, weight_NK))


def test_no_rows():
    rows_MK, weight_NK = operands(0, 5, 4, torch.float32)
    assert batch_invariant_log_softmax(batch_invariant_matmul(rows_MK, weight_NK)).shape == (0, 4)


def test_triton_in_its_interpreter():
    run_interpreted(__file__)

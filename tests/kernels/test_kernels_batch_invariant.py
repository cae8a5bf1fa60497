"""A decoder's operations: right, and the same bits in every batch; check_* run interpreted."""

from itertools import accumulate

import pytest
import torch
from kernel_checks import poison, run_interpreted

from titan_rl.kernels.batch_invariant import (
    PagedSequences,
    batch_invariant_attention,
    batch_invariant_log_softmax,
    batch_invariant_matmul,
    batch_invariant_rms_norm,
    batch_invariant_silu_and_mul,
    with_value,
)

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
    wide_MN = batch_invariant_matmul(rows_MK, weight_NK, implementation=implementation, out_dtype=torch.float32)
    assert wide_MN.dtype == torch.float32
    if implementation == "reference":
        assert torch.equal(wide_MN.to(dtype), product_MN)
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


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("num_columns", [576, 1])
def test_a_long_sum_is_the_same_with_any_number_of_threads(threads, num_columns):
    """A library would share it among them: [64, 1536] times [1536, 576], and rows where there is one column."""
    rows_MK, weight_NK = operands(64, 1536, num_columns, torch.float32)
    order = torch.randperm(64)
    products = []
    for count in (1, 2, 3, 4):
        threads(count)
        products.append(batch_invariant_matmul(rows_MK, weight_NK))
        assert torch.equal(batch_invariant_matmul(rows_MK[order], weight_NK), products[0][order])
    assert all(torch.equal(product_MN, products[0]) for product_MN in products)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_and_swiglu(dtype, threads):
    """Of 67 features, which leave a remainder for every vector."""
    gate_MN, up_MN = (8 * operands(130, 67, 67, dtype)[0] for _ in range(2))
    weight_N = operands(1, 67, 67, dtype)[0][0]

    def both(rows):
        normal_MN = batch_invariant_rms_norm(gate_MN[rows], weight_N, 1e-5)
        return torch.cat([normal_MN, batch_invariant_silu_and_mul(gate_MN[rows], up_MN[rows])], 1)

    whole_MN = both(slice(None))
    normal_MN = torch.nn.functional.rms_norm(gate_MN.double(), (67,), weight_N.double(), 1e-5)
    activated_MN = torch.nn.functional.silu(gate_MN.double()) * up_MN.double()
    step = 2**-21 if dtype == torch.float32 else 2**-8
    torch.testing.assert_close(whole_MN.double(), torch.cat([normal_MN, activated_MN], 1), rtol=step, atol=1e-30)
    for count in (1, 3):
        threads(count)
        for size in (1, 2, 7, 64, 129):
            assert torch.equal(both(slice(size)), whole_MN[:size])
        order = torch.randperm(130)
        assert torch.equal(both(order), whole_MN[order])
    extreme_MN = torch.tensor([[0.0, -0.0, 200.0, -200.0, 1e30, -1e30]])
    assert batch_invariant_silu_and_mul(extreme_MN, torch.ones_like(extreme_MN)).equal(extreme_MN.clamp(min=0.0))


SEQUENCES = [(5, 5), (1, 70), (37, 200), (33, 33), (2, 64)]
"""Queries and keys: a prompt, a token that is decoded, the rest of a prompt, two tiles of queries, a full block."""
HEADS, GROUPS, SIZE, PAGE = 6, 2, 24, 32


def paged(sequences, dtype):
    """Queries, keys and values in pages that lie anywhere, and where."""
    torch.manual_seed(0)
    q_TNH = torch.randn(sum(queries for queries, _ in sequences), HEADS, SIZE).to(dtype)
    cache_PSGH = torch.randn(60, GROUPS, PAGE, 2 * SIZE).to(dtype).transpose(1, 2)  # as vLLM's
    starts_D1 = torch.tensor([0, *accumulate(queries for queries, _ in sequences)], dtype=torch.int32)
    pages_DP = torch.randperm(60, dtype=torch.int32)[: 7 * len(sequences)].view(-1, 7)
    num_keys_D = torch.tensor([keys for _, keys in sequences], dtype=torch.int32)
    return q_TNH, *cache_PSGH.split(SIZE, -1), starts_D1, num_keys_D, pages_DP


def attend(implementation, q_TNH, k_PSGH, v_PSGH, *sequences):
    placed = PagedSequences(*sequences, max_queries=40)
    return batch_invariant_attention(q_TNH, k_PSGH, v_PSGH, placed, scale=SIZE**-0.5, implementation=implementation)


def compare_attention(implementation, dtype, within) -> None:
    q_TNH, k_PSGH, v_PSGH, starts_D1, num_keys_D, pages_DP = inputs = paged(SEQUENCES, dtype)
    out_TNH = attend(implementation, *inputs)
    for number, (queries, keys) in enumerate(SEQUENCES):
        rows = slice(starts_D1[number], starts_D1[number + 1])
        k_NKH, v_NKH = (
            x[pages_DP[number].long()]
            .flatten(0, 1)[:keys]
            .repeat_interleave(HEADS // GROUPS, 1)
            .transpose(0, 1)
            .double()
            for x in (k_PSGH, v_PSGH)
        )
        is_hidden_QK = torch.arange(keys) > torch.arange(keys - queries, keys)[:, None]
        score_NQK = q_TNH[rows].transpose(0, 1).double() @ k_NKH.mT * SIZE**-0.5
        exact_NQH = score_NQK.masked_fill(is_hidden_QK, -torch.inf).softmax(-1) @ v_NKH
        assert (out_TNH[rows].double() - exact_NQH.transpose(0, 1)).abs().max() < within


def same_bits_of_attention(dtype) -> None:
    """Decoded one by one, in a batch with other sequences, and in pages of one token as a trainer's row.

    Of the reference alone: the interpreter's product looks at a row's place in its tile.
    """
    q_TNH, k_PSGH, v_PSGH, starts_D1, num_keys_D, pages_DP = inputs = paged(SEQUENCES, dtype)
    out_TNH = attend("reference", *inputs)
    for number, (queries, keys) in enumerate(SEQUENCES):
        first, alone = int(starts_D1[number]), torch.tensor([0, 1], dtype=torch.int32)
        for query in range(queries):
            place = first + query
            num_keys = torch.tensor([keys - queries + query + 1], dtype=torch.int32)
            one = attend("reference", q_TNH[place, None], k_PSGH, v_PSGH, alone, num_keys, pages_DP[number, None])
            assert torch.equal(one[0], out_TNH[place]), (number, query)
        k_K1GH, v_K1GH = (x[pages_DP[number].long()].flatten(0, 1)[:keys, None].contiguous() for x in (k_PSGH, v_PSGH))
        row = q_TNH[first : first + queries], k_K1GH, v_K1GH, alone * queries, num_keys_D[number, None]
        out = attend("reference", *row, torch.arange(keys, dtype=torch.int32)[None])
        assert torch.equal(out, out_TNH[first : first + queries])


def same_bits_in_company(implementation, dtype) -> None:
    """Alone or with others before it, and wherever the pages lie; each query at the same place of its tile."""
    q_TNH, k_PSGH, v_PSGH, starts_D1, num_keys_D, pages_DP = inputs = paged(SEQUENCES, dtype)
    out_TNH = attend(implementation, *inputs)
    order_P = torch.randperm(len(k_PSGH))
    moved_DP = order_P.argsort()[pages_DP.long()].int()
    for number, (queries, _) in enumerate(SEQUENCES):
        rows = slice(int(starts_D1[number]), int(starts_D1[number + 1]))
        of_one = torch.tensor([0, queries], dtype=torch.int32), num_keys_D[number, None], moved_DP[number, None]
        one = attend(implementation, q_TNH[rows], k_PSGH[order_P], v_PSGH[order_P], *of_one)
        assert torch.equal(one, out_TNH[rows]), number


@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_attention(dtype, within):
    compare_attention("reference", dtype, within)


@pytest.mark.parametrize(("dtype", "within"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-2)])
def check_attention(dtype, within):
    compare_attention("triton", dtype, within)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_query_is_the_same_in_every_batch(dtype):
    same_bits_of_attention(dtype)
    same_bits_in_company("reference", dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def check_a_query_is_the_same_in_company(dtype):
    same_bits_in_company("triton", dtype)


def test_a_part_of_a_merged_weight_is_multiplied_as_one_by_itself():
    """Wherever it begins: 1,537 inputs leave no row but the first where a vector would like it."""
    rows_MK, weight_NK = operands(64, 1537, 96, torch.float32)
    part_NK = weight_NK[33:65]
    assert torch.equal(batch_invariant_matmul(rows_MK, part_NK), batch_invariant_matmul(rows_MK, part_NK.clone()))


def test_a_value_has_the_gradients_of_what_was_computed():
    x = torch.tensor([2.0, 3.0], requires_grad=True)
    value = with_value(x * x, torch.tensor([4.5, 9.5]))
    value.sum().backward()
    assert value.tolist() == [4.5, 9.5] and x.grad is not None and x.grad.tolist() == [4.0, 6.0]


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

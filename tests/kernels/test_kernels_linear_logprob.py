"""linear_logprob against logits in full and in float64; functions named check_* run in Triton's interpreter."""

import unittest.mock
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from kernel_checks import poison, run_interpreted

from titan_rl.kernels import linear_logprob as room
from titan_rl.kernels.linear_logprob import linear_logprob

# one token and few words; words that fill no block; SmolLM2's hidden size, which fills no power of two
SHAPES = [(1, 7, 5), (5, 130, 24), (33, 257, 64), (3, 70, 576)]
HEADS = [
    *({}, {"temperature": 0.7}, {"bias": True, "soft_cap": 3.0, "temperature": 1.3}),
    *({"keeps": 0.3, "temperature": 0.7}, {"keeps": 0.1, "bias": True, "soft_cap": 3.0}),
]
"""``keeps``: the share of words that a token's mask keeps beside its target."""
TILES = {"tile_tokens": 16, "tile_words": 100}


def problem(num_tokens: int, num_words: int, dim: int, dtype=torch.float32, bias: bool = False):
    """Hidden states, weight, bias or None (leaves), and targets that are not all inside."""
    torch.manual_seed(num_tokens)
    hidden_SD, weight_VD = torch.randn(num_tokens, dim), torch.randn(num_words, dim) / dim**0.5
    bias_V = torch.randn(num_words) if bias else None
    leaves = [None if x is None else x.to(dtype).requires_grad_() for x in (hidden_SD, 3 * weight_VD, bias_V)]
    target_S = torch.randint(num_words, (num_tokens,))
    target_S[0] = num_words - 1
    return leaves, target_S


def kept_words(target_S, num_words: int, keeps: float):
    """Of each token, the words that are kept (bool [S, V]), and a bit for each; the first keeps its target alone."""
    torch.manual_seed(3)
    is_kept_SV = torch.rand(len(target_S), num_words) < keeps
    is_kept_SV[0] = False
    is_kept_SV[torch.arange(len(target_S)), target_S] = True
    return is_kept_SV, torch.from_numpy(np.packbits(is_kept_SV.numpy(), axis=1, bitorder="little"))


def masked(head: dict, target_S, num_words: int) -> tuple[dict, dict]:
    """A head's settings for linear_logprob, and for logits in full; without ``bias``."""
    head = {name: value for name, value in head.items() if name != "bias"}
    if (keeps := head.pop("keeps", None)) is None:
        return head, head
    is_kept_SV, mask_SB = kept_words(target_S, num_words, keeps)
    return head | {"mask_SB": mask_SB}, head | {"is_kept_SV": is_kept_SV}


def in_full(leaves, target_S, temperature: float = 1.0, soft_cap: float | None = None, is_kept_SV=None):
    hidden_SD, weight_VD, bias_V = leaves
    logits_SV = hidden_SD @ weight_VD.T
    if bias_V is not None:
        logits_SV = logits_SV + bias_V
    if soft_cap is not None:
        logits_SV = soft_cap * torch.tanh(logits_SV / soft_cap)
    if is_kept_SV is not None:
        logits_SV = logits_SV.masked_fill(~is_kept_SV, -torch.inf)
    logprob_SV = torch.log_softmax(logits_SV / temperature, -1)
    finite_SV = logprob_SV.masked_fill(logprob_SV == -torch.inf, 0)
    return logprob_SV.gather(1, target_S[:, None])[:, 0], -(logprob_SV.exp() * finite_SV).sum(-1)


def gradients(leaves, outputs) -> list[torch.Tensor]:
    """Of random weights times log-probabilities and entropies."""
    torch.manual_seed(1)
    weights = [torch.randn(output.shape) for output in outputs]
    loss = sum((weight.to(output.dtype) * output).sum() for weight, output in zip(weights, outputs, strict=True))
    return torch.autograd.grad(loss, [leaf for leaf in leaves if leaf is not None])


def compare(implementation: str, shape, head: dict, dtype=torch.float32) -> None:
    leaves, target_S = problem(*shape, dtype, head.get("bias", False))
    head, full_head = masked(head, target_S, shape[1])
    hidden_SD, weight_VD, bias_V = leaves
    outputs = linear_logprob(
        hidden_SD, weight_VD, target_S, bias_V=bias_V, implementation=implementation, **TILES, **head
    )
    exact_leaves = [None if leaf is None else leaf.detach().double().requires_grad_() for leaf in leaves]
    exact = in_full(exact_leaves, target_S, **full_head)
    norms = hidden_SD.detach().double().norm(dim=1).max() * weight_VD.detach().double().norm(dim=1).max()
    bound = 2**-22 * (1 + float(norms)) / head.get("temperature", 1.0)
    for output, exactly in zip(outputs, exact, strict=True):
        assert output.dtype == torch.float32
        assert (output.double() - exactly).abs().max() <= bound
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-7}[dtype]
    pairs = zip(gradients(leaves, outputs), gradients(exact_leaves, exact), strict=True)
    for gradient, exactly in pairs:
        assert gradient.dtype == dtype
        assert (gradient.double() - exactly).abs().max() <= tolerance * (1 + exactly.abs().max())


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    poison(monkeypatch)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("head", HEADS)
def test_reference(shape, head):
    compare("reference", shape, head)


def test_reference_in_bfloat16():
    compare("reference", (33, 257, 64), HEADS[2], torch.bfloat16)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("head", HEADS)
def check_triton(shape, head):
    compare("triton", shape, head)


@pytest.mark.parametrize("shape", [(33, 257, 64), (3, 70, 576)])
def check_triton_in_bfloat16(shape):
    compare("triton", shape, HEADS[2], torch.bfloat16)


def check_splits_of_many_words():
    """More than 2,048 words for few tokens: several programs share a token, and one may find no word of it kept."""
    compare("triton", (2, 4500, 16), HEADS[1])
    compare("triton", (2, 4500, 16), {"keeps": 0.001})


def check_rows_with_a_stride():
    leaves, target_S = problem(5, 70, 24)
    apart = [torch.stack([leaf, leaf], 2)[:, :, 0] for leaf in leaves[:2]]
    plain, strided = (linear_logprob(*pair, target_S, implementation="triton") for pair in (leaves[:2], apart))
    assert torch.equal(plain[0], strided[0]) and torch.equal(plain[1], strided[1])


def test_triton_in_its_interpreter():
    run_interpreted(__file__)


@pytest.mark.parametrize("head", HEADS)
def test_gradcheck(head):
    leaves, target_S = problem(5, 13, 4, torch.float64, head.get("bias", False))
    head, _ = masked(head, target_S, 13)
    inputs = [leaf for leaf in leaves if leaf is not None]

    def outputs(hidden_SD, weight_VD, bias_V=None):
        return linear_logprob(hidden_SD, weight_VD, target_S, bias_V=bias_V, tile_tokens=2, tile_words=4, **head)

    assert torch.autograd.gradcheck(outputs, inputs)


def test_only_what_is_asked_for_is_computed(monkeypatch):
    """A frozen weight gets no gradient, and entropies that no loss uses cost nothing in the backward."""
    (hidden_SD, weight_VD, _), target_S = problem(5, 30, 8)
    weight_VD.requires_grad_(False)
    tiles, gradient = [], room._reference_gradient

    def watched(tokens, *arguments):
        tiles.append(tokens)
        return gradient(tokens, *arguments)

    monkeypatch.setattr(room, "_reference_gradient", watched)
    logprob_S, entropy_S = linear_logprob(hidden_SD, weight_VD, target_S)
    assert entropy_S.requires_grad
    logprob_S.sum().backward()
    assert weight_VD.grad is None and hidden_SD.grad is not None
    assert [tile.grad_entropy_S for tile in tiles] == [None]


@pytest.mark.parametrize("expected_grad", [None, lambda logprob_S, tokens: torch.ones_like(logprob_S)])
def test_no_token(expected_grad):
    (hidden_SD, weight_VD, bias_V), target_S = problem(1, 7, 5, bias=True)
    logprob_S, _ = linear_logprob(hidden_SD[:0], weight_VD, target_S[:0], bias_V=bias_V, expected_grad=expected_grad)
    logprob_S.sum().backward()
    assert hidden_SD.grad.count_nonzero() == weight_VD.grad.count_nonzero() == bias_V.grad.count_nonzero() == 0


def test_extreme_logits_stay_finite():
    """A certain word: log-probability and entropy are zero, gradients too."""
    hidden_SD, weight_VD = torch.full((2, 1), 100.0, requires_grad=True), torch.tensor([[-9.0], [9.0], [-9.0]])
    logprob_S, entropy_S = linear_logprob(hidden_SD, weight_VD, torch.tensor([1, 0]), tile_words=1)
    (logprob_S + entropy_S).sum().backward()
    assert logprob_S.tolist() == [0.0, -1800.0] and entropy_S.tolist() == [0.0, 0.0]
    assert hidden_SD.grad[:, 0].tolist() == [0.0, -18.0]


class Surrogate:
    """A loss as PPO's is, a sum of something that is not linear, and its gradient for any part of the tokens."""

    def __init__(self, num_tokens: int, dtype=torch.float32):
        torch.manual_seed(2)
        self.weight_S = torch.randn(num_tokens, dtype=dtype)

    def loss(self, logprob_S: torch.Tensor) -> torch.Tensor:
        return ((logprob_S / 4).exp() * self.weight_S).sum()

    def expected(self, logprob_S: torch.Tensor, tokens: slice) -> torch.Tensor:
        with torch.enable_grad():
            leaf_S = logprob_S.detach().requires_grad_()
            loss = ((leaf_S / 4).exp() * self.weight_S[tokens]).sum()
        return torch.autograd.grad(loss, leaf_S)[0]


@pytest.fixture
def again(monkeypatch):
    """How often a backward had to compute the logits once more."""
    calls, backward = [], room._backward_again

    def counted(*arguments):
        calls.append(arguments)
        return backward(*arguments)

    monkeypatch.setattr(room, "_backward_again", counted)
    return calls


@pytest.mark.parametrize("dtype, kept", [(torch.float32, 0), (torch.bfloat16, 0), (torch.bfloat16, 2**27)])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("head", HEADS)
def test_expected_gradients_are_made_in_the_forward(monkeypatch, shape, head, dtype, kept, again):
    """Of all logits kept in bf16, too, where the CPU multiplies that."""
    monkeypatch.setattr(room, "_CPU_KEPT_SIZE", kept)
    leaves, target_S = problem(*shape, dtype, head.get("bias", False))
    head, _ = masked(head, target_S, shape[1])
    surrogate = Surrogate(shape[0])
    results = []
    for expected_grad in (surrogate.expected, None):
        outputs = linear_logprob(*leaves[:2], target_S, bias_V=leaves[2], expected_grad=expected_grad, **TILES, **head)
        loss = surrogate.loss(outputs[0])
        results.append((*outputs, *torch.autograd.grad(loss, [leaf for leaf in leaves if leaf is not None])))
        assert len(again) == (expected_grad is None)
    for found, wanted in zip(*results, strict=True):
        assert found.dtype == wanted.dtype
        rtol, atol = 2**-7 if found.dtype == torch.bfloat16 else 1e-5, 1e-5
        if kept and found.dtype == torch.bfloat16:  # what is summed up was rounded, as Triton rounds it
            atol = (2**-8 if "mask_SB" in head else 2**-9) * float(wanted.abs().max())  # few words share a mask's sum
        torch.testing.assert_close(found, wanted, rtol=rtol, atol=atol)


def test_what_was_not_expected_is_computed_anew(again):
    """Another gradient than the expected one, one of entropies, and a second backward."""
    (hidden_SD, weight_VD, _), target_S = problem(20, 60, 8)
    surrogate = Surrogate(20)

    def gradients_of(loss, expected_grad) -> tuple:
        logprob_S, entropy_S = linear_logprob(hidden_SD, weight_VD, target_S, **TILES, expected_grad=expected_grad)
        value = loss(logprob_S, entropy_S)
        first = torch.autograd.grad(value, (hidden_SD, weight_VD), retain_graph=True)
        assert len(again) == 1
        second = torch.autograd.grad(value, (hidden_SD, weight_VD))
        assert len(again) == 2 and all(map(torch.equal, first, second))
        again.clear()
        return first

    for loss in (
        lambda logprob_S, entropy_S: surrogate.loss(logprob_S) + logprob_S[7],
        lambda logprob_S, entropy_S: surrogate.loss(logprob_S) + entropy_S.sum(),
        lambda logprob_S, entropy_S: entropy_S.sum(),
    ):
        assert all(map(torch.equal, gradients_of(loss, surrogate.expected), gradients_of(loss, None)))


def test_expected_gradients_are_handed_over_once(again):
    (hidden_SD, weight_VD, _), target_S = problem(20, 60, 8)
    surrogate = Surrogate(20)
    logprob_S, _ = linear_logprob(hidden_SD, weight_VD, target_S, **TILES, expected_grad=surrogate.expected)
    loss = surrogate.loss(logprob_S)
    first = torch.autograd.grad(loss, (hidden_SD, weight_VD), retain_graph=True)
    kept = [gradient.clone() for gradient in first]
    for gradient in first:
        gradient.zero_()  # whoever got them may do with them what they like
    torch.testing.assert_close(torch.autograd.grad(loss, (hidden_SD, weight_VD)), tuple(kept))
    assert len(again) == 1


@pytest.mark.parametrize(
    "dtype, kept, wide", [(torch.float32, 0, False), (torch.bfloat16, 2**27, False), (torch.bfloat16, 2**27, True)]
)
@pytest.mark.parametrize("expects", [False, True])
def test_a_kept_workspace_serves_one_call_after_the_other(monkeypatch, expects, dtype, kept, wide):
    """Longest rows first or last: gradients are those of calls with memory of their own, which is made anew each."""
    monkeypatch.setattr(room, "_CPU_KEPT_SIZE", kept)
    monkeypatch.setattr(room, "multiplies_wide", lambda: wide)

    def gradients_of(num_tokens: int) -> tuple[torch.Tensor, ...]:
        leaves, target_S = problem(num_tokens, 60, 8, dtype, bias=True)
        surrogate = Surrogate(num_tokens)
        expected_grad = surrogate.expected if expects else None
        outputs = linear_logprob(*leaves[:2], target_S, bias_V=leaves[2], expected_grad=expected_grad, **TILES)
        return torch.autograd.grad(surrogate.loss(outputs[0]), leaves)

    sizes = (20, 7, 33, 20)
    wanted = [gradients_of(size) for size in sizes]
    assert len({gradients[1].data_ptr() for gradients in wanted}) == len(sizes)
    workspace = room.Workspace()
    for _ in range(2):
        places = set()
        with workspace:
            for size, alone in zip(sizes, wanted, strict=True):
                found = gradients_of(size)
                assert all(map(torch.equal, found, alone))
                places.add(found[1].data_ptr())
        assert len(places) == 1
    assert gradients_of(20)[1].data_ptr() not in places


def test_two_calls_before_a_backward_do_not_share_a_workspace():
    """The first one's gradient of the weight would be overwritten while the second's is added to it."""
    (hidden_SD, weight_VD, _), target_S = problem(20, 60, 8)
    with room.Workspace():
        first, second = (linear_logprob(hidden_SD, weight_VD, target_S)[0].sum() for _ in range(2))
        with pytest.raises(AssertionError, match="two calls of an output head in one forward"):
            (first + second).backward()
        linear_logprob(hidden_SD, weight_VD, target_S)  # whose result counts nothing
        linear_logprob(hidden_SD, weight_VD, target_S)[0].sum().backward()


@pytest.mark.parametrize("expects", [False, True])
def test_memory_is_bounded_by_the_tiles(expects, again):
    """No tensor made on the way is larger than a tile (a chunk's logits), a gradient or a block of the weight."""
    (hidden_SD, weight_VD, _), target_S = problem(64, 1000, 8)
    surrogate, largest = Surrogate(64), 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **kwargs or {})
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.untyped_storage().nbytes())
            return out

    with Watch():
        tiles = {"tile_tokens": 8, "tile_words": 100}
        expected_grad = surrogate.expected if expects else None
        logprob_S, _ = linear_logprob(hidden_SD, weight_VD, target_S, **tiles, expected_grad=expected_grad)
        surrogate.loss(logprob_S).backward()
    assert len(again) == (not expects)
    assert largest == 4 * 8 * 1000  # a chunk's logits, or the weight's gradient


SPREAD = {"temperature": 0.7, "soft_cap": 4.0}
SPREADS = {"whole": {}, "masked": {"keeps": 0.2}}


def spread_problem():
    leaves, target_S = problem(9, 13, 6, bias=True)
    target_S[:3] = torch.tensor([0, 6, 7])  # the words at the seam between the ranks
    return leaves, target_S


def spread_rank(index: int, folder: str) -> None:
    """A rank of two, which hold seven words and six; its results go to a file."""
    group = dist.ProcessGroupGloo(dist.FileStore(f"{folder}/store", 2), index, 2, timeout=timedelta(seconds=60))
    (hidden_SD, weight_VD, bias_V), target_S = spread_problem()
    words = [slice(0, 7), slice(7, 13)][index]
    results = {}
    for spread, settings in SPREADS.items():
        head, _ = masked(SPREAD | settings, target_S, 13)
        for implementation in ("reference", "triton"):
            mine = [part.detach().clone().requires_grad_() for part in (hidden_SD, weight_VD[words], bias_V[words])]
            keywords = {"bias_V": mine[2], "first_word": words.start, "group": group, "implementation": implementation}
            outputs = linear_logprob(*mine[:2], target_S, **keywords, **head)
            results[spread, implementation] = [output.detach() for output in outputs], gradients(mine, outputs)
        surrogate = Surrogate(len(target_S))
        keywords |= {"implementation": "reference", "tile_tokens": 4, "expected_grad": surrogate.expected}
        outputs = linear_logprob(*mine[:2], target_S, **keywords, **head)
        with unittest.mock.patch.object(room, "_backward_again") as again:
            results[spread, "expected"] = (
                [output.detach() for output in outputs],
                torch.autograd.grad(surrogate.loss(outputs[0]), mine),
            )
        assert not again.called
    torch.save(results, f"{folder}/{index}")


def check_spread_vocabulary_agrees_with_the_whole_one(tmp_path):
    """The parts of the hidden states' gradient add up to it; a rank may hold no word of a token's mask."""
    torch.multiprocessing.spawn(spread_rank, (str(tmp_path),), nprocs=2)
    leaves, target_S = spread_problem()
    exact_gradients = {}
    for spread, settings in SPREADS.items():
        _, head = masked(SPREAD | settings, target_S, 13)
        exact = in_full(leaves, target_S, **head)
        whole = gradients(leaves, exact)
        of_surrogate = torch.autograd.grad(Surrogate(len(target_S)).loss(in_full(leaves, target_S, **head)[0]), leaves)
        exact_gradients |= {(spread, form): (exact, whole) for form in ("reference", "triton")}
        exact_gradients[spread, "expected"] = exact, of_surrogate
    ranks = [torch.load(tmp_path / str(index)) for index in range(2)]
    for form, (exact, (hidden_SD, weight_VD, bias_V)) in exact_gradients.items():
        outputs, parts = zip(*(rank[form] for rank in ranks), strict=True)
        for output in outputs:
            torch.testing.assert_close(output, [exactly.detach() for exactly in exact])
        torch.testing.assert_close(parts[0][0] + parts[1][0], hidden_SD)
        torch.testing.assert_close(torch.cat([part[1] for part in parts]), weight_VD)
        torch.testing.assert_close(torch.cat([part[2] for part in parts]), bias_V)


@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_products_keep_their_precision(monkeypatch, dtype, is_wide):
    """That of bf16 is set for the products of bf16 alone, where its units are the faster ones, and not left behind."""
    monkeypatch.setattr("titan_rl.kernels.linear_logprob.multiplies_wide", lambda: is_wide)
    matmul, seen = torch.backends.mkldnn.matmul, []
    before = matmul.fp32_precision
    hidden, weight = torch.ones(3, 4, dtype=dtype, requires_grad=True), torch.ones(5, 4, dtype=dtype)

    def expected(logprob_S, rows):
        seen.append(matmul.fp32_precision)
        return torch.ones_like(logprob_S)

    linear_logprob(hidden, weight, torch.tensor([0, 1, 4]), expected_grad=expected)[0].sum().backward()
    assert seen == ["bf16" if dtype == torch.bfloat16 and not is_wide else before] and matmul.fp32_precision == before

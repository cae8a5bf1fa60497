"""Triton's kernels against references in float64 on shapes that fill no tile; what they take is kernels/bench.py's."""

from collections.abc import Callable
from typing import Any, Literal

import torch

from gpu_check.bench import relative_error
from gpu_check.fixtures import Fixtures
from titan_rl.kernels.batch_invariant import (
    PagedSequences,
    batch_invariant_attention,
    batch_invariant_log_softmax,
    batch_invariant_matmul,
)
from titan_rl.kernels.discounted_scan import advantages_and_returns
from titan_rl.kernels.linear_logprob import linear_logprob
from titan_rl.kernels.pack_cast import Staging
from titan_rl.kernels.policy_loss import Objective, policy_loss

Figures = dict[str, Any]
_Widening = Callable[[torch.Tensor], torch.Tensor]
_BOTH: tuple[tuple[Literal["triton", "reference"], _Widening], ...] = (
    ("triton", torch.Tensor.float),
    ("reference", torch.Tensor.double),
)
"""Implementations, and what makes inputs of the dtype that each computes in."""


def _worst(figures: list[Figures]) -> Figures:
    return {name: max(one[name] for one in figures) for name in figures[0]}


def check_linear_logprob(fixtures: Fixtures) -> Figures:
    shapes = [(5, 130, 24), (3, 70, 72)] if fixtures.rehearse else [(1, 7, 5), (33, 1030, 64), (300, 5000, 576)]
    return _worst([_linear_logprob(fixtures.device, torch.float32, "fp32", *shape) for shape in shapes]) | _worst(
        [_linear_logprob(fixtures.device, torch.bfloat16, "bf16", *shape) for shape in shapes]
    )


def _linear_logprob(device: torch.device, dtype: torch.dtype, name: str, tokens: int, words: int, dim: int) -> Figures:
    torch.manual_seed(tokens)
    hidden_SD, weight_VD = torch.randn(tokens, dim), 3 * torch.randn(words, dim) / dim**0.5
    leaves = [one.to(device, dtype).requires_grad_() for one in (hidden_SD, weight_VD)]
    target_S, temperature = torch.randint(words, (tokens,)).to(device), 0.7
    computed = linear_logprob(leaves[0], leaves[1], target_S, temperature=temperature, implementation="triton")
    exact_leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
    logprob_SV = (exact_leaves[0] @ exact_leaves[1].T / temperature).log_softmax(-1)
    exact = logprob_SV.gather(1, target_S[:, None])[:, 0], -(logprob_SV.exp() * logprob_SV).sum(-1)
    norms = [leaf.detach().norm(dim=1).max() for leaf in exact_leaves]
    bound = 2**-22 * (1 + float(norms[0] * norms[1])) / temperature  # what linear_logprob promises
    error = max(
        float((one.detach().double() - other.detach()).abs().max()) for one, other in zip(computed, exact, strict=True)
    )
    upstream_S = torch.randn(tokens).to(device)
    gradients = torch.autograd.grad(computed[0], leaves, upstream_S)
    exact_gradients = torch.autograd.grad(exact[0], exact_leaves, upstream_S.double())
    pairs = zip(gradients, exact_gradients, strict=True)
    return {f"{name}_of_bound": error / bound, f"{name}_gradient_error": max(relative_error(*pair) for pair in pairs)}


def check_policy_loss(fixtures: Fixtures) -> Figures:
    num_tokens = 70 if fixtures.rehearse else 3001
    torch.manual_seed(0)
    logprob_S = torch.randn(num_tokens).sub(2)
    old_S, reference_S = (logprob_S + 0.1 * torch.randn(num_tokens) for _ in range(2))
    advantage_S, weight_S = torch.randn(num_tokens), torch.rand(num_tokens)
    inputs = [one.to(fixtures.device) for one in (logprob_S, old_S, advantage_S, weight_S)]
    offsets_N = torch.tensor([0, 9, num_tokens], device=fixtures.device)
    more = {"reference_logprob_S": reference_S.to(fixtures.device), "offsets_N": offsets_N}
    objectives = [
        Objective(dual_clip=3.0, kl_coefficient=0.1),
        Objective(kind="cispo", kl_coefficient=0.1, kl_estimator="k2"),
        Objective(level="sequence", kl_coefficient=0.1, kl_estimator="k1"),
        Objective(level="sequence_token", kl_coefficient=0.1, kl_estimator="k3_unbiased"),
    ]
    return _worst([_policy_loss(inputs, more, objective) for objective in objectives])


def _policy_loss(inputs: list[torch.Tensor], more: dict[str, torch.Tensor], objective: Objective) -> Figures:
    """The reference computes in its inputs' dtype."""
    results = []
    for implementation, wide in _BOTH:
        leaf = wide(inputs[0]).requires_grad_()
        more_wide = {name: value if name == "offsets_N" else wide(value) for name, value in more.items()}
        old_S, advantage_S, weight_S = (wide(one) for one in inputs[1:])
        loss, _ = policy_loss(leaf, old_S, advantage_S, weight_S, objective, **more_wide, implementation=implementation)
        results.append((loss.detach(), torch.autograd.grad(loss, leaf)[0]))
    (loss, gradient), (exact_loss, exact_gradient) = results
    size = float(sum(one.double().abs().mean() for one in inputs[2:]))
    return {
        "loss_error": float(abs(loss.double() - exact_loss)) / max(float(exact_loss.abs()), size),
        "gradient_error": relative_error(gradient, exact_gradient),
    }


def check_discounted_scan(fixtures: Fixtures) -> Figures:
    num_tokens = 100 if fixtures.rehearse else 100_003
    torch.manual_seed(0)
    rewards_T, values_T = (torch.randn(num_tokens).to(fixtures.device) for _ in range(2))
    last_T = (torch.rand(num_tokens) < 1e-3).to(fixtures.device)
    computed, exact = (
        advantages_and_returns(wide(rewards_T), wide(values_T), last_T, 0.99, 0.95, implementation=how)
        for how, wide in _BOTH
    )
    return {"error": max(relative_error(one, other) for one, other in zip(computed, exact, strict=True))}


def check_pack_cast(fixtures: Fixtures) -> Figures:
    shapes = [(130, 64), (7,)] if fixtures.rehearse else [(1000, 528), (300, 130), (4097,)]
    torch.manual_seed(0)
    shards, same = [torch.randn(shape).to(fixtures.device) for shape in shapes], True
    # the interpreter rounds otherwise (test_kernels_pack_cast.py works around it); whole numbers are exact
    shards = [(8 * shard).round() for shard in shards] if fixtures.rehearse else shards
    for fp8 in (False,) if fixtures.rehearse else (False, True):
        packed = [
            Staging(shapes, fp8=fp8, device=fixtures.device, implementation=how) for how in ("triton", "reference")
        ]
        (buffer, total), (expected, expected_total) = (one.pack(shards) for one in packed)
        same = same and bool(torch.equal(buffer, expected)) and int(total) == int(expected_total)
    return {"same_bytes": same}


def check_batch_invariant(fixtures: Fixtures) -> Figures:
    depth, largest, sizes = (64, 24, (1, 7)) if fixtures.rehearse else (1024, 300, (1, 2, 63, 64, 65, 129))
    torch.manual_seed(0)
    rows_MK, weight_NK = (torch.randn(count, depth).to(fixtures.device, torch.bfloat16) for count in (largest, 96))
    whole_MN = batch_invariant_matmul(rows_MK, weight_NK, implementation="triton")
    logits_MN = torch.randn(largest, 1030).to(fixtures.device)
    log_MN = batch_invariant_log_softmax(logits_MN, implementation="triton")
    same = True
    for size in sizes:
        part_MN = batch_invariant_matmul(rows_MK[:size], weight_NK, implementation="triton")
        log_part_MN = batch_invariant_log_softmax(logits_MN[:size], implementation="triton")
        same = same and bool(torch.equal(part_MN, whole_MN[:size]) and torch.equal(log_part_MN, log_MN[:size]))
    exact_MN = rows_MK.double() @ weight_NK.double().T
    errors = relative_error(whole_MN, exact_MN), relative_error(log_MN, logits_MN.double().log_softmax(-1))
    attention_same, attention_error = _attention(fixtures)
    return {"same_bits": same and attention_same, "error": max(*errors, attention_error)}


def _attention(fixtures: Fixtures) -> tuple[bool, float]:
    """Of a sequence as a trainer's row has it, and decoded from an engine's pages: whether bits are equal; error."""
    length, page, groups, size = (37, 16, 2, 32) if fixtures.rehearse else (300, 16, 2, 128)
    q_TNH = torch.randn(length, 6, size).to(fixtures.device, torch.bfloat16)
    k_TGH, v_TGH = torch.randn(2, length, groups, size).to(fixtures.device, torch.bfloat16)
    pages_DP = torch.randperm(length, device=fixtures.device, dtype=torch.int32)[None, : -(-length // page)]
    cache_PGSH = torch.zeros(length, groups, page, 2 * size, device=fixtures.device, dtype=torch.bfloat16)
    token_T = torch.arange(length, device=fixtures.device)
    page_T = pages_DP[0, token_T // page].long()
    cache_PGSH[page_T, :, token_T % page] = torch.cat([k_TGH, v_TGH], dim=-1)
    k_PSGH, v_PSGH = cache_PGSH.transpose(1, 2).split(size, dim=-1)

    def attend(first: int, end: int, keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        starts_D1, num_keys_D = (
            torch.tensor(numbers, device=fixtures.device, dtype=torch.int32) for numbers in ([0, end - first], [end])
        )
        sequences = PagedSequences(starts_D1, num_keys_D, pages, end - first)
        how = {"scale": size**-0.5, "implementation": "triton"}
        return batch_invariant_attention(q_TNH[first:end], keys, values, sequences, **how)

    row_TNH = attend(0, length, k_TGH[:, None], v_TGH[:, None], token_T[None].int())
    places = (0, 1, length // 2, length - 1)
    same = all(torch.equal(attend(n, n + 1, k_PSGH, v_PSGH, pages_DP)[0], row_TNH[n]) for n in places)
    k_NTH, v_NTH = (x.repeat_interleave(6 // groups, 1).transpose(0, 1).double() for x in (k_TGH, v_TGH))
    exact_NTH = torch.nn.functional.scaled_dot_product_attention(
        q_TNH.transpose(0, 1).double(), k_NTH, v_NTH, is_causal=True
    )
    return same, relative_error(row_TNH, exact_NTH.transpose(0, 1))


CHECKS: dict[str, Callable[[Fixtures], Figures]] = {
    "linear_logprob": check_linear_logprob,
    "policy_loss": check_policy_loss,
    "discounted_scan": check_discounted_scan,
    "pack_cast": check_pack_cast,
    "batch_invariant": check_batch_invariant,
}

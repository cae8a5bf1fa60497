"""Every kernel on this machine's GPU: time, share of the floor, memory, error, and what others need for the same.

    python kernels/bench.py [--json] [--only NAME] [--rehearse]

Needs torch and triton alone; Liger-Kernel is measured where it is installed. Floors are measured too: bytes over the
bandwidth of a copy, operations over the rate of a large product of the vendor's (for batch_invariant_matmul, the
vendor's time for the same product). ``--rehearse`` goes through the same
lines with tiny shapes on a CPU (with TRITON_INTERPRET=1), and its figures mean nothing.

Peak memory is what the allocator gave out at most beyond what was there before, less the gradients.
"""

import argparse
import functools
import json
import math
import sys
from collections.abc import Callable
from typing import Any, Literal

import torch
import triton

# siblings, whose folder Python has put first on the path
from batch_invariant import batch_invariant_log_softmax, batch_invariant_matmul
from bench_attention import bench_attention
from bench_measure import OURS, REHEARSAL, Bench, Sizes, hold, relative
from block_sums import block_sums
from discounted_scan import advantages_and_returns
from linear_logprob import linear_logprob
from pack_cast import Staging
from policy_loss import Objective, policy_loss


def _logits_in_full(
    hidden_SD: torch.Tensor, weight_VD: torch.Tensor, target_S: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    logprob_SV = torch.log_softmax((hidden_SD @ weight_VD.T).to(_wide(hidden_SD)) / temperature, -1)
    with torch.no_grad():
        entropy_S = -(logprob_SV.exp() * logprob_SV).sum(-1)
    return logprob_SV.gather(1, target_S[:, None])[:, 0], entropy_S


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def bench_linear_logprob(bench: Bench) -> None:
    sizes, temperature = bench.sizes, 0.8
    ours = functools.partial(linear_logprob, temperature=temperature, implementation="triton")
    for vocabulary in sizes.vocabularies:
        shape = f"{sizes.tokens} x {sizes.hidden} x {vocabulary}"
        leaves, target_S = _problem(bench, sizes.tokens, vocabulary)
        gradient_bytes = sum(leaf.nbytes for leaf in leaves)
        three_products = 6 * sizes.tokens * sizes.hidden * vocabulary / bench.operations_per_s
        upstream_S = torch.randn(sizes.tokens, device=bench.device)

        step = functools.partial(_forward_backward, leaves, target_S, upstream_S)
        row = functools.partial(bench.add, "linear_logprob", shape, floor=three_products, gradients=gradient_bytes)
        mine = row(by=OURS, run=functools.partial(step, ours), **_errors(bench, ours, vocabulary, temperature))
        hold(mine, "of_floor", 0.7)
        hold(mine, "peak_mib", 1024, at_most=True)
        forward = functools.partial(ours, *(leaf.detach() for leaf in leaves), target_S)
        bench.add("linear_logprob forward", shape, OURS, forward, three_products / 3)
        in_full = functools.partial(_logits_in_full, temperature=temperature)
        row(by="eager", run=functools.partial(step, in_full))
        row(by="torch.compile", run=functools.partial(step, torch.compile(in_full)))
        liger = _liger()
        if liger is None:
            bench.rows.append({"kernel": "linear_logprob", "shape": shape, "by": "liger", "failed": "not installed"})
            continue
        theirs = row(by="liger", run=functools.partial(_liger_step, liger, leaves, target_S))
        if "milliseconds" in theirs:
            hold(mine, "milliseconds", theirs["milliseconds"], at_most=True)


def _forward_backward(
    leaves: list[torch.Tensor], target_S: torch.Tensor, upstream_S: torch.Tensor, forward: Callable
) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(forward(*leaves, target_S)[0], leaves, upstream_S)


def _liger() -> Callable | None:
    try:  # it is measured where it is installed
        from liger_kernel.transformers import (  # pyright: ignore[reportMissingImports]
            LigerFusedLinearCrossEntropyLoss,
        )
    except ImportError:
        return None
    return LigerFusedLinearCrossEntropyLoss()


def _liger_step(liger: Callable, leaves: list[torch.Tensor], target_S: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Without temperature, entropy and a weight a token: it has the gradient of the mean alone."""
    return torch.autograd.grad(liger(leaves[1], leaves[0], target_S), leaves)


def _problem(bench: Bench, tokens: int, vocabulary: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    torch.manual_seed(0)
    like: dict[str, Any] = dict(device=bench.device, dtype=torch.bfloat16)
    hidden_SD = torch.randn(tokens, bench.sizes.hidden, **like)
    weight_VD = torch.randn(vocabulary, bench.sizes.hidden, **like) * (3 / bench.sizes.hidden**0.5)
    target_S = torch.randint(vocabulary, (tokens,), device=bench.device)
    return [hidden_SD.requires_grad_(), weight_VD.requires_grad_()], target_S


def _errors(bench: Bench, ours: Callable, vocabulary: int, temperature: float) -> dict[str, float]:
    """On fewer tokens, whose logits in float64 there is memory for."""
    leaves, target_S = _problem(bench, bench.sizes.checked_tokens, vocabulary)
    exact_leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact_hidden_SD, exact_weight_VD = exact_leaves
    found, exact = ours(*leaves, target_S), _logits_in_full(exact_hidden_SD, exact_weight_VD, target_S, temperature)
    gradients = torch.autograd.grad(found[0].sum(), leaves)
    exact_gradients = torch.autograd.grad(exact[0].sum(), exact_leaves)
    return {
        "logprob_error": float((found[0].detach().double() - exact[0].detach()).abs().max()),
        "entropy_error": float((found[1].detach().double() - exact[1]).abs().max()),
        "hidden_gradient_relative_error": relative(gradients[0], exact_gradients[0]),
        "weight_gradient_relative_error": relative(gradients[1], exact_gradients[1]),
    }


def bench_policy_loss(bench: Bench) -> None:
    tokens = bench.sizes.scanned // 2
    torch.manual_seed(0)
    logprob_S = torch.randn(tokens, device=bench.device).sub_(2).requires_grad_()
    old_S, reference_S = (logprob_S.detach() + 0.1 * torch.randn_like(logprob_S) for _ in range(2))
    advantage_S, weight_S, importance_S = (torch.rand(tokens, device=bench.device) for _ in range(3))
    objective = Objective(dual_clip=3.0, kl_coefficient=0.1)

    def step(implementation: str, function: Callable = policy_loss) -> torch.Tensor:
        loss, _ = function(
            *(logprob_S, old_S, advantage_S, weight_S, objective),
            **{"importance_S": importance_S, "reference_logprob_S": reference_S},
            implementation=implementation,
        )
        return torch.autograd.grad(loss, logprob_S)[0]

    # six read and the gradient written; then that read and scaled
    floor = 9 * logprob_S.nbytes / bench.bytes_per_s
    compiled = torch.compile(policy_loss)
    error = relative(step("triton"), step("reference").double())
    row = functools.partial(bench.add, "policy_loss", f"{tokens}", floor=floor, gradients=logprob_S.nbytes)
    hold(row(by=OURS, run=lambda: step("triton"), gradient_relative_error=error), "of_floor", 0.85)
    row(by="eager", run=lambda: step("reference"))
    row(by="torch.compile", run=lambda: step("reference", compiled))


def bench_discounted_scan(bench: Bench) -> None:
    tokens = bench.sizes.scanned
    torch.manual_seed(0)
    rewards_T, values_T = (torch.randn(tokens, device=bench.device) for _ in range(2))
    last_T = torch.rand(tokens, device=bench.device) < 1e-3
    floor = (4 * rewards_T.nbytes + last_T.nbytes) / bench.bytes_per_s

    def run(implementation: Literal["reference", "triton"]) -> tuple[torch.Tensor, torch.Tensor]:
        return advantages_and_returns(rewards_T, values_T, last_T, 0.99, 0.95, implementation=implementation)

    error = float((run("triton")[0] - run("reference")[0]).abs().max())
    row = functools.partial(bench.add, "discounted_scan", f"{tokens}, segments of 1000", floor=floor)
    hold(row(by=OURS, run=lambda: run("triton"), error=error), "of_floor", 0.85)
    row(by="eager", run=lambda: run("reference"))


def bench_pack_cast(bench: Bench) -> None:
    shards = [torch.randn(shape, device=bench.device) for shape in bench.sizes.shards]
    values = sum(shard.numel() for shard in shards)
    for fp8 in (False, True):
        name = "fp8" if fp8 else "bfloat16"
        ours, theirs = (
            Staging(bench.sizes.shards, fp8=fp8, device=bench.device, implementation=implementation)
            for implementation in ("triton", "reference")
        )
        buffer, total = ours.pack(shards)
        expected, expected_total = theirs.pack(shards)
        same = {"same_bytes_as_reference": bool(torch.equal(buffer, expected) and total == expected_total)}
        floor = (4 * values + ours.num_bytes) / bench.bytes_per_s
        shape = f"{values} values in {len(shards)} shards, {name}"
        into = [torch.empty_like(shard) for shard in shards]
        for kernel, by, run in (
            ("pack", OURS, functools.partial(ours.pack, shards, buffer)),
            ("unpack", OURS, functools.partial(ours.unpack, buffer, into)),
            ("pack", "eager", functools.partial(theirs.pack, shards, buffer)),
            ("unpack", "eager", functools.partial(theirs.unpack, buffer, into)),
        ):
            row = bench.add(kernel, shape, by, run, floor, **(same if by == OURS else {}))
            if by == OURS:
                hold(row, "of_floor", 0.85)


def bench_block_sums(bench: Bench) -> None:
    num_bytes = 4 * sum(math.prod(shape) for shape in bench.sizes.shards) // 64 * 64
    data = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=bench.device)
    blocks = [(start, min(start + (8 << 20), num_bytes)) for start in range(0, num_bytes, 8 << 20)]
    ours, theirs = (functools.partial(block_sums, data, blocks, implementation=by) for by in ("triton", "reference"))
    row = functools.partial(
        bench.add, "block_sums", f"{num_bytes} bytes in {len(blocks)} blocks", floor=num_bytes / bench.bytes_per_s
    )
    hold(row(by=OURS, run=ours, same_sums_as_reference=bool(torch.equal(ours(), theirs()))), "of_floor", 0.4)
    row(by="eager", run=theirs)


def bench_batch_invariant(bench: Bench) -> None:
    depth, largest = bench.sizes.hidden, bench.sizes.largest_batch
    torch.manual_seed(0)
    like: dict[str, Any] = dict(device=bench.device, dtype=torch.bfloat16)
    weight_NK = torch.randn(depth, depth, **like)
    matmul = functools.partial(batch_invariant_matmul, weight_NK=weight_NK, implementation="triton")
    rows_MK = torch.randn(max(largest, *bench.sizes.batches), depth, **like)
    whole_MN = matmul(rows_MK[:largest])
    same = sum(int(torch.equal(matmul(rows_MK[:size]), whole_MN[:size])) for size in range(1, largest + 1))
    order = torch.randperm(largest, device=bench.device)
    permuted = bool(torch.equal(matmul(rows_MK[:largest][order]), whole_MN[order]))
    for size in bench.sizes.batches:
        batch_MK = rows_MK[:size]
        vendor = bench.seconds(functools.partial(torch.mm, batch_MK, weight_NK.T))
        exact_MN = batch_MK[:64].double() @ weight_NK.double().T
        row = bench.add(
            *(
                "batch_invariant_matmul",
                f"{size} x {depth} x {depth}",
                OURS,
                functools.partial(matmul, batch_MK),
                vendor,
            ),
            batches_with_equal_bits=same,
            equal_bits_in_another_order=permuted,
            relative_error=relative(matmul(batch_MK)[:64], exact_MN),
        )
        hold(row, "of_floor", 0.6)
        hold(row, "batches_with_equal_bits", largest)
    logits_MN = torch.randn(largest, bench.sizes.vocabularies[0], device=bench.device)
    floor = 2 * logits_MN.nbytes / bench.bytes_per_s
    row = functools.partial(bench.add, "batch_invariant_log_softmax", f"{list(logits_MN.shape)}", floor=floor)
    row(by=OURS, run=lambda: batch_invariant_log_softmax(logits_MN, implementation="triton"))
    row(by="eager", run=lambda: torch.log_softmax(logits_MN, -1))


BENCHES = {
    "linear_logprob": bench_linear_logprob,
    "policy_loss": bench_policy_loss,
    "discounted_scan": bench_discounted_scan,
    "pack_cast": bench_pack_cast,
    "block_sums": bench_block_sums,
    "batch_invariant": bench_batch_invariant,
    "packed_attention": bench_attention,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--only", choices=BENCHES, help="one kernel")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on a CPU; the figures mean nothing")
    arguments = parser.parse_args()
    if not arguments.rehearse and not torch.cuda.is_available():
        print("no GPU here: nothing was measured (--rehearse goes through the motions)", file=sys.stderr)
        return 2
    bench = Bench("cpu" if arguments.rehearse else "cuda", REHEARSAL if arguments.rehearse else Sizes())
    for name, run in BENCHES.items():
        if arguments.only in (None, name):
            run(bench)
    machine = {
        "device": "a CPU, rehearsing" if arguments.rehearse else torch.cuda.get_device_name(),
        "copy_gb_per_s": bench.bytes_per_s / 1e9,
        "product_tflops": bench.operations_per_s / 1e12,
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    if arguments.json:
        print(json.dumps({"rows": bench.rows, "machine": machine}, indent=1))
        return 0
    print(machine)
    for row in bench.rows:
        time_ms, share = row.get("milliseconds"), row.get("of_floor")
        figures = row.get("failed") or f"{time_ms:9.3f} ms  {share:6.1%} of the floor  peak {row['peak_mib']} MiB"
        print(f"{row['kernel']:28} {row['shape']:45} {row['by']:14} {figures}  {row.get('bars', '')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

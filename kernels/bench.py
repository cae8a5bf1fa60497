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
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton

# siblings, whose folder Python has put first on the path
from batch_invariant import batch_invariant_log_softmax, batch_invariant_matmul
from block_sums import block_sums
from discounted_scan import advantages_and_returns
from linear_logprob import linear_logprob
from pack_cast import Staging
from policy_loss import Objective, policy_loss

_OURS = "triton"


@dataclass(frozen=True)
class Sizes:
    hidden: int = 4096
    vocabularies: tuple[int, ...] = (128_256, 151_936)
    tokens: int = 16_384
    checked_tokens: int = 512
    scanned: int = 2**27
    shards: tuple[tuple[int, ...], ...] = ((4096, 4096),) * 30 + ((4096,),) * 60
    batches: tuple[int, ...] = (2048, 4096, 16_384)
    largest_batch: int = 4096
    copied: int = 2**28
    square: int = 8192
    repeats: int = 10


_REHEARSAL = Sizes(32, (100, 130), 24, 8, 500, ((130, 64), (7,)), (8, 24), 24, 1000, 32, 1)


class Bench:
    """Measures on one device, and keeps the rows."""

    def __init__(self, device: str, sizes: Sizes):
        self.device, self.sizes, self.rows = device, sizes, []
        source = torch.randn(sizes.copied, device=device)
        target = torch.empty_like(source)
        self.bytes_per_s = 2 * source.nbytes / self.seconds(lambda: target.copy_(source))
        square = [torch.randn(sizes.square, sizes.square, device=device, dtype=torch.bfloat16) for _ in range(2)]
        self.operations_per_s = 2 * sizes.square**3 / self.seconds(lambda: torch.mm(*square))

    def seconds(self, run: Callable) -> float:
        """Median, after runs that compile, tune and fill the allocator's cache."""
        for _ in range(2 if self.device == "cpu" else 4):
            run()
        return statistics.median(self._once(run) for _ in range(self.sizes.repeats))

    def _once(self, run: Callable) -> float:
        if self.device == "cpu":
            start = time.perf_counter()
            run()
            return time.perf_counter() - start
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / 1000

    def peak(self, run: Callable, gradients: int = 0) -> float | None:
        """In MiB, beyond what is there already and ``gradients`` bytes."""
        if self.device == "cpu":
            return None
        run()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before - gradients) / 2**20

    def add(
        self, kernel: str, shape: str, by: str, run: Callable, floor: float, gradients: int = 0, **details: Any
    ) -> dict[str, Any]:
        """A row; a rival that cannot run here (no memory, no compiler) is one that says so. ``floor``: seconds."""
        row: dict[str, Any] = {"kernel": kernel, "shape": shape, "by": by}
        try:
            seconds = self.seconds(run)
            row |= {"milliseconds": 1000 * seconds, "of_floor": floor / seconds, "peak_mib": self.peak(run, gradients)}
        except Exception as error:  # whatever keeps a rival from running here is told in its row
            if by == _OURS:
                raise
            row["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        row |= details
        self.rows.append(row)
        if self.device != "cpu":
            torch.cuda.empty_cache()
        print(json.dumps(row), file=sys.stderr, flush=True)
        return row


def _hold(row: dict[str, Any], name: str, bar: float, at_most: bool = False) -> None:
    """A bar that the row's figure of that name is held to."""
    value = row[name]
    met = None if value is None else value <= bar if at_most else value >= bar
    row.setdefault("bars", []).append({"bar": f"{name} {'<=' if at_most else '>='} {bar}", "met": met})


def _relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def _logits_in_full(hidden_SD, weight_VD, target_S, temperature: float):
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
        mine = row(by=_OURS, run=functools.partial(step, ours), **_errors(bench, ours, vocabulary, temperature))
        _hold(mine, "of_floor", 0.7)
        _hold(mine, "peak_mib", 1024, at_most=True)
        forward = functools.partial(ours, *(leaf.detach() for leaf in leaves), target_S)
        bench.add("linear_logprob forward", shape, _OURS, forward, three_products / 3)
        in_full = functools.partial(_logits_in_full, temperature=temperature)
        row(by="eager", run=functools.partial(step, in_full))
        row(by="torch.compile", run=functools.partial(step, torch.compile(in_full)))
        liger = _liger()
        if liger is None:
            bench.rows.append({"kernel": "linear_logprob", "shape": shape, "by": "liger", "failed": "not installed"})
            continue
        theirs = row(by="liger", run=functools.partial(_liger_step, liger, leaves, target_S))
        if "milliseconds" in theirs:
            _hold(mine, "milliseconds", theirs["milliseconds"], at_most=True)


def _forward_backward(leaves, target_S, upstream_S, forward: Callable):
    return torch.autograd.grad(forward(*leaves, target_S)[0], leaves, upstream_S)


def _liger():
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    except ImportError:
        return None
    return LigerFusedLinearCrossEntropyLoss()


def _liger_step(liger, leaves, target_S):
    """Without temperature, entropy and a weight a token: it has the gradient of the mean alone."""
    return torch.autograd.grad(liger(leaves[1], leaves[0], target_S), leaves)


def _problem(bench: Bench, tokens: int, vocabulary: int):
    torch.manual_seed(0)
    like = dict(device=bench.device, dtype=torch.bfloat16)
    hidden_SD = torch.randn(tokens, bench.sizes.hidden, **like)
    weight_VD = torch.randn(vocabulary, bench.sizes.hidden, **like) * (3 / bench.sizes.hidden**0.5)
    target_S = torch.randint(vocabulary, (tokens,), device=bench.device)
    return [hidden_SD.requires_grad_(), weight_VD.requires_grad_()], target_S


def _errors(bench: Bench, ours: Callable, vocabulary: int, temperature: float) -> dict[str, float]:
    """On fewer tokens, whose logits in float64 there is memory for."""
    leaves, target_S = _problem(bench, bench.sizes.checked_tokens, vocabulary)
    exact_leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
    found, exact = ours(*leaves, target_S), _logits_in_full(*exact_leaves, target_S, temperature)
    gradients = torch.autograd.grad(found[0].sum(), leaves)
    exact_gradients = torch.autograd.grad(exact[0].sum(), exact_leaves)
    return {
        "logprob_error": float((found[0].detach().double() - exact[0].detach()).abs().max()),
        "entropy_error": float((found[1].detach().double() - exact[1]).abs().max()),
        "hidden_gradient_relative_error": _relative(gradients[0], exact_gradients[0]),
        "weight_gradient_relative_error": _relative(gradients[1], exact_gradients[1]),
    }


def bench_policy_loss(bench: Bench) -> None:
    tokens = bench.sizes.scanned // 2
    torch.manual_seed(0)
    logprob_S = torch.randn(tokens, device=bench.device).sub_(2).requires_grad_()
    old_S, reference_S = (logprob_S.detach() + 0.1 * torch.randn_like(logprob_S) for _ in range(2))
    advantage_S, weight_S, importance_S = (torch.rand(tokens, device=bench.device) for _ in range(3))
    objective = Objective(dual_clip=3.0, kl_coefficient=0.1)

    def step(implementation: str, function: Callable = policy_loss):
        loss, _ = function(
            *(logprob_S, old_S, advantage_S, weight_S, objective),
            **{"importance_S": importance_S, "reference_logprob_S": reference_S},
            implementation=implementation,
        )
        return torch.autograd.grad(loss, logprob_S)[0]

    # six read and the gradient written; then that read and scaled
    floor = 9 * logprob_S.nbytes / bench.bytes_per_s
    compiled = torch.compile(policy_loss)
    error = _relative(step("triton"), step("reference").double())
    row = functools.partial(bench.add, "policy_loss", f"{tokens}", floor=floor, gradients=logprob_S.nbytes)
    _hold(row(by=_OURS, run=lambda: step("triton"), gradient_relative_error=error), "of_floor", 0.85)
    row(by="eager", run=lambda: step("reference"))
    row(by="torch.compile", run=lambda: step("reference", compiled))


def bench_discounted_scan(bench: Bench) -> None:
    tokens = bench.sizes.scanned
    torch.manual_seed(0)
    rewards_T, values_T = (torch.randn(tokens, device=bench.device) for _ in range(2))
    last_T = torch.rand(tokens, device=bench.device) < 1e-3
    floor = (4 * rewards_T.nbytes + last_T.nbytes) / bench.bytes_per_s

    def run(implementation: str):
        return advantages_and_returns(rewards_T, values_T, last_T, 0.99, 0.95, implementation=implementation)

    error = float((run("triton")[0] - run("reference")[0]).abs().max())
    row = functools.partial(bench.add, "discounted_scan", f"{tokens}, segments of 1000", floor=floor)
    _hold(row(by=_OURS, run=lambda: run("triton"), error=error), "of_floor", 0.85)
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
            ("pack", _OURS, functools.partial(ours.pack, shards, buffer)),
            ("unpack", _OURS, functools.partial(ours.unpack, buffer, into)),
            ("pack", "eager", functools.partial(theirs.pack, shards, buffer)),
            ("unpack", "eager", functools.partial(theirs.unpack, buffer, into)),
        ):
            row = bench.add(kernel, shape, by, run, floor, **(same if by == _OURS else {}))
            if by == _OURS:
                _hold(row, "of_floor", 0.85)


def bench_block_sums(bench: Bench) -> None:
    num_bytes = 4 * sum(math.prod(shape) for shape in bench.sizes.shards) // 64 * 64
    data = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device=bench.device)
    blocks = [(start, min(start + (8 << 20), num_bytes)) for start in range(0, num_bytes, 8 << 20)]
    ours, theirs = (functools.partial(block_sums, data, blocks, implementation=by) for by in ("triton", "reference"))
    row = functools.partial(
        bench.add, "block_sums", f"{num_bytes} bytes in {len(blocks)} blocks", floor=num_bytes / bench.bytes_per_s
    )
    _hold(row(by=_OURS, run=ours, same_sums_as_reference=bool(torch.equal(ours(), theirs()))), "of_floor", 0.4)
    row(by="eager", run=theirs)


def bench_batch_invariant(bench: Bench) -> None:
    depth, largest = bench.sizes.hidden, bench.sizes.largest_batch
    torch.manual_seed(0)
    like = dict(device=bench.device, dtype=torch.bfloat16)
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
                _OURS,
                functools.partial(matmul, batch_MK),
                vendor,
            ),
            batches_with_equal_bits=same,
            equal_bits_in_another_order=permuted,
            relative_error=_relative(matmul(batch_MK)[:64], exact_MN),
        )
        _hold(row, "of_floor", 0.6)
        _hold(row, "batches_with_equal_bits", largest)
    logits_MN = torch.randn(largest, bench.sizes.vocabularies[0], device=bench.device)
    floor = 2 * logits_MN.nbytes / bench.bytes_per_s
    row = functools.partial(bench.add, "batch_invariant_log_softmax", f"{list(logits_MN.shape)}", floor=floor)
    row(by=_OURS, run=lambda: batch_invariant_log_softmax(logits_MN, implementation="triton"))
    row(by="eager", run=lambda: torch.log_softmax(logits_MN, -1))


BENCHES = {
    "linear_logprob": bench_linear_logprob,
    "policy_loss": bench_policy_loss,
    "discounted_scan": bench_discounted_scan,
    "pack_cast": bench_pack_cast,
    "block_sums": bench_block_sums,
    "batch_invariant": bench_batch_invariant,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--only", choices=BENCHES, help="one kernel")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes on a CPU; the figures mean nothing")
    arguments = parser.parse_args()
    if not arguments.rehearse and not torch.cuda.is_available():
        print("no GPU here: nothing was measured (--rehearse goes through the motions)", file=sys.stderr)
        return 2
    bench = Bench("cpu" if arguments.rehearse else "cuda", _REHEARSAL if arguments.rehearse else Sizes())
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

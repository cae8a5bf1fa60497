"""Measurement of kernels: sizes, time, peak memory, thresholds. Needs torch alone."""

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

OURS = "triton"


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
    shared_prompts: tuple[tuple[int, int, int], ...] = ((8, 4096, 1024), (64, 256, 2048))
    """Of attention: samples, tokens of each, tokens of the prompt before them."""
    heads: tuple[int, int, int] = (32, 8, 128)
    """Of queries, of keys, and their size."""
    checked_prompt: tuple[int, int, int] = (8, 100, 300)
    copied: int = 2**28
    square: int = 8192
    repeats: int = 10


REHEARSAL = Sizes(
    *(32, (100, 130), 24, 8, 500, ((130, 64), (7,)), (8, 24), 24),
    *(((3, 5, 7),), (4, 2, 8), (2, 3, 4)),
    *(1000, 32, 1),
)


class Bench:
    """Benchmark on one device, with its rows."""

    def __init__(self, device: str, sizes: Sizes):
        self.device, self.sizes = device, sizes
        self.rows: list[dict[str, Any]] = []
        source = torch.randn(sizes.copied, device=device)
        target = torch.empty_like(source)
        self.bytes_per_s = 2 * source.nbytes / self.seconds(lambda: target.copy_(source))
        square = [torch.randn(sizes.square, sizes.square, device=device, dtype=torch.bfloat16) for _ in range(2)]
        self.operations_per_s = 2 * sizes.square**3 / self.seconds(lambda: torch.mm(*square))

    def seconds(self, run: Callable) -> float:
        """Median seconds of a run, after warmup runs."""
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

    def peak(self, run: Callable, gradients: float = 0) -> float | None:
        """Peak memory of a run in MiB, above the present allocation and ``gradients`` bytes."""
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
        self, kernel: str, shape: str, by: str, run: Callable, floor: float, gradients: float = 0, **details: Any
    ) -> dict[str, Any]:
        """A row; a rival that cannot run here (no memory, no compiler) is one that says so. ``floor``: seconds."""
        row: dict[str, Any] = {"kernel": kernel, "shape": shape, "by": by}
        try:
            seconds = self.seconds(run)
            row |= {"milliseconds": 1000 * seconds, "of_floor": floor / seconds, "peak_mib": self.peak(run, gradients)}
        except Exception as error:  # whatever keeps a rival from running here is told in its row
            if by == OURS:
                raise
            row["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        row |= details
        self.rows.append(row)
        if self.device != "cpu":
            torch.cuda.empty_cache()
        print(json.dumps(row), file=sys.stderr, flush=True)
        return row


def hold(row: dict[str, Any], name: str, bar: float, at_most: bool = False) -> None:
    """Set a threshold for a figure of a row."""
    value = row[name]
    met = None if value is None else value <= bar if at_most else value >= bar
    row.setdefault("bars", []).append({"bar": f"{name} {'<=' if at_most else '>='} {bar}", "met": met})


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())

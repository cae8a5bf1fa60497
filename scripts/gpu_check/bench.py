"""Time, memory and rates on one device."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch


class Bench:
    def __init__(self, device: torch.device) -> None:
        self.device, self.on_gpu = device, device.type == "cuda"
        self._rates: dict[torch.dtype, float] = {}

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def once(self, run: Callable) -> float:
        """Seconds, all work on the device included."""
        self.wait()
        start = time.perf_counter()
        run()
        self.wait()
        return time.perf_counter() - start

    def seconds(self, run: Callable, *, repeats: int = 3, warm: int = 1) -> float:
        """Median, after runs that compile and tune."""
        for _ in range(warm):
            run()
        return statistics.median(self.once(run) for _ in range(repeats))

    def peak(self, run: Callable) -> int:
        """Most bytes at any time while it runs, with what was there before. On a CPU, the process's."""
        self.wait()
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
            run()
            self.wait()
            return torch.cuda.max_memory_allocated()
        Path("/proc/self/clear_refs").write_text("5")
        run()
        return _resident("VmHWM")

    def held(self) -> int:
        """Bytes."""
        self.wait()
        return torch.cuda.memory_allocated() if self.on_gpu else _resident("VmRSS")

    def matrix_rate(self, dtype: torch.dtype) -> float:
        """Operations a second of a large product of random numbers, by the vendor's library."""
        if dtype not in self._rates:
            side = 8192 if self.on_gpu else 128
            a, b = (torch.randn(side, side, device=self.device).to(dtype) for _ in range(2))
            self._rates[dtype] = 2 * side**3 / self.seconds(lambda: torch.mm(a, b), repeats=5, warm=3)
        return self._rates[dtype]

    def empty_cache(self) -> None:
        if self.on_gpu:
            torch.cuda.empty_cache()


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def mib(nbytes: float) -> int:
    return round(nbytes / 2**20)


def relative_error(computed: torch.Tensor, exact: torch.Tensor) -> float:
    """Norm of the difference over the norm."""
    exact = exact.detach().double()
    return float((computed.detach().to(exact.device).double() - exact).norm() / exact.norm().clamp(min=1e-30))

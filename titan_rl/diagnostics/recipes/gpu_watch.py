"""Largest memory in use on each GPU of this machine while a command runs, as nvidia-smi counts it.

It counts all processes on a GPU, whoever's they are, of the GPUs that CUDA_VISIBLE_DEVICES names. A machine without
nvidia-smi has no GPU to watch.
"""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from titan_rl.diagnostics.bench.memory_watch import called_every

_QUERY = ("nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits")
_TIMEOUT_SECONDS = 10.0


def parse_used(text: str) -> dict[str, float]:
    """MiB in use by GPU, of the lines of nvidia-smi that have both."""
    used: dict[str, float] = {}
    for line in text.splitlines():
        index, _, mib = (part.strip() for part in line.partition(","))
        if index.isdecimal() and mib.isdecimal():
            used[index] = float(mib)
    return used


def query() -> tuple[str, ...]:
    """Command that prints the memory of this process's GPUs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return (*_QUERY, f"--id={visible}") if visible else _QUERY


def _used_now() -> dict[str, float] | None:
    """MiB in use by GPU; None: nvidia-smi is not here, or does not answer."""
    try:
        done = subprocess.run(query(), capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_used(done.stdout)


@contextmanager
def gpu_watch(every: float) -> Iterator[dict[str, float]]:
    """MiB by GPU at its largest, filled while the block runs; empty without a GPU. ``every``: seconds."""
    largest = dict[str, float]()

    def look() -> None:
        used = _used_now() or {}  # that it fails once is no reason to stop
        largest.update({index: max(mib, largest.get(index, 0.0)) for index, mib in used.items()})

    look()
    with called_every(every, look) if largest else nullcontext():
        yield largest

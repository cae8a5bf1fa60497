"""Largest memory in use on each GPU of this machine while a command runs, as nvidia-smi counts it.

It counts all processes on a GPU, whoever's they are. A machine without nvidia-smi has no GPU to watch.
"""

import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_QUERY = ("nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits")
_TIMEOUT_SECONDS = 10.0


def parse_used(text: str) -> dict[str, float]:
    """MiB in use by GPU, of nvidia-smi's lines; one that is none is passed over."""
    used: dict[str, float] = {}
    for line in text.splitlines():
        index, _, mib = (part.strip() for part in line.partition(","))
        if index.isdecimal() and mib.isdecimal():
            used[index] = float(mib)
    return used


def _used_now() -> dict[str, float] | None:
    """MiB in use by GPU; None: nvidia-smi is not here, or does not answer."""
    try:
        done = subprocess.run(_QUERY, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_used(done.stdout)


@contextmanager
def gpu_watch(every: float) -> Iterator[dict[str, float]]:
    """MiB by GPU at its largest, filled while the block runs; empty without a GPU. ``every``: seconds."""
    largest, over = dict[str, float](), threading.Event()

    def watch() -> None:
        while (used := _used_now()) is not None:
            largest.update({index: max(mib, largest.get(index, 0.0)) for index, mib in used.items()})
            if over.wait(every):
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield largest
    finally:
        over.set()
        watcher.join()

"""What all processes of a command hold together at their largest, a page that several share counted once."""

import os
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

_EVERY_SECONDS = 5.0
"""By default. Looking goes through all pages of a process, and holds up whoever wants more meanwhile."""
_MARK = "TITAN_RL_MEMORY_WATCH"


@dataclass
class MemoryUse:
    mib: float = 0.0
    by_process: dict[str, float] = field(default_factory=dict)
    """MiB of each, at the moment when they were largest together; processes of one name are added up."""


@contextmanager
def called_every(every: float, look: Callable[[], None]) -> Iterator[None]:
    """Call a function in a thread while the block runs. ``every``: seconds before each call."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(every):
            look()

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


@contextmanager
def memory_watch(every: float = _EVERY_SECONDS) -> Iterator[MemoryUse]:
    """Memory of all processes started inside, and of their descendants."""
    mark, use = uuid.uuid4().hex, MemoryUse()

    def look() -> None:
        now = _by_process(mark)
        if sum(now.values()) > use.mib:
            use.mib, use.by_process = sum(now.values()), now

    os.environ[_MARK] = mark
    try:
        with called_every(every, look):
            yield use
    finally:
        del os.environ[_MARK]


def _by_process(mark: str) -> dict[str, float]:
    mib: dict[str, float] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{_MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                name = (folder / "comm").read_text().strip()
                mib[name] = mib.get(name, 0.0) + proportional_mib(folder)
        except OSError:
            continue  # it ended, or is another user's
    return mib


def proportional_mib(folder: Path) -> float:
    """Proportional memory in MiB of a process's folder in /proc. Errors: OSError."""
    for line in (folder / "smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    return 0.0

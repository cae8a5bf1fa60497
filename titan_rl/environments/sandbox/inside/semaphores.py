"""Semaphores of ``multiprocessing`` that poll, since the filter forbids shared futexes."""

import _multiprocessing  # pyright: ignore[reportMissingImports]
import math
import time

_FIRST_PAUSE, _LONGEST_PAUSE = 0.0002, 0.005


class _PollingSemaphore(_multiprocessing.SemLock):
    """Semaphore that polls in place of a kernel wait."""

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        end = math.inf if timeout is None else time.monotonic() + timeout
        pause = _FIRST_PAUSE
        while not super().acquire(False):
            remaining = end - time.monotonic()
            if not block or remaining <= 0:
                return False
            time.sleep(min(pause, remaining))
            pause = min(2 * pause, _LONGEST_PAUSE)
        return True

    def __enter__(self) -> bool:
        return self.acquire()


def install() -> None:
    """Replace the semaphore class; call it before any import of ``multiprocessing.synchronize``."""
    _multiprocessing.SemLock = _PollingSemaphore

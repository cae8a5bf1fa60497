"""Semaphores of ``multiprocessing`` that ask again and again: the filter lets processes wait on no common futex."""

import _multiprocessing  # pyright: ignore[reportMissingImports]
import math
import time

_FIRST_PAUSE, _LONGEST_PAUSE = 0.0002, 0.005


class _AskedSemaphore(_multiprocessing.SemLock):
    """What is inherited but for a wait, which the kernel would have done."""

    def acquire(self, block: bool = True, timeout: float | None = None) -> bool:
        end = math.inf if timeout is None else time.monotonic() + timeout
        pause = _FIRST_PAUSE
        while not super().acquire(False):
            left = end - time.monotonic()
            if not block or left <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(2 * pause, _LONGEST_PAUSE)
        return True

    def __enter__(self) -> bool:
        return self.acquire()


def install() -> None:
    """For all that is forked from here on, before anything has imported ``multiprocessing.synchronize``."""
    _multiprocessing.SemLock = _AskedSemaphore

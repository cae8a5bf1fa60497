"""Faults on order, for a run under fire: a process leaves, or raises, as soon as it is told to.

``titan-rl chaos`` puts an order into a folder under the process's id. Without that folder nothing here does anything.
"""

import os
import threading
import time
from pathlib import Path

CHAOS_FOLDER = "TITAN_RL_CHAOS"
"""Environment variable: where the orders of a run under fire are."""
_POLL_SECONDS = 0.05
_told = threading.Event()


class ChaosError(RuntimeError):
    """An exception that was ordered."""


def _order() -> Path:
    return Path(os.environ[CHAOS_FOLDER]) / str(os.getpid())


def obey_orders() -> None:
    """Watch for orders from now on: ``exit`` leaves as cleanly as it can look, ``raise`` fails the next work begun."""
    if CHAOS_FOLDER not in os.environ:
        return

    def watch() -> None:
        while True:
            time.sleep(_POLL_SECONDS)
            if not _order().exists() or _told.is_set():
                continue
            if _order().read_text() == "exit":
                os._exit(0)
            _told.set()

    threading.Thread(target=watch, name="orders", daemon=True).start()


def fail_if_told() -> None:
    """Where work is done. Errors: ChaosError if that was ordered; the order then counts as obeyed."""
    if _told.is_set():
        _order().rename(_order().with_suffix(".obeyed"))
        _told.clear()
        raise ChaosError("an exception that was ordered")

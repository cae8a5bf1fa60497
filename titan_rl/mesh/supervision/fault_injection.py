"""Faults on order, for ``titan-rl chaos``: a process exits, or raises, as soon as it is told to.

The experiment writes an order into a folder, in a file named by the process's id. Without that folder nothing here does
anything.
"""

import os
import threading
import time
from pathlib import Path

CHAOS_FOLDER = "TITAN_RL_CHAOS"
"""Environment variable: the folder of orders."""
_POLL_SECONDS = 0.05
_told = threading.Event()


class ChaosError(RuntimeError):
    """An exception that was ordered."""


def _order() -> Path:
    return Path(os.environ[CHAOS_FOLDER]) / str(os.getpid())


def obey_orders() -> None:
    """Watch for orders from now on: ``exit`` ends the process with code 0, ``raise`` fails the next work begun."""
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
    """Called where work begins. Errors: ChaosError if that was ordered; the order is then renamed to ``.obeyed``."""
    if _told.is_set():
        _order().rename(_order().with_suffix(".obeyed"))
        _told.clear()
        raise ChaosError("an exception that was ordered")

"""Faults on order, for ``titan-rl chaos``: a process exits, or raises, as soon as it is told to.

The experiment writes an order into a folder, in a file named by the process's id. Without that folder nothing here does
anything.
"""

import os
import signal
import threading
import time
from pathlib import Path

CHAOS_FOLDER = "TITAN_RL_CHAOS"
"""Environment variable: the folder of orders."""
_POLL_SECONDS = 0.05
_told: list[tuple[str, str]] = []
"""At most one: what is to be done, and where."""
_WORK = "work"


class ChaosError(RuntimeError):
    """Injected exception."""


def _order() -> Path:
    return Path(os.environ[CHAOS_FOLDER]) / str(os.getpid())


def watch_for_faults() -> None:
    """Watch for ordered faults: ``exit`` ends the process with code 0, ``raise`` fails the next work begun;
    ``raise at sleep`` fails there, and ``kill at sleep`` is a SIGKILL there."""
    if CHAOS_FOLDER not in os.environ:
        return

    def watch() -> None:
        while True:
            time.sleep(_POLL_SECONDS)
            if not _order().exists() or _told:
                continue
            what, _, where = _order().read_text().partition(" at ")
            if what == "exit":
                os._exit(0)
            _told.append((what, where or _WORK))

    threading.Thread(target=watch, name="orders", daemon=True).start()


def inject_fault(where: str = _WORK) -> None:
    """Inject a pending fault where work begins, weights change or devices change hands.

    Errors: ChaosError if that was ordered; the order is then renamed to ``.obeyed``."""
    if _told and _told[0][1] == where:
        _order().rename(_order().with_suffix(".obeyed"))
        [(what, _)] = _told
        _told.clear()
        if what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ChaosError("an exception that was ordered")

"""Injects one fault into one process, with a witness that it really happened."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from titan_rl.data.storage.files import replace_text
from titan_rl.diagnostics.chaos.schedule import Fault
from titan_rl.diagnostics.chaos.targets import GONE, Target, process_state

_POLL_SECONDS = 0.0005
_SIGNAL_SECONDS = 5.0
_ORDER_SECONDS = 20.0
"""How long a process may take to carry out an order."""
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


@dataclass(frozen=True)
class Witness:
    """A process's state before and after, as the kernel reports it. Times are seconds since 1970."""

    before: str
    after: str
    """``obeyed`` if the process itself says that it raised the ordered exception."""
    ordered: float
    happened: float


@dataclass
class Injection:
    """Injected fault."""

    fault: Fault
    target: Target
    way: str
    """Not the scheduled one if the target did not carry out that order."""
    witness: Witness
    state: str
    """What the target did at that moment."""
    step: int
    """Steps done by then; -1 while a run starts."""
    orphans_gone_after: float | None = None
    """For a killed controller: seconds until none of its processes was left."""
    seen_repaired: float | None = None
    """When the experiment itself saw the repair, for what the run's events do not say."""

    @property
    def kind(self) -> str:
        return self.fault.kind

    @property
    def is_witnessed(self) -> bool:
        expected = {"stop": "T", "raise": "obeyed"}.get(self.way, GONE)
        return self.witness.before not in (GONE, "T") and self.witness.after == expected


def inject(target: Target, way: str, orders: Path, meanwhile: Callable[[], None]) -> Witness:
    """Do it and watch until it has happened. ``meanwhile`` is called while an order is pending, and may raise."""
    before, ordered = process_state(target.pid), time.time()
    if way in _SIGNALS:
        with suppress(ProcessLookupError):
            os.kill(target.pid, _SIGNALS[way])
        after = _await(lambda: _end(target.pid), _SIGNAL_SECONDS, lambda: None)
        return Witness(before, after or process_state(target.pid), ordered, ordered)
    order = orders / str(target.pid)
    replace_text(order, way)
    after = _await(lambda: _effect(target.pid, order.with_suffix(".obeyed")), _ORDER_SECONDS, meanwhile)
    return Witness(before, after or process_state(target.pid), ordered, time.time())


def _end(pid: int) -> str:
    """``gone`` or ``T``; empty while it runs."""
    state = process_state(pid)
    return state if state in (GONE, "T") else ""


def _effect(pid: int, obeyed: Path) -> str:
    end = _end(pid)
    return "obeyed" if obeyed.exists() else end  # read in this order, since it may obey and then die


def _await(what: Callable[[], str], seconds: float, meanwhile: Callable[[], None]) -> str:
    """The first result that is not empty; empty after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not (result := what()) and time.monotonic() < deadline:
        meanwhile()
        time.sleep(_POLL_SECONDS)
    return result

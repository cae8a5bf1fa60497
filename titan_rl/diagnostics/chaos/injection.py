"""Hitting one process, and the witness that it was really hit."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from titan_rl.diagnostics.chaos.schedule import Fault
from titan_rl.diagnostics.chaos.targets import GONE, Victim, process_state

_POLL_SECONDS = 0.0005
_SIGNAL_SECONDS = 5.0
_ORDER_SECONDS = 20.0
"""How long a process may take to come by an order."""
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


@dataclass(frozen=True)
class Witness:
    """A process's state before and after, as the kernel tells it. Times are seconds since 1970."""

    before: str
    after: str
    """``obeyed`` if the process itself says that it raised what it was told to."""
    ordered: float
    happened: float


@dataclass
class Struck:
    """What really happened."""

    fault: Fault
    victim: Victim
    way: str
    """Another one than was drawn if the victim did not come by that order."""
    witness: Witness
    state: str
    """What the victim did at that moment."""
    step: int
    """Steps done by then; -1 while a run starts."""
    orphans_gone_after: float | None = None
    """A killed controller's: seconds until none of its processes was left."""
    seen_whole: float | None = None
    """When the harness itself saw that all was whole: for what the run's events do not tell."""

    @property
    def kind(self) -> str:
        return self.fault.kind

    @property
    def is_witnessed(self) -> bool:
        wanted = {"stop": "T", "raise": "obeyed"}.get(self.way, GONE)
        return self.witness.before not in (GONE, "T") and self.witness.after == wanted


def strike(victim: Victim, way: str, orders: Path, meanwhile: Callable[[], None]) -> Witness:
    """Do it, and look until it is done. ``meanwhile`` is called while an order is on its way, and may raise."""
    before, ordered = process_state(victim.pid), time.time()
    if way in _SIGNALS:
        with suppress(ProcessLookupError):
            os.kill(victim.pid, _SIGNALS[way])
        after = _await(lambda: _end(victim.pid), _SIGNAL_SECONDS, lambda: None)
        return Witness(before, after or process_state(victim.pid), ordered, ordered)
    order = orders / str(victim.pid)
    beside = orders / f"new-{victim.pid}"
    beside.write_text(way)
    beside.rename(order)  # a reader never meets half of it
    after = _await(lambda: _outcome(victim.pid, order.with_suffix(".obeyed")), _ORDER_SECONDS, meanwhile)
    return Witness(before, after or process_state(victim.pid), ordered, time.time())


def _end(pid: int) -> str:
    """``gone`` or ``T``; nothing while it goes on."""
    state = process_state(pid)
    return state if state in (GONE, "T") else ""


def _outcome(pid: int, obeyed: Path) -> str:
    end = _end(pid)
    return "obeyed" if obeyed.exists() else end  # in this order: it may obey and then die


def _await(what: Callable[[], str], seconds: float, meanwhile: Callable[[], None]) -> str:
    """What it gives at last, or nothing."""
    deadline = time.monotonic() + seconds
    while not (outcome := what()) and time.monotonic() < deadline:
        meanwhile()
        time.sleep(_POLL_SECONDS)
    return outcome

"""Who hears of the death of an actor process, and in which order: stage by stage, whoever registered first.

    stage    owner      what it does                                                  file
    -------  ---------  ------------------------------------------------------------  ----------------------------
    forget   host       its host counts one process less                              supervision/actor_process.py
    blame    record     why it died is settled, and recorded (event ``died``)         supervision/actor_process.py
    replace  standby    another one is made, if it was still waiting                  supervision/standby.py
             spare      another engine is loaded, if it was still waiting             control/generators.py
             generator  its replica gets no group any more, and another is started    control/generators.py
             verifier   it gets no group any more, and another is started             members/verifiers.py
    retry    peers      collectives with it are aborted, so that its peers' calls end  supervision/peers.py
             snapshots  what it kept of the trainer's state is kept elsewhere         control/trainer_snapshots.py
             (waiters)  calls to it end: groups are sampled elsewhere (dispatcher.py)  supervision/calls.py

Nobody registers for a trainer rank's replacement: all ranks must agree to it, so it is repaired by whoever asks the
trainer next, or watches it (control/trainer_repair.py).
"""

from collections.abc import Callable
from enum import Enum
from typing import Generic, Literal, TypeVar

P = TypeVar("P")
Owner = Literal["host", "record", "standby", "spare", "generator", "verifier", "peers", "snapshots"]


class Stage(Enum):
    """In their order. Within one, owners hear in the order of this table."""

    FORGET = ("host",)
    BLAME = ("record",)
    REPLACE = ("standby", "spare", "generator", "verifier")
    RETRY = ("peers", "snapshots")


class DeathHandlers(Generic[P]):
    """Death handlers of one process, at most one an owner."""

    def __init__(self) -> None:
        self._handlers: dict[str, Callable[[P], object]] = {}

    def register(self, owner: Owner, handler: Callable[[P], object]) -> None:
        """Register an owner's handler in its stage, in place of the one before."""
        self._handlers[owner] = handler

    def run(self, process: P) -> None:
        """Every handler, stage by stage."""
        for stage in Stage:
            for owner in stage.value:
                if (handler := self._handlers.get(owner)) is not None:
                    handler(process)

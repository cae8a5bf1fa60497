"""One engine of the generator mesh: its ranks, and the work that it has."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from titan_rl.mesh.resources.devices import Seat
from titan_rl.mesh.supervision.actor_process import ActorProcess
from titan_rl.mesh.supervision.calls import Deadline
from titan_rl.mesh.supervision.remote_call import reference_to


@dataclass(eq=False)
class HeldGroup:
    """Group that a replica works on."""

    deadline: Deadline
    """Of what it has to answer; begins anew while the replica sleeps (helpers.py)."""
    samples: int
    moved: asyncio.Future[None] | None
    """Done once it is to go on at another replica; None: it can't."""
    began: float
    seconds: float = 0.0
    """That a helper had worked on it when it last fell asleep."""


@dataclass(eq=False)
class Replica:
    """Replica of vLLM with all its ranks; ``ranks[0]`` is the leader."""

    number: int
    """-1 for a spare."""
    ranks: list[ActorProcess] = field(default_factory=list)
    seats: tuple[Seat, ...] = ()
    """Of its ranks; none on a CPU."""
    groups: list[HeldGroup] = field(default_factory=list)
    """That it is working on, in the order in which they came."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the last group ends."""

    @property
    def leader(self) -> Any:
        """Actor of the leading rank."""
        return self.ranks[0].actor

    @cached_property
    def reference(self) -> bytes:
        """Of the actor to ask, for another actor: pickled anew, it takes longer than a prompt."""
        return reference_to(self.leader)

    @property
    def is_dead(self) -> bool:
        return any(rank.is_dead for rank in self.ranks)

    @contextmanager
    def at_work(self, deadline: Deadline, samples: int, moved: asyncio.Future[None] | None = None) -> Iterator[None]:
        """A context in which a group of so many samples is in flight here; ``moved`` as in ``HeldGroup``."""
        held = HeldGroup(deadline, samples, moved, time.monotonic())
        self.groups.append(held)
        self.idle.clear()
        try:
            yield
        finally:
            self.groups.remove(held)
            if not self.groups:
                self.idle.set()

    def kill(self) -> None:
        for rank in self.ranks:
            rank.kill()

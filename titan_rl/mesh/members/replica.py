"""One engine of the generator mesh: its ranks, and the work that it has."""

import asyncio
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
class Replica:
    """Replica of vLLM with all its ranks; ``ranks[0]`` is the leader."""

    number: int
    """-1 for a spare."""
    ranks: list[ActorProcess] = field(default_factory=list)
    seats: tuple[Seat, ...] = ()
    """Of its ranks; none on a CPU."""
    num_groups: int = 0
    """That it is working on."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the last group ends."""
    deadlines: list[Deadline] = field(default_factory=list)
    """Of what it has to answer; they begin anew while it sleeps (helpers.py)."""

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
    def at_work(self, deadline: Deadline) -> Iterator[None]:
        """A context in which a group is in flight here, until this deadline."""
        self.num_groups += 1
        self.idle.clear()
        self.deadlines.append(deadline)
        try:
            yield
        finally:
            self.deadlines.remove(deadline)
            self.num_groups -= 1
            if not self.num_groups:
                self.idle.set()

    def kill(self) -> None:
        for rank in self.ranks:
            rank.kill()

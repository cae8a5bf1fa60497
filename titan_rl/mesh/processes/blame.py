"""Outcome of one call to several processes, and which of them caused its failure.

Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Ending(Enum):
    """Outcome kind of a call at one process."""

    ANSWERED = "answered"
    RAISED = "raised"
    DIED = "died"
    """The process is gone, whatever it answered before."""
    HUNG = "hung"
    """There is no answer yet, and the deadline has passed."""


@dataclass(frozen=True)
class Outcome:
    """Outcome of a call at one process."""

    ending: Ending
    value: Any = None
    """The answer, or the exception that was raised."""
    order: int = 0
    """Of one that raised: its place among those that raised, the first being 0."""
    is_stopped: bool = False
    """Of one that hung: whether its process is stopped by a signal."""


def to_blame(outcomes: Sequence[Outcome | None], *, one_fails_all: bool) -> list[int]:
    """Indices in ``outcomes`` of the processes at fault; None stands for a pending call.

    A death explains what the others raise, so while somebody is dead or hung nobody is blamed for raising. Where some
    hang and one of them is stopped, the others only wait for it. ``one_fails_all``: the first that raised is at fault,
    since nobody knows what state it is in, and its peers wait for it; otherwise raising is an answer like another.
    """
    outcome_of = {place: outcome for place, outcome in enumerate(outcomes) if outcome is not None}
    places = {ending: [place for place, outcome in outcome_of.items() if outcome.ending is ending] for ending in Ending}
    stopped = [place for place in places[Ending.HUNG] if outcome_of[place].is_stopped]
    if at_fault := places[Ending.DIED] + (stopped or places[Ending.HUNG]):
        return sorted(at_fault)
    return sorted(places[Ending.RAISED], key=lambda place: outcome_of[place].order)[: int(one_fails_all)]

"""Which of a run's events belong to which fault. Pure."""

import re
from dataclasses import dataclass
from typing import Any

from titan_rl.diagnostics.chaos.injection import Injection
from titan_rl.diagnostics.chaos.schedule import BELOW_VERIFIERS, OF_TRAINER


@dataclass(frozen=True)
class Outcome:
    """Seconds after the fault, as far as they are known."""

    noticed_after: float | None = None
    """Until the run noticed it; for a controller, until none of its processes was left."""
    repaired_after: float | None = None
    """Until all processes worked again."""
    steps_redone: int | None = None
    why: str = ""
    """The run's word for it: died, hung, raised ..."""
    repaired_by: str = ""
    """``itself``, or ``resume`` if the controller was killed before it had repaired this."""


def outcome_of(one: Injection, events: list[dict[str, Any]]) -> Outcome:
    """Outcome of a fault.

    ``events`` in the order in which they were written. Faults may overlap: names tell their events apart.
    """
    later = [event for event in events if event["time"] >= one.witness.ordered]
    if one.kind == "controller":
        return _of_controller(one, later)
    if one.kind in BELOW_VERIFIERS:
        return Outcome(None, _since(one, one.seen_repaired), repaired_by="itself" if one.seen_repaired else "")
    died = next((event for event in later if event["kind"] == "died" and event["pid"] == one.target.pid), None)
    if one.kind == "host":
        return _of_host(one, died, later)
    # events between the fault and its notice belong to an earlier death of a process of the same name
    start = died["time"] if died else one.witness.happened
    repair = next((e for e in later if e["time"] >= start and _is_repair(e, one.kind, one.target.name)), None)
    is_resume = repair is not None and repair["kind"] == "resumed"
    return Outcome(
        noticed_after=_since(one, died["time"] if died else None),
        repaired_after=_since(one, repair["time"] if repair else None),
        steps_redone=None if repair is None else repair.get("redone" if is_resume else "steps_redone"),
        why=died["why"] if died else "",
        repaired_by="" if repair is None else "resume" if is_resume else "itself",
    )


def _of_host(one: Injection, died: dict[str, Any] | None, later: list[dict[str, Any]]) -> Outcome:
    """Repaired when every process that was lost with it has been replaced."""
    if died is None:
        return Outcome()
    after = later[later.index(died) + 1 :]
    again = next((i for i, e in enumerate(after) if e["kind"] == "died" and e["name"] == one.target.name), len(after))
    lost = [event for event in after[:again] if event["kind"] == "died" and event["why"] == f"lost {one.target.name}"]
    lost = [event for event in lost if _kind(event) in (*OF_TRAINER, "generator", "verifier") and _has_number(event)]
    repairs = [
        next((e for e in after if e["time"] >= loss["time"] and _is_repair(e, _kind(loss), loss["name"])), None)
        for loss in lost
    ]
    done = [event for event in repairs if event is not None]
    is_complete = len(done) == len(repairs)
    return Outcome(
        noticed_after=_since(one, died["time"]),
        repaired_after=_since(one, max([died["time"], *(e["time"] for e in done)])) if is_complete else None,
        steps_redone=max((e.get("steps_redone", 0) for e in done), default=0) if is_complete else None,
        why=died["why"],
        repaired_by="" if not is_complete else "resume" if any(e["kind"] == "resumed" for e in done) else "itself",
    )


def _kind(died: dict[str, Any]) -> str:
    return died["name"].split()[0]


def _has_number(died: dict[str, Any]) -> bool:
    """A spare has none, and nothing waits for it."""
    return died["name"].split()[-1].isdigit()


def _of_controller(one: Injection, later: list[dict[str, Any]]) -> Outcome:
    resumed = next((event for event in later if event["kind"] == "resumed"), None)
    return Outcome(
        noticed_after=one.orphans_gone_after,
        repaired_after=_since(one, resumed["time"] if resumed else one.seen_repaired),
        steps_redone=resumed["redone"] if resumed else None,
        why="killed",
        repaired_by="resume" if resumed or one.seen_repaired else "",
    )


def _is_repair(event: dict[str, Any], kind: str, name: str) -> bool:
    """Whether this event says that ``name``, a process of that kind, has been replaced and works again."""
    if event["kind"] == "resumed":
        return True
    if kind in ("host", "reference", "teacher"):
        return event["kind"] == "started" and event["name"] == name
    if kind in OF_TRAINER:
        return event["kind"] == "trainer_repaired" and name in re.split(r",\s*", event["who"])
    if (number := name.split()[1]) == "spare":
        return event["kind"] == "spare_waits"
    return event["kind"] == f"{kind}_serves" and event["number"] == int(number)


def is_repaired(kind: str, name: str, events: list[dict[str, Any]]) -> bool:
    """False while that process is being replaced or started. ``events``: those since the controller's start."""
    for event in reversed(events):
        if _is_repair(event, kind, name):
            return True
        if event["kind"] == "died" and event["name"] == name:
            return False
    return True


def _since(one: Injection, moment: float | None) -> float | None:
    """Seconds, at least 0: the witness sees an order obeyed a little later than the run may notice it."""
    return None if moment is None else max(moment - one.witness.happened, 0.0)

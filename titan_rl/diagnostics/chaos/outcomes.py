"""Which of a run's events belong to which fault. Pure."""

import re
from dataclasses import dataclass

from titan_rl.diagnostics.chaos.injection import Struck


@dataclass(frozen=True)
class Outcome:
    """Seconds after the fault, as far as they are known."""

    noticed_after: float | None = None
    """Until the run knew; for a controller, until none of its processes was left."""
    whole_after: float | None = None
    """Until everybody worked again."""
    steps_redone: int | None = None
    why: str = ""
    """As the run calls it: died, hung, raised ..."""
    mended_by: str = ""
    """``itself``, or ``resume`` if the controller was killed before it had mended this."""


def match(one: Struck, events: list[dict]) -> Outcome:
    """``events`` in the order in which they were written. Faults may overlap: events are told apart by name."""
    later = [event for event in events if event["time"] >= one.witness.ordered]
    if one.kind == "controller":
        return _of_controller(one, later)
    if one.kind == "scorer":
        return Outcome(None, _since(one, one.seen_whole), mended_by="itself" if one.seen_whole else "")
    died = next((event for event in later if event["kind"] == "died" and event["pid"] == one.victim.pid), None)
    if one.kind == "host":
        return _of_host(one, died, later)
    # what was written between the fault and its notice belongs to an earlier death of the same name
    start = died["time"] if died else one.witness.happened
    whole = next((e for e in later if e["time"] >= start and _makes_whole(e, one.kind, one.victim.name)), None)
    is_resume = whole is not None and whole["kind"] == "resumed"
    return Outcome(
        noticed_after=_since(one, died and died["time"]),
        whole_after=_since(one, whole and whole["time"]),
        steps_redone=None if whole is None else whole.get("redone" if is_resume else "steps_redone"),
        why=died["why"] if died else "",
        mended_by="" if whole is None else "resume" if is_resume else "itself",
    )


def _of_host(one: Struck, died: dict | None, later: list[dict]) -> Outcome:
    """It is whole when everybody that it took along has been replaced."""
    if died is None:
        return Outcome()
    after = later[later.index(died) + 1 :]
    again = next((i for i, e in enumerate(after) if e["kind"] == "died" and e["name"] == one.victim.name), len(after))
    lost = [event for event in after[:again] if event["kind"] == "died" and event["why"] == f"lost {one.victim.name}"]
    lost = [event for event in lost if _kind(event) in ("trainer", "generator", "verifier") and _has_number(event)]
    wholes = [
        next((e for e in after if e["time"] >= gone["time"] and _makes_whole(e, _kind(gone), gone["name"])), None)
        for gone in lost
    ]
    is_whole = None not in wholes
    return Outcome(
        noticed_after=_since(one, died["time"]),
        whole_after=_since(one, max([died["time"], *(whole["time"] for whole in wholes)])) if is_whole else None,
        steps_redone=max((whole.get("steps_redone", 0) for whole in wholes), default=0) if is_whole else None,
        why=died["why"],
        mended_by="" if not is_whole else "resume" if any(w["kind"] == "resumed" for w in wholes) else "itself",
    )


def _kind(died: dict) -> str:
    return died["name"].split()[0]


def _has_number(died: dict) -> bool:
    """A spare has none, and nobody waits for it."""
    return died["name"].split()[-1].isdigit()


def _of_controller(one: Struck, later: list[dict]) -> Outcome:
    resumed = next((event for event in later if event["kind"] == "resumed"), None)
    return Outcome(
        noticed_after=one.orphans_gone_after,
        whole_after=_since(one, resumed["time"] if resumed else one.seen_whole),
        steps_redone=resumed["redone"] if resumed else None,
        why="killed",
        mended_by="resume" if resumed or one.seen_whole else "",
    )


def _makes_whole(event: dict, kind: str, name: str) -> bool:
    """Whether it tells that all of that kind works again, as far as ``name`` was concerned."""
    if event["kind"] == "resumed":
        return True
    if kind == "host":
        return event["kind"] == "started" and event["name"] == name
    if kind == "trainer":
        return event["kind"] == "trainer_whole" and name in re.split(r",\s*", event["who"])
    return event["kind"] == f"{kind}_serves" and event["number"] == int(name.split()[1])


def is_mended(kind: str, name: str, events: list[dict]) -> bool:
    """Whether that cell is not still being replaced or brought up. ``events`` since the controller's start."""
    for event in reversed(events):
        if _makes_whole(event, kind, name):
            return True
        if event["kind"] == "died" and event["name"] == name:
            return False
    return True


def _since(one: Struck, moment: float | None) -> float | None:
    """An order is seen to be obeyed a little later than it is: so never less than nothing."""
    return None if moment is None else max(moment - one.witness.happened, 0.0)

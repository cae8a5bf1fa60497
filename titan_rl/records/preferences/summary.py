"""Summary of a collection: how far it is, what was decided, and how much labellers agree. Pure.

Alpha is of the items that are not planted: of planted ones all who look agree. A labeller's agreement with planted
items is the share of those judged whose known choice was taken; a tie is none.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from titan_rl.records.preferences.collection import Record
from titan_rl.records.preferences.items import CHOICES
from titan_rl.records.preferences.journal import Latest, latest
from titan_rl.records.preferences.krippendorff import nominal_alpha
from titan_rl.records.preferences.rows import decision, judged_items
from titan_rl.records.statistics import Proportion

_NAMES = {
    "a": "preferred",
    "b": "preferred",
    "tie": "ties",
    "both_bad": "both bad",
    "good": "good",
    "bad": "bad",
    "unsure": "unsure",
    None: "no majority",
}
"""Of majorities, in a table."""


@dataclass(frozen=True)
class Labeller:
    """One labeller's judgements."""

    name: str
    judgements: int
    planted: Proportion | None
    """Planted items that were judged as is known; None: none was judged."""
    seconds: float
    """Median of a judgement."""


@dataclass(frozen=True)
class Summary:
    """Numbers of a collection."""

    mode: str
    items: int
    """Without planted ones."""
    planted: int
    wanted: int
    judgements: int
    """That count, of items that are not planted."""
    complete: int
    """Items with as many judgements as are wanted."""
    decided: dict[str, int]
    """Majorities of the items that were judged, by name."""
    alpha: float | None
    """Krippendorff's, nominal; None where it is not defined."""
    alpha_items: int
    """Items with two judgements or more."""
    first_chosen: Proportion | None
    """Of pairs with a preference, how often it was the answer shown first; None for ratings."""
    labellers: list[Labeller]

    def as_dict(self) -> dict[str, Any]:
        first = None if self.first_chosen is None else self.first_chosen.as_dict()
        labellers = [
            {"name": each.name, "judgements": each.judgements, "median_seconds": each.seconds}
            | {"planted": None if each.planted is None else each.planted.as_dict()}
            for each in self.labellers
        ]
        return vars(self) | {"first_chosen": first, "labellers": labellers}


def summary_of(record: Record) -> Summary:
    """Summary of a collection as it is now."""
    counted = latest(record.judgements)
    judged = judged_items(counted)
    ordinary = [item for item in record.items if not item.planted]
    choices = [[each.choice for each in judged.get(item.id, ())] for item in ordinary]
    wanted = record.settings.wanted
    return Summary(
        mode=record.settings.mode,
        items=len(ordinary),
        planted=len(record.items) - len(ordinary),
        wanted=wanted,
        judgements=sum(map(len, choices)),
        complete=sum(len(each) >= wanted for each in choices),
        decided=_decided(record, judged),
        alpha=nominal_alpha(choices),
        alpha_items=sum(len(each) > 1 for each in choices),
        first_chosen=_first_chosen(counted),
        labellers=_labellers(record, counted),
    )


def _decided(record: Record, judged: dict) -> dict[str, int]:
    names = dict.fromkeys(_NAMES[choice] for choice in (*CHOICES[record.settings.mode], None))
    ids = [item.id for item in record.items if not item.planted and item.id in judged]
    counts = Counter(_NAMES[decision(judged[name])] for name in ids)
    return {name: counts[name] for name in names}


def _first_chosen(counted: Latest) -> Proportion | None:
    """Share of the first place among preferences: half, but for chance, where order tells nothing."""
    preferred = [each for each in counted.values() if each.choice in ("a", "b") and len(each.shown) == 2]
    first = sum("ab"[each.shown[0]] == each.choice for each in preferred)
    return Proportion(first, len(preferred)) if preferred else None


def _labellers(record: Record, counted: Latest) -> list[Labeller]:
    planted = {item.id: item.planted for item in record.items if item.planted}
    labellers = []
    for name in sorted({who for _, who in counted}):
        own = [judgement for (_, who), judgement in counted.items() if who == name]
        right = [planted[each.item] == each.choice for each in own if each.item in planted]
        agreement = Proportion(sum(right), len(right)) if right else None
        labellers.append(Labeller(name, len(own), agreement, sorted(each.seconds for each in own)[len(own) // 2]))
    return labellers


# the table


def table(summary: Summary) -> str:
    """Lines for people, in columns."""
    return "\n\n".join(columns(rows) for rows in (list(_facts(summary)), list(_of_labellers(summary))) if len(rows) > 1)


def _facts(summary: Summary) -> Iterator[tuple[str, ...]]:
    what = "pairs" if summary.mode == "pairs" else "answers"
    yield what, str(summary.items), f"and {summary.planted} planted"
    yield "judgements", str(summary.judgements), f"{summary.wanted} wanted of each"
    yield "complete", str(summary.complete), ""
    yield from ((name, str(count), "by majority") for name, count in list(summary.decided.items())[:-1])
    yield "no majority", str(summary.decided["no majority"]), "no choice of more than half"
    alpha = "undefined" if summary.alpha is None else f"{summary.alpha:.3f}"
    yield "alpha", alpha, f"Krippendorff's, nominal, of {summary.alpha_items} with two judgements or more"
    if summary.first_chosen is not None:
        low, high = summary.first_chosen.interval
        yield "first preferred", f"{summary.first_chosen.value:.1%}", f"of the two shown; 95 % {low:.1%} to {high:.1%}"


def _of_labellers(summary: Summary) -> Iterator[tuple[str, ...]]:
    yield "labeller", "judgements", "median", "planted", "95 % interval"
    for each in summary.labellers:
        yield each.name, str(each.judgements), f"{each.seconds:.1f} s", *_planted(each.planted)


def _planted(agreement: Proportion | None) -> tuple[str, str]:
    if agreement is None:
        return "-", ""
    low, high = agreement.interval
    return f"{agreement.correct} of {agreement.count}", f"{low:.1%} to {high:.1%}"


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Table of rows with as many cells each."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )

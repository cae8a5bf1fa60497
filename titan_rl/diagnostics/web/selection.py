"""Which rollouts, in which order: as SQL, with every value as a parameter and every name from a list of ours. Pure."""

from dataclasses import dataclass, field
from typing import Any

COLUMNS = {
    "step": "step",
    "prompt_id": "prompt_id",
    "sample": "sample",
    "text": "left(text, 160)",
    "reward": "reward",
    "advantage": "advantage",
    "length": "length",
    "disagreement": "disagreement",
    "staleness": "staleness",
    "status": "status",
    "why": "coalesce(why, '')",
    "task": "task",
}
"""Of a row that is shown, each with what it is in the table."""
RANGES = ("step", "reward", "length", "disagreement", "staleness")
"""Of which a least and a most can be asked for."""


@dataclass(frozen=True)
class Selection:
    text: str = ""
    """In the answer, the prompt or the prompt's id; capitals do not matter."""
    ranges: dict[str, tuple[float | None, float | None]] = field(default_factory=dict)
    status: str = ""
    task: str = ""
    outcome: str = ""
    """``trained``, ``discarded``, or a reason; empty: any."""
    sort: str = "step"
    descending: bool = True

    def where(self) -> tuple[str, list[Any]]:
        """A condition, and its values. Errors: KeyError for a name that is not a column."""
        terms: list[tuple[str, list[Any]]] = []
        if self.text:
            found = " or ".join(f"contains(lower({name}), lower(?))" for name in ("text", "question", "prompt_id"))
            terms.append((f"({found})", [self.text] * 3))
        for name, (least, most) in self.ranges.items():
            if name not in RANGES:
                raise KeyError(name)
            terms += [(f"{name} >= ?", [least])] if least is not None else []
            terms += [(f"{name} <= ?", [most])] if most is not None else []
        terms += [(f"{name} = ?", [value]) for name, value in (("status", self.status), ("task", self.task)) if value]
        if self.outcome in ("trained", "discarded"):
            terms.append((f"why is {'' if self.outcome == 'trained' else 'not '}null", []))
        elif self.outcome:
            terms.append(("why = ?", [self.outcome]))
        return " and ".join(term for term, _ in terms) or "true", [value for _, values in terms for value in values]

    def order(self) -> str:
        """Errors: KeyError."""
        first = COLUMNS[self.sort]
        way = "desc" if self.descending else "asc"
        return f"{first} {way} nulls last, step desc, prompt_id, sample"

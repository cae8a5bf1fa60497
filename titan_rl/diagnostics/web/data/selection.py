"""Selection and order of rollouts as SQL with parameters and a list of allowed names.

Pure.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

COLUMNS = {
    "step": "step",
    "prompt_id": "prompt_id",
    "sample": "sample",
    "question": "left(question, 160)",
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
RIGHT = 1.0 - 1e-9
"""Reward from which on an answer is right, as ``data.types.correct`` has it."""
GROUP_COLUMNS = {
    "step": "step",
    "prompt_id": "prompt_id",
    "question": "left(any_value(question), 160)",
    "pass_rate": f"avg(case when true_reward >= {RIGHT} then 1.0 else 0.0 end)",
    "reward": "avg(reward)",
    "spread": "max(reward) - min(reward)",
    "length": "avg(length)",
    "count": "count(*)",
    "task": "any_value(task)",
}
"""Of a prompt's answers in a step."""
_MOST_DIGITS = 9
"""Of a number in an address."""
_TIES = {"reward": "advantage"}
"""What orders those that are alike: of answers with one reward, those that few others of their group have."""
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
    by_group: bool = False
    """Whether answers to one prompt stand together."""

    def where(self) -> tuple[str, list[Any]]:
        """A condition, and its values. Errors: KeyError for a name that is not a column."""
        terms: list[tuple[str, list[Any]]] = []
        if self.text:
            matches = " or ".join(f"contains(lower({name}), lower(?))" for name in ("text", "question", "prompt_id"))
            terms.append((f"({matches})", [self.text] * 3))
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

    @property
    def columns(self) -> dict[str, str]:
        return GROUP_COLUMNS if self.by_group else COLUMNS

    def order(self) -> str:
        """Order clause of ``columns``. Errors: KeyError."""
        way, column = "desc" if self.descending else "asc", self.columns[self.sort]
        if self.by_group:
            return f"{column} {way} nulls last, step desc, prompt_id"
        ties = f"{_TIES[self.sort]} {way} nulls last, " if self.sort in _TIES else ""
        return f"{column} {way} nulls last, {ties}step desc, prompt_id, sample"

    def as_query(self) -> dict[str, str]:
        """Query parameters of all fields that differ from the defaults."""
        query = {name: getattr(self, name) for name in ("text", "status", "task", "outcome") if getattr(self, name)}
        for name, ends in self.ranges.items():
            query |= {
                f"{what}_{name}": f"{end:g}"
                for what, end in zip(("least", "most"), ends, strict=True)
                if end is not None
            }
        if (self.sort, self.descending) != ("step", True):
            query["sort"] = f"{'-' if self.descending else ''}{self.sort}"
        return query | ({"groups": "1"} if self.by_group else {})


def selection_of(query: Mapping[str, str]) -> Selection:
    """Selection of these query parameters; unknown ones, and values that are no numbers, are ignored."""
    ends = {name: (_number(query.get(f"least_{name}")), _number(query.get(f"most_{name}"))) for name in RANGES}
    selection = Selection(
        text=text_of(query, "text"),
        ranges={name: its for name, its in ends.items() if its != (None, None)},
        status=text_of(query, "status"),
        task=text_of(query, "task"),
        outcome=text_of(query, "outcome"),
        by_group=query.get("groups") == "1",
    )
    sort = query.get("sort", "-step")
    if (column := sort.removeprefix("-")) in selection.columns:
        return replace(selection, sort=column, descending=sort.startswith("-"))
    return selection


def whole_number(query: Mapping[str, str], name: str) -> int | None:
    """Integer of a parameter; None for anything else, or for too many digits."""
    text = query.get(name, "")
    return int(text) if text.isdecimal() and len(text) <= _MOST_DIGITS else None


def text_of(query: Mapping[str, str], name: str) -> str:
    """Text of a parameter, with question marks for characters that are none (lone surrogates)."""
    return query.get(name, "").encode(errors="replace").decode()


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None

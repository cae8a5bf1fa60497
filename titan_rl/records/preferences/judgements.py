"""Judgements as people make them and as the journal keeps them, each checked. Pure.

    {"id": "k3J…", "item": "0007", "who": "Ann", "choice": "a", "shown": [1, 0], "seconds": 4.2, "time": 1.8e9}

``choice`` is of the item's own answers, whatever the order on the page; ``shown`` is that order.
"""

import math
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from titan_rl.data.seeds import named_seed
from titan_rl.records.preferences.items import CHOICES, ITEM_ID, MOST_CHARACTERS, Mode

MOST_SECONDS = 86_400.0
_MOST_NAME, _MOST_SENT, _IN_NAMES = 40, 200, " .'_-"
_ID = re.compile(r"[A-Za-z0-9_-]{8,64}")
_PLACES = {"first": 0, "second": 1}
"""Choices of a page that name an answer by its place."""


class RefusedJudgement(ValueError):
    """Judgement that cannot be taken; says why."""


@dataclass(frozen=True)
class Judgement:
    """One labeller's judgement of one item; a later one of the same labeller takes its place."""

    id: str
    """By the page, for each judgement another: one that is sent again has the same."""
    item: str
    who: str
    choice: str
    shown: tuple[int, ...]
    """Numbers of the item's answers in the order in which they were shown."""
    edit: str = ""
    """Better answer by the labeller; empty: none."""
    seconds: float = 0.0
    """From the answers' appearance to the choice."""
    time: float = 0.0
    """Unix seconds."""

    def as_dict(self) -> dict[str, Any]:
        edit = {"edit": self.edit} if self.edit else {}
        named = {"id": self.id, "item": self.item, "who": self.who, "choice": self.choice, "shown": list(self.shown)}
        return named | edit | {"seconds": self.seconds, "time": self.time}

    def repeats(self, other: "Judgement") -> bool:
        """Whether it says what another one says, of the same item by the same labeller."""
        said = ((each.item, each.who, each.choice, each.edit) for each in (self, other))
        return len(set(said)) == 1


def order_of(seed: int, item: str, who: str, mode: Mode) -> tuple[int, ...]:
    """Order in which a labeller is shown an item's answers: a fair coin by the seed."""
    if mode == "ratings":
        return (0,)
    return (0, 1) if named_seed("shown", seed, item, who) % 2 == 0 else (1, 0)


def own_choice(choice: str, shown: Sequence[int]) -> str:
    """Choice by an item's own answers, of one by the order on the page."""
    return "ab"[shown[_PLACES[choice]]] if choice in _PLACES else choice


def page_choices(mode: Mode) -> tuple[str, ...]:
    """Choices of a page."""
    return (*_PLACES, *CHOICES[mode][2:]) if mode == "pairs" else CHOICES[mode]


def name_of(value: Any) -> str:
    """Name of a labeller, with single spaces. Errors: RefusedJudgement."""
    is_short = isinstance(value, str) and len(value) <= _MOST_SENT
    name = " ".join(unicodedata.normalize("NFKC", value).split()) if is_short else ""
    is_plain = all(unicodedata.category(sign)[0] in "LMN" or sign in _IN_NAMES for sign in name)
    if not 0 < len(name) <= _MOST_NAME or not is_plain or not name[0].isalnum():
        raise RefusedJudgement("give a name of up to 40 letters, digits, spaces, '.', '_', '-' and apostrophes")
    return name


def folded(name: str) -> str:
    """Name without regard to case: two that are the same so are one person's."""
    return unicodedata.normalize("NFKC", name.casefold())


def judgement_of(fields: Any, choices: Sequence[str]) -> Judgement:
    """Judgement by its fields, which anybody may have written. ``choices``: those that there are.

    Errors: RefusedJudgement.
    """
    if not isinstance(fields, dict):
        raise RefusedJudgement("a judgement is an object with id, item, who and choice")
    return Judgement(
        id=_matching(fields, "id", _ID),
        item=_matching(fields, "item", ITEM_ID),
        who=name_of(fields.get("who")),
        choice=_choice(fields.get("choice"), choices),
        shown=_shown(fields.get("shown", [])),
        edit=_edit(fields.get("edit", "")),
        seconds=_number(fields, "seconds", MOST_SECONDS),
        time=_number(fields, "time", 1e11),
    )


def _matching(fields: dict[str, Any], name: str, form: re.Pattern[str]) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not form.fullmatch(value):
        raise RefusedJudgement(f"{name} must be of the form {form.pattern}")
    return value


def _choice(value: Any, choices: Sequence[str]) -> str:
    if not isinstance(value, str) or value not in choices:
        raise RefusedJudgement(f"choice must be one of {', '.join(choices)}")
    return value


def _shown(value: Any) -> tuple[int, ...]:
    if value not in ([], [0], [0, 1], [1, 0]) or not all(type(each) is int for each in value):
        raise RefusedJudgement("shown must be an order of the answers")
    return tuple(value)


def _edit(value: Any) -> str:
    if not isinstance(value, str) or len(value) > MOST_CHARACTERS:
        raise RefusedJudgement(f"edit must be text of at most {MOST_CHARACTERS:,} characters")
    if any("\ud800" <= sign <= "\udfff" for sign in value):
        raise RefusedJudgement("edit holds half a character (a lone surrogate)")
    return value if value.strip() else ""


def _number(fields: dict[str, Any], name: str, most: float) -> float:
    value = fields.get(name, 0.0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise RefusedJudgement(f"{name} must be a number from 0 to {most:g}")
    assert math.isfinite(value), "it is within bounds"
    return float(value)

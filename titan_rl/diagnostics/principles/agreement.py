"""Agreement of a judge with people's labels: on the pairs of a collection, by its people's majorities. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from titan_rl.config.load import ConfigError
from titan_rl.diagnostics.principles.stages import Compared
from titan_rl.records.preferences.collection import Record
from titan_rl.records.preferences.items import Item
from titan_rl.records.preferences.journal import latest
from titan_rl.records.preferences.krippendorff import nominal_alpha
from titan_rl.records.preferences.rows import judged_items, majority
from titan_rl.records.statistics import Proportion

_PREFERRED = ("a", "b")


@dataclass(frozen=True)
class Labelled:
    """Pair of answers with people's choices, or with the one that is known to be right."""

    item: Item
    choices: tuple[str, ...]

    @property
    def majority(self) -> str | None:
        return majority(self.choices)


def labelled_pairs(record: Record) -> list[Labelled]:
    """Pairs of a collection that people have judged, and planted ones. Errors: ConfigError for another mode, or
    none."""
    if record.settings.mode != "pairs":
        raise ConfigError("--labels takes a collection of pairs, and this one has ratings: give another")
    judged = judged_items(latest(record.judgements))
    pairs = [item for item in record.items if item.planted or item.id in judged]
    if not pairs:
        raise ConfigError("--labels takes a collection with judgements, and this one has none yet: give another")
    return [Labelled(item, tuple(each.choice for each in judged.get(item.id, ()))) for item in pairs]


@dataclass(frozen=True)
class Agreement:
    """Numbers of a judge beside people."""

    pairs: int
    """That people have judged, without planted ones."""
    preferred: int
    """Of these, with a majority for one of the answers."""
    accuracy: Proportion | None
    """Of the preferred ones with a verdict, how often it is the majority's; None without any."""
    alpha: float | None
    """Krippendorff's, nominal, of the judge and the people's majority; None where it is not defined."""
    people_alpha: float | None
    """The same of the people among themselves."""
    by_principle: dict[str, Proportion]
    """Accuracy by the principle that was asked by."""
    planted: Proportion | None
    """Of the planted pairs with a verdict, how often it is the known choice; None without any."""

    def as_dict(self) -> dict[str, Any]:
        by_principle = {name: each.as_dict() for name, each in self.by_principle.items()}
        shares = {name: getattr(self, name) for name in ("accuracy", "planted")}
        given = {name: None if share is None else share.as_dict() for name, share in shares.items()}
        return vars(self) | given | {"by_principle": by_principle}


def agreement_of(labelled: Sequence[Labelled], compared: Sequence[Compared]) -> Agreement:
    """Agreement on pairs and their comparisons, in the same order.

    A verdict that follows the order, or cannot be read, is a missing value."""
    units, right, planted = [], {}, []
    for label, comparison in zip(labelled, compared, strict=True):
        people, judge = label.majority, comparison.choice if comparison.choice in _PREFERRED else None
        if label.item.planted:
            planted += [] if judge is None else [judge == label.item.planted]
            continue
        units.append([each for each in (people, judge) if each is not None])
        if people in _PREFERRED and judge is not None:
            right.setdefault(comparison.principle, []).append(people == judge)
    judged = [each for each in labelled if not each.item.planted]
    return Agreement(
        pairs=len(judged),
        preferred=sum(each.majority in _PREFERRED for each in judged),
        accuracy=_share([each for outcomes in right.values() for each in outcomes]),
        alpha=nominal_alpha(units),
        people_alpha=nominal_alpha([each.choices for each in judged]),
        by_principle={name: Proportion(sum(right[name]), len(right[name])) for name in sorted(right)},
        planted=_share(planted),
    )


def _share(outcomes: Sequence[bool]) -> Proportion | None:
    return Proportion(sum(outcomes), len(outcomes)) if outcomes else None

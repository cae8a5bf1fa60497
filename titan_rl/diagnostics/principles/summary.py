"""Summary of what a constitution made, and of its judge. Pure."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from titan_rl.diagnostics.principles.agreement import Agreement
from titan_rl.diagnostics.principles.stages import Compared, Made
from titan_rl.diagnostics.principles.verdicts import Comparison
from titan_rl.records.preferences.summary import columns
from titan_rl.records.statistics import Proportion


@dataclass(frozen=True)
class Verdicts:
    """Numbers of a judge's comparisons."""

    asked: int
    choices: dict[str, int]
    """Comparisons by what came of them (``Comparison``)."""
    order_dependent: Proportion | None
    """Share of those with two verdicts in which both prefer the same place; None without any."""
    first_preferred: Proportion | None
    """Of these, share in which it is the first one. A comparison counts once: its two verdicts are not independent."""

    def as_dict(self) -> dict[str, Any]:
        shares = {name: getattr(self, name) for name in ("order_dependent", "first_preferred")}
        return vars(self) | {name: None if each is None else each.as_dict() for name, each in shares.items()}


def verdicts_of(compared: Sequence[Compared]) -> Verdicts:
    """Numbers of some comparisons."""
    choices = Counter(each.choice for each in compared)
    decided = choices["a"] + choices["b"] + choices["order"]
    places = [each.places[0] for each in compared if each.choice == "order"]
    return Verdicts(
        asked=len(compared),
        choices={name: choices[name] for name in get_args(Comparison)},
        order_dependent=Proportion(choices["order"], decided) if decided else None,
        first_preferred=Proportion(places.count("first"), len(places)) if places else None,
    )


@dataclass(frozen=True)
class Summary:
    """Numbers of a whole command."""

    prompts: int
    revisions: int
    """Rows."""
    lost: dict[str, int]
    """Prompts without a revision, by the reply that did not end by itself."""
    pairs: int
    """Rows."""
    uncompared: int
    """Pairs of answers that are alike, or of which one did not end by itself."""
    verdicts: Verdicts
    """Of the prompts' pairs."""
    by_principle: dict[str, Verdicts]
    """Of the prompts' and the labelled pairs, by the principle that was asked by."""
    labelled: Verdicts | None
    """Of pairs that people have judged."""
    agreement: Agreement | None
    """With these people."""
    preferred: Proportion | None = None
    """Of two models that were compared, share of the first one's answers among the preferred ones."""

    def as_dict(self) -> dict[str, Any]:
        parts = {
            "verdicts": self.verdicts.as_dict(),
            "by_principle": {name: each.as_dict() for name, each in self.by_principle.items()},
            "labelled": None if self.labelled is None else self.labelled.as_dict(),
            "agreement": None if self.agreement is None else self.agreement.as_dict(),
            "preferred": None if self.preferred is None else self.preferred.as_dict(),
        }
        return vars(self) | parts


def summary_of(
    made: Sequence[Made], labelled: Sequence[Compared], agreement: Agreement | None, *, is_duel: bool = False
) -> Summary:
    """Summary of all prompts, and of the comparisons of pairs that people have judged.

    ``is_duel``: whether two models gave the answers of each pair."""
    compared = [each for of_prompt in made for each in of_prompt.compared]
    revised = [each.revised for each in made if each.revised is not None]
    everything = [*compared, *labelled]
    decided = [each.choice for each in compared if each.choice in ("a", "b")]
    return Summary(
        prompts=len(made),
        revisions=sum(each.lost is None for each in revised),
        lost=dict(sorted(Counter(each.lost for each in revised if each.lost is not None).items())),
        pairs=len(decided),
        uncompared=sum(each.uncompared for each in made),
        verdicts=verdicts_of(compared),
        by_principle={
            name: verdicts_of([each for each in everything if each.principle == name])
            for name in sorted({each.principle for each in everything})
        },
        labelled=verdicts_of(labelled) if labelled else None,
        agreement=agreement,
        preferred=Proportion(decided.count("a"), len(decided)) if is_duel and decided else None,
    )


# the table


def table(summary: Summary) -> str:
    """Lines for people, in columns."""
    parts = [list(_facts(summary)), list(_of_people(summary)), list(_of_principles(summary))]
    return "\n\n".join(columns(rows) for rows in parts if len(rows) > 1)


def _facts(summary: Summary) -> Iterator[tuple[str, str, str]]:
    if not summary.prompts:
        return
    yield "prompts", str(summary.prompts), ""
    if summary.revisions or summary.lost:
        yield "revisions", str(summary.revisions), _lost(summary)
    if summary.preferred is not None:
        yield "preferred", _value(summary.preferred), _of(summary.preferred, "are --model's, of two models")
    yield "pairs", str(summary.pairs), f"of {summary.verdicts.asked} that the judge compared"
    yield "not compared", str(summary.uncompared), "answers alike, or without an end"
    yield from _of_judge(summary.verdicts)


def _lost(summary: Summary) -> str:
    lost = ", ".join(f"{count} {stage}" for stage, count in summary.lost.items())
    return f"without an end, or empty: {lost}" if lost else ""


def _of_judge(verdicts: Verdicts) -> Iterator[tuple[str, str, str]]:
    yield "position bias", _value(verdicts.order_dependent), _of(verdicts.order_dependent, "both orders alike")
    yield "first preferred", _value(verdicts.first_preferred), _of(verdicts.first_preferred, "of these")
    yield "unreadable", str(verdicts.choices["unread"]), "no verdict at the end of the judge's reply"
    yield "cut", str(verdicts.choices["cut"]), "reply as long as --max-new-tokens, or judge.max_tokens, allows"
    yield "too long", str(verdicts.choices["too_long"]), "no room, or refused by the judge's server"


def _of_people(summary: Summary) -> Iterator[tuple[str, str, str]]:
    if summary.agreement is None or summary.labelled is None:
        return
    agreement = summary.agreement
    yield "judged by people", str(agreement.pairs), f"{agreement.preferred} with a majority for an answer"
    yield "accuracy", _value(agreement.accuracy), _of(agreement.accuracy, "of the majorities")
    if agreement.planted is not None:
        yield "planted", _value(agreement.planted), _of(agreement.planted, "as is known")
    yield "alpha", _alpha(agreement.alpha), "Krippendorff's, nominal, of the judge and the majority"
    yield "alpha of people", _alpha(agreement.people_alpha), "among themselves"
    yield from _of_judge(summary.labelled)


def _of_principles(summary: Summary) -> Iterator[tuple[str, ...]]:
    yield "principle", "compared", "position bias", "unreadable", "accuracy", "95 % interval"
    accuracies = {} if summary.agreement is None else summary.agreement.by_principle
    for name, verdicts in summary.by_principle.items():
        counts = str(verdicts.asked), _value(verdicts.order_dependent), str(verdicts.choices["unread"])
        accuracy = accuracies.get(name)
        yield name, *counts, _value(accuracy), "" if accuracy is None else _interval(accuracy)


def _alpha(value: float | None) -> str:
    return "undefined" if value is None else f"{value:.3f}"


def _value(share: Proportion | None) -> str:
    return "-" if share is None else f"{share.value:.1%}"


def _of(share: Proportion | None, what: str) -> str:
    return "" if share is None else f"{share.correct} of {share.count} {what}; 95 % {_interval(share)}"


def _interval(share: Proportion) -> str:
    low, high = share.interval
    return f"{low:.1%} to {high:.1%}"

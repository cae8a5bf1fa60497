r"""Forms of an answer, and the sets of numbers that inequalities are: ``1 \leq x < 5`` is ``[1, 5)``."""

import re
from dataclasses import dataclass, field

from titan_rl.environments.rewards.mathematics.notation import GREEK, Unreadable
from titan_rl.environments.rewards.mathematics.units import Unit

_COMMAND = re.compile(r"\\([A-Za-z]+)")
_INTERVALS = ("()", "[]", "(]", "[)")
_FLIPPED = {"<": ">", ">": "<", r"\leq": r"\geq", r"\geq": r"\leq", r"\neq": r"\neq"}


@dataclass(frozen=True)
class Value:
    """Expression, or the alternatives of a plus-minus."""

    latex: tuple[str, ...]
    """As many as it has values."""
    unit: Unit | None = None
    is_percent: bool = False
    base: str = ""
    """Of the number system, where it is said."""


@dataclass(frozen=True)
class Listing:
    """Several elements, in their order; ``brackets``: both of them, none, "matrix", "row" or ":"."""

    brackets: str
    items: tuple["Form", ...]
    conjunction: str = field(default="", compare=False)
    r"""Word between them, ``\and`` or ``\or``; empty: commas alone, or both."""


@dataclass(frozen=True)
class Relation:
    values: tuple[Value, ...]
    """Of one expression each."""
    operators: tuple[str, ...]
    """One less than values."""

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(value.latex[0] for value in self.values)

    @property
    def latex(self) -> str:
        rest = zip(self.operators, self.parts[1:], strict=True)
        return " ".join([self.parts[0], *(f"{operator} {part}" for operator, part in rest)])

    @property
    def variable(self) -> int | None:
        """Place of the part that is a variable, where the others are numbers."""
        places = [place for place, part in enumerate(self.parts) if has_variable(part)]
        return places[0] if len(places) == 1 and is_variable(self.parts[places[0]]) else None


@dataclass(frozen=True)
class Named:
    """Value or set with a name."""

    name: str
    is_member: bool
    """Whether it is an element of what follows, and not equal to it."""
    body: "Form"


@dataclass(frozen=True)
class Region:
    """Set written with an operator or by a name."""

    latex: str


Form = Value | Listing | Relation | Named | Region
_LEAST, _MOST = Value((r"- \infty",)), Value((r"\infty",))


def is_variable(latex: str) -> bool:
    return re.fullmatch(r"[A-Za-z](?:_\{\w+\})?", _without_commands(latex)) is not None


def has_variable(latex: str) -> bool:
    """Whether a letter is in it, besides those of commands and the constants e and i."""
    return re.search(r"[A-DF-HJ-Za-df-hj-z]", _without_commands(latex)) is not None


def _without_commands(latex: str) -> str:
    """With a letter in the place of each Greek one."""
    return _COMMAND.sub(lambda match: "x" if match[1] in GREEK else "", latex)


def set_latex(form: Form) -> str:
    """LaTeX of a set. Errors: Unreadable for what is no set of numbers."""
    if isinstance(form, Region):
        return form.latex
    if not isinstance(form, Listing) or form.brackets not in ("()", "[]", "(]", "[)", "{}"):
        raise Unreadable("no set")
    if form.brackets != "{}" and len(form.items) != 2:
        raise Unreadable("no interval")
    if any(not isinstance(item, Value) for item in form.items):
        raise Unreadable("no set of numbers")
    inside = " , ".join(latex for item in form.items if isinstance(item, Value) for latex in item.latex)
    opening, closing = (rf"\{form.brackets[0]}", rf"\{form.brackets[1]}") if form.brackets == "{}" else form.brackets
    return f"{opening} {inside} {closing}"


def as_set(form: Form) -> tuple[str, Form] | None:
    r"""Variable and set of an inequality that is solved, of two that hold together, or of several with ``\or``.

    None: no such. The variable of intervals with ``\or`` is empty.
    """
    if isinstance(form, Relation):
        return _interval(form)
    if not isinstance(form, Listing) or form.brackets:
        return None
    items = form.items if form.conjunction == r"\or" else ()
    if items and all(isinstance(item, Listing) and item.brackets in _INTERVALS for item in items):
        return _union([("", item) for item in items])
    sets = [found for item in form.items if isinstance(item, Relation) and (found := _interval(item))]
    if len(sets) < len(form.items) or len({variable for variable, _ in sets}) > 1:
        return None
    return _union(sets) if items else _both([body for _, body in sets], sets[0][0])


def _union(sets: list[tuple[str, Form]]) -> tuple[str, Form] | None:
    try:
        return sets[0][0], Region(r" \cup ".join(set_latex(each) for _, each in sets))
    except Unreadable:
        return None


def _both(sets: list[Form], variable: str) -> tuple[str, Form] | None:
    """Of two half-lines, one without a lower end and one without an upper one."""
    below = [each for each in sets if isinstance(each, Listing) and each.items[0] is _LEAST]
    above = [each for each in sets if isinstance(each, Listing) and each.items[1] is _MOST]
    if len(sets) != 2 or len(below) != 1 or len(above) != 1:
        return None
    return variable, Listing(above[0].brackets[0] + below[0].brackets[1], (above[0].items[0], below[0].items[1]))


def _interval(relation: Relation) -> tuple[str, Form] | None:
    place, values, operators = relation.variable, relation.values, relation.operators
    if place is None or any(operator not in _FLIPPED for operator in operators):
        return None
    variable = relation.parts[place]
    if len(values) == 2:
        return variable, _half(values[1 - place], _FLIPPED[operators[0]] if place else operators[0])
    if len(values) != 3 or place != 1:
        return None
    if set(operators) <= {">", r"\geq"}:
        values, operators = values[::-1], tuple(_FLIPPED[operator] for operator in operators[::-1])
    if not set(operators) <= {"<", r"\leq"}:
        return None
    return variable, _between(values[0], operators[0], operators[1], values[2])


def _half(bound: Value, operator: str) -> Form:
    """Set of the numbers that are in this relation to a bound."""
    if operator == r"\neq":
        below, above = _between(_LEAST, "<", "<", bound), _between(bound, "<", "<", _MOST)
        return Region(rf"{set_latex(below)} \cup {set_latex(above)}")
    if operator in ("<", r"\leq"):
        return _between(_LEAST, "<", operator, bound)
    return _between(bound, operator, "<", _MOST)


def _between(lower: Value, left: str, right: str, upper: Value) -> Listing:
    """Interval; its ends belong to it where the operator allows it."""
    return Listing(("(" if left in "<>" else "[") + (")" if right in "<>" else "]"), (lower, upper))

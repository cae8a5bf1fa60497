"""Whether an answer is the expected one: form by form here, value by value by math-verify."""

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, lru_cache
from typing import Any

from titan_rl.environments.rewards.mathematics.grammar import (
    Form,
    Listing,
    Named,
    Reading,
    Region,
    Relation,
    Value,
    has_variable,
    read,
    set_latex,
)
from titan_rl.environments.rewards.mathematics.notation import Unreadable

_MAX_ITEMS = 64
_DIGITS = 30
_UNORDERED = ("", "{}")
_TEXT = re.compile(r"\\(?:text|mathrm|mbox|textbf|mathbf|textit|mathit|textrm)\s*\{([^{}]*)\}")
_CALCULUS = re.compile(r"\\(?:i*nt|sum|prod|lim)(?![A-Za-z])")
_NUMBER = re.compile(r"-? ?[0-9]+(?:\.[0-9]+)?")
_SPACES = re.compile(r"(?:\s|~|\$|\\[,;:! ])+")


@dataclass(frozen=True)
class Expected:
    """A row's answer, read once."""

    text: str
    forms: tuple[Form, ...]
    """Every way to read it; none: it is compared as text."""
    values: tuple[Any, ...]
    """What math-verify reads where the grammar reads nothing, such as an integral."""
    units: frozenset[str]

    @property
    def is_text(self) -> bool:
        return not self.forms and not self.values


@lru_cache(maxsize=1024)
def expected_of(text: str) -> Expected:
    """Errors: ValueError for what is neither mathematics nor words."""
    forms = [form for form in _forms(text, Reading()) if all(_parsed(latex) for latex in _leaves(form))]
    values = tuple(_parsed(_SPACES.sub(" ", text).strip())) if not forms and _CALCULUS.search(text) else ()
    if not forms and not values and not any(sign.isalnum() for sign in text):
        raise ValueError(f"the expected answer {text!r} cannot be read as mathematics")
    units = {name for form in forms for value in _values(form) for name, _ in value.unit or ()}
    return Expected(text, tuple(forms), values, frozenset(units))


def is_equal(given: str, text: str) -> bool:
    """Errors: ValueError for an expected answer that cannot be read."""
    expected = expected_of(text)
    if given.strip() == text.strip():
        return True
    if expected.is_text or text.replace(" ", "").isalpha():
        if _words(given) == _words(text):
            return True
        if expected.is_text or _WORD.fullmatch(_words(given)):
            return False
    has_letters = any(re.search("[A-Za-z]", latex) for form in expected.forms for latex in _leaves(form))
    readings = Reading(expected.units, has_bare_letters=not has_letters)
    answers = _forms(given, readings)
    if expected.values:
        return any(isinstance(answer, Value) and _is_plain(answer, expected.values) for answer in answers)
    return any(_is_same(form, answer) for form in expected.forms for answer in answers)


_WORD = re.compile(r"[a-z]{3,}(?: [a-z]+)*")


def _words(text: str) -> str:
    """Without the commands of text, and its case; the letter of a choice without its brackets."""
    shown = _SPACES.sub(" ", _TEXT.sub(r" \1 ", text)).strip().rstrip(".").strip().casefold()
    choice = re.fullmatch(r"\(\s*([a-z])\s*\)", shown)
    return choice[1] if choice else shown


def _forms(text: str, reading: Reading) -> list[Form]:
    """With a comma between digits as it groups them, and as it separates numbers."""
    found: list[Form] = []
    for is_grouped in (True, False):
        way = Reading(reading.units, reading.has_bare_letters, is_grouped)
        try:
            form = read(text, way)
        except Unreadable:
            continue
        if form not in found:
            found.append(form)
    return found


def _values(form: Form) -> Iterable[Value]:
    if isinstance(form, Value):
        yield form
    elif isinstance(form, Listing):
        for item in form.items:
            yield from _values(item)
    elif isinstance(form, Named):
        yield from _values(form.body)


def _leaves(form: Form) -> Iterable[str]:
    """All that math-verify has to read."""
    if isinstance(form, Relation | Region):
        yield form.latex
    elif isinstance(form, Value):
        yield from form.latex
    elif isinstance(form, Named):
        yield from _leaves(form.body)
    else:
        for item in form.items:
            yield from _leaves(item)


def _is_plain(answer: Value, values: Sequence[Any]) -> bool:
    return len(answer.latex) == 1 and _verified(list(values), list(_parsed(answer.latex[0])))


def _is_same(expected: Form, given: Form) -> bool:
    if isinstance(expected, Named) and isinstance(given, Named):
        if expected.name == given.name and expected.is_member == given.is_member:
            return _is_same(expected.body, given.body)
        return _as_relation(expected, given)
    if isinstance(expected, Named) or isinstance(given, Named):
        if (isinstance(given, Relation) or isinstance(expected, Relation)) and _as_relation(expected, given):
            return True
        return _is_same(_unnamed(expected), _unnamed(given))
    if isinstance(expected, Listing) and isinstance(given, Listing) and not _is_flat(expected, given):
        return _is_same_listing(expected, given)
    if isinstance(expected, Value) and isinstance(given, Value) and len(expected.latex) == len(given.latex) == 1:
        return _is_same_value(expected, given)
    if isinstance(expected, Relation) and isinstance(given, Relation):
        return _is_same_relation(expected, given)
    if _is_flat(expected, given):
        return _is_same_collection(_flat(expected), _flat(given))
    return _is_same_region(expected, given)


def _unnamed(form: Form) -> Form:
    return form.body if isinstance(form, Named) else form


def _is_same_relation(expected: Relation, given: Relation) -> bool:
    """One that has to be solved, which may be the question, is not what it is solved by."""
    if len(expected.operators) != len(given.operators) or (expected.is_solved and not given.is_solved):
        return False
    return _same_latex(expected.latex, given.latex)


def _as_relation(expected: Form, given: Form) -> bool:
    """Equations that are put otherwise, such as ``y = 2x`` and ``2x - y = 0``."""
    first, second = _relation_latex(expected), _relation_latex(given)
    return first is not None and second is not None and _same_latex(first, second)


def _relation_latex(form: Form) -> str | None:
    """Of an equation between expressions with variables: ``x = 4`` is a value."""
    if isinstance(form, Relation):
        return form.latex if form.operators == ("=",) else None
    if not isinstance(form, Named) or form.is_member or not isinstance(form.body, Value):
        return None
    latex, *others = form.body.latex
    return f"{form.name} = {latex}" if not others and has_variable(latex) else None


# collections


def _is_flat(expected: Form, given: Form) -> bool:
    """Whether both say which values there are, in no order: lists, sets, and what a plus-minus makes."""
    return all(
        isinstance(form, Value) or (isinstance(form, Listing) and form.brackets in _UNORDERED)
        for form in (expected, given)
    )


def _flat(form: Form) -> list[Form]:
    if isinstance(form, Value):
        return [Value((latex,), form.unit, form.is_percent, form.base) for latex in form.latex]
    if isinstance(form, Listing) and form.brackets in _UNORDERED:
        return [part for item in form.items for part in (_flat(item) if not isinstance(item, Listing) else [item])]
    if isinstance(form, Named) and isinstance(form.body, Value):
        return [Named(form.name, form.is_member, part) for part in _flat(form.body)]
    return [form]


def _is_same_collection(expected: list[Form], given: list[Form]) -> bool:
    """Each of one is equal to another one of the other."""
    if len(expected) != len(given) or len(expected) > _MAX_ITEMS:
        return False
    left = list(given)
    for form in expected:
        match = next((index for index in range(len(left)) if _is_same_element(form, left[index])), None)
        if match is None:
            return False
        del left[match]
    return True


def _is_same_element(expected: Form, given: Form) -> bool:
    """Sets of one are no numbers here: ``{1}, {2}`` are two sets."""
    return isinstance(expected, Listing) == isinstance(given, Listing) and _is_same(expected, given)


def _is_same_listing(expected: Listing, given: Listing) -> bool:
    kinds = {expected.brackets, given.brackets}
    if len(kinds) > 1 and kinds != {"", "()"}:
        return False
    if len(expected.items) != len(given.items):
        return False
    return all(_is_same(one, other) for one, other in zip(expected.items, given.items, strict=True))


def _is_same_region(expected: Form, given: Form) -> bool:
    """Sets that are written otherwise; an inequality may be expected where a set is given."""
    if not isinstance(expected, (Region, Relation)) and not isinstance(given, Region):
        return False
    try:
        wanted = expected.latex if isinstance(expected, Relation) else set_latex(expected)
        found = set_latex(given)
    except Unreadable:
        return False
    if {_is_finite(wanted), _is_finite(found)} == {True, False}:
        return False
    return _same_latex(wanted, found)


def _is_finite(latex: str) -> bool:
    from sympy import FiniteSet

    return any(isinstance(value, FiniteSet) for value in _parsed(latex))


# values


def _is_same_value(expected: Value, given: Value) -> bool:
    if expected.is_percent != given.is_percent or (given.base and given.base != expected.base):
        return False
    if expected.unit and given.unit and expected.unit != given.unit:
        return False
    return _same_latex(expected.latex[0], given.latex[0])


def _same_latex(expected: str, given: str) -> bool:
    if _NUMBER.fullmatch(expected) and _NUMBER.fullmatch(given):  # most are, and math-verify takes milliseconds
        return _is_near(Fraction(expected.replace(" ", "")), Fraction(given.replace(" ", "")))
    return expected == given or _verified(list(_parsed(expected)), list(_parsed(given)))


def _is_near(expected: Fraction, given: Fraction) -> bool:
    """Whether numbers are equal, decimals to twelve digits, however small they are."""
    if expected.denominator == given.denominator == 1:
        return expected == given
    return abs(expected - given) <= abs(expected) * Fraction(1, 10**12)


def _verified(expected: list[Any], given: list[Any]) -> bool:
    _, verify, _ = library()
    if not verify(expected, given, float_rounding=12, timeout_seconds=None, raise_on_error=False):
        return False
    numbers = [value for value in (*expected, *given) if getattr(value, "is_number", False)]
    if len(numbers) < 2 or not all(number.is_finite for number in numbers):
        return True
    first, second = (number.evalf(_DIGITS) for number in numbers)
    return bool(abs(first - second) <= abs(first) * 10.0**-11)  # math-verify rounds to a place behind the point


@lru_cache(maxsize=4096)
def _parsed(latex: str) -> tuple[Any, ...]:
    """What math-verify reads; it is empty where it reads nothing."""
    parse, _, reading = library()
    return tuple(parse(f"${latex}$", extraction_config=reading, fallback_mode="no_fallback", parsing_timeout=None))


@cache
def library() -> tuple[Callable[..., Any], Callable[..., bool], list[Any]]:
    """math-verify's ``parse`` and ``verify``, and to read LaTeX as it is. They say by name in a log what cannot be
    read, which is no news here."""
    from latex2sympy2_extended.math_normalization import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    for name in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    as_it_is = NormalizationConfig(basic_latex=False, boxed="none")
    return parse, verify, [LatexExtractionConfig(normalization_config=as_it_is)]

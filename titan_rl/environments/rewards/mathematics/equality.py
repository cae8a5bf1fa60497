"""Equality of an answer and the expected one: forms here, values by math-verify."""

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, lru_cache
from typing import Any

from titan_rl.environments.rewards.mathematics.forms import (
    Form,
    Listing,
    Named,
    Region,
    Relation,
    Value,
    as_set,
    has_variable,
    set_latex,
)
from titan_rl.environments.rewards.mathematics.grammar import Reading, read
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
    """Expected answer, parsed once."""

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
    """Parse an expected answer. Errors: ValueError for what is neither mathematics nor words."""
    forms = [form for form in _forms(text, Reading()) if all(_parsed(latex) for latex in _leaves(form))]
    values = tuple(_parsed(_SPACES.sub(" ", text).strip())) if not forms and _CALCULUS.search(text) else ()
    if not forms and not values and not any(sign.isalnum() for sign in text):
        raise ValueError(f"the expected answer {text!r} cannot be read as mathematics")
    units = {name for form in forms for value in _values(form) for name, _ in value.unit or ()}
    return Expected(text, tuple(forms), values, frozenset(units))


def is_equal(answer_text: str, text: str) -> bool:
    """Whether an answer equals the expected one. Errors: ValueError for an unreadable expected answer."""
    expected = expected_of(text)
    if answer_text.strip() == text.strip():
        return True
    if expected.is_text or text.replace(" ", "").isalpha():
        if _words(answer_text) == _words(text):
            return True
        if expected.is_text or _WORD.fullmatch(_words(answer_text)):
            return False
    has_letters = any(re.search("[A-Za-z]", latex) for form in expected.forms for latex in _leaves(form))
    readings = Reading(expected.units, has_bare_letters=not has_letters)
    answers = _forms(answer_text, readings)
    if expected.values:
        return any(isinstance(answer, Value) and _is_plain(answer, expected.values) for answer in answers)
    return any(_is_same(form, answer) for form in expected.forms for answer in answers)


_WORD = re.compile(r"[a-z]{3,}(?: [a-z]+)*")


def _words(text: str) -> str:
    """Without the commands of text, and its case; the letter of a choice without its brackets."""
    words = _SPACES.sub(" ", _TEXT.sub(r" \1 ", text)).strip().rstrip(".").strip().casefold()
    choice = re.fullmatch(r"\(\s*([a-z])\s*\)", words)
    return choice[1] if choice else words


def _forms(text: str, reading: Reading) -> list[Form]:
    """With a comma between digits as it groups them, and as it separates numbers."""
    forms: list[Form] = []
    for is_grouped in (True, False):
        variant = Reading(reading.units, reading.has_bare_letters, is_grouped)
        try:
            form = read(text, variant)
        except Unreadable:
            continue
        if form not in forms:
            forms.append(form)
    return forms


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


def _is_same(expected: Form, answer: Form) -> bool:
    if isinstance(expected, Named) and isinstance(answer, Named):
        if expected.name == answer.name and expected.is_member == answer.is_member:
            return _is_same(expected.body, answer.body)
        return _as_relation(expected, answer)
    if isinstance(expected, Named) or isinstance(answer, Named):
        if (isinstance(answer, Relation) or isinstance(expected, Relation)) and _as_relation(expected, answer):
            return True
        return not _is_of_another(expected, answer) and _is_same(_unnamed(expected), _unnamed(answer))
    if isinstance(expected, Listing) and isinstance(answer, Listing) and not _is_flat(expected, answer):
        return _is_same_listing(expected, answer) or _is_same_set(expected, answer)
    if isinstance(expected, Value) and isinstance(answer, Value) and len(expected.latex) == len(answer.latex) == 1:
        return _is_same_value(expected, answer)
    if isinstance(expected, Relation) and isinstance(answer, Relation):
        return _is_same_relation(expected, answer)
    if isinstance(expected, Value) and isinstance(answer, Relation):
        return _is_worked_out(expected, answer)
    if _is_flat(expected, answer):
        return _is_same_collection(_flat(expected), _flat(answer))
    return _is_same_region(expected, answer)


def _is_of_another(expected: Form, answer: Form) -> bool:
    """Whether a set's member and an inequality are of two variables."""
    names = {form.name for form in (expected, answer) if isinstance(form, Named)}
    return len(names | {found[0] for form in (expected, answer) if (found := as_set(form)) and found[0]}) > 1


def _unnamed(form: Form) -> Form:
    return form.body if isinstance(form, Named) else form


def _is_same_relation(expected: Relation, answer: Relation) -> bool:
    """One that has to be solved, which may be the question, is not what it is solved by."""
    if expected.variable is not None:
        sets = as_set(expected), as_set(answer)
        if None not in sets:
            return _is_same_set(expected, answer)
        if answer.variable is None:
            return False
    return len(expected.operators) == len(answer.operators) and _same_latex(expected.latex, answer.latex)


def _is_worked_out(expected: Value, answer: Relation) -> bool:
    """Whether it is several ways to put one value: ``3^2 + 4^2 = 25``."""
    is_equation = set(answer.operators) == {"="} and len(set(answer.parts)) == len(answer.parts)
    return is_equation and len(expected.latex) == 1 and all(_is_same_value(expected, part) for part in answer.values)


def _as_relation(expected: Form, answer: Form) -> bool:
    """Equations that are put otherwise, such as ``y = 2x`` and ``2x - y = 0``."""
    first, second = _relation_latex(expected), _relation_latex(answer)
    return first is not None and second is not None and _same_latex(first, second)


def _relation_latex(form: Form) -> str | None:
    """Of an equation between expressions with variables: ``x = 4`` is a value."""
    if isinstance(form, Relation):
        return form.latex if form.operators == ("=",) else None
    if not isinstance(form, Named) or form.is_member or not isinstance(form.body, Value):
        return None
    latex, *further = form.body.latex
    return f"{form.name} = {latex}" if not further and has_variable(latex) else None


# collections


def _is_flat(expected: Form, answer: Form) -> bool:
    """Whether both say which values there are, in no order: lists, sets, and what a plus-minus makes."""
    return all(
        isinstance(form, Value) or (isinstance(form, Listing) and form.brackets in _UNORDERED)
        for form in (expected, answer)
    )


def _flat(form: Form) -> list[Form]:
    if isinstance(form, Value):
        return [Value((latex,), form.unit, form.is_percent, form.base) for latex in form.latex]
    if isinstance(form, Listing) and form.brackets in _UNORDERED:
        return [part for item in form.items for part in (_flat(item) if not isinstance(item, Listing) else [item])]
    if isinstance(form, Named) and isinstance(form.body, Value):
        return [Named(form.name, form.is_member, part) for part in _flat(form.body)]
    return [form]


def _is_same_collection(expected: list[Form], answer: list[Form]) -> bool:
    """Each of one is equal to another one of the other."""
    if len(expected) != len(answer) or len(expected) > _MAX_ITEMS:
        return False
    unmatched = list(answer)
    for form in expected:
        match = next((index for index in range(len(unmatched)) if _is_same_element(form, unmatched[index])), None)
        if match is None:
            return False
        del unmatched[match]
    return True


def _is_same_element(expected: Form, answer: Form) -> bool:
    """Sets of one are no numbers here: ``{1}, {2}`` are two sets."""
    return isinstance(expected, Listing) == isinstance(answer, Listing) and _is_same(expected, answer)


def _is_same_listing(expected: Listing, answer: Listing) -> bool:
    kinds = {expected.brackets, answer.brackets}
    if len(kinds) > 1 and kinds != {"", "()"}:
        return False
    if len(expected.items) != len(answer.items):
        return False
    return all(_is_same(first, second) for first, second in zip(expected.items, answer.items, strict=True))


def _is_same_region(expected: Form, answer: Form) -> bool:
    """Sets that are written otherwise."""
    if _is_same_set(expected, answer):
        return True
    if not isinstance(expected, (Region, Relation)) and not isinstance(answer, Region):
        return False
    return _is_same_set_latex(expected, answer)


def _is_same_set(expected: Form, answer: Form) -> bool:
    """Whether inequalities that are solved, of one variable, are the same set as others or as intervals."""
    sets = as_set(expected), as_set(answer)
    if sets == (None, None) or len({found[0] for found in sets if found and found[0]}) > 1:
        return False
    first, second = (found[1] if found else form for found, form in zip(sets, (expected, answer), strict=True))
    if isinstance(first, Listing) and isinstance(second, Listing):
        return first.brackets == second.brackets and _is_same_listing(first, second)
    # one interval is not what several with "or" are together: those are several answers
    return isinstance(first, Region) and isinstance(second, Region) and _is_same_set_latex(first, second)


def _is_same_set_latex(expected: Form, answer: Form) -> bool:
    try:
        expected_latex = expected.latex if isinstance(expected, Relation) else set_latex(expected)
        answer_latex = set_latex(answer)
    except Unreadable:
        return False
    if {_is_finite(expected_latex), _is_finite(answer_latex)} == {True, False}:
        return False
    return _same_latex(expected_latex, answer_latex)


def _is_finite(latex: str) -> bool:
    from sympy import FiniteSet

    return any(isinstance(value, FiniteSet) for value in _parsed(latex))


# values


def _is_same_value(expected: Value, answer: Value) -> bool:
    if answer.base and answer.base != expected.base:
        return False
    if expected.unit and answer.unit and expected.unit != answer.unit:
        return False
    if expected.is_percent == answer.is_percent:
        return _same_latex(expected.latex[0], answer.latex[0])
    return _same_latex(
        *(rf"\frac{{{each.latex[0]}}}{{100}}" if each.is_percent else each.latex[0] for each in (expected, answer))
    )


def _same_latex(expected: str, answer: str) -> bool:
    if _NUMBER.fullmatch(expected) and _NUMBER.fullmatch(answer):  # most are, and math-verify takes milliseconds
        return _is_near(Fraction(expected.replace(" ", "")), Fraction(answer.replace(" ", "")))
    return expected == answer or _verified(list(_parsed(expected)), list(_parsed(answer)))


def _is_near(expected: Fraction, answer: Fraction) -> bool:
    """Whether numbers are equal, decimals to twelve digits, however small they are."""
    if expected.denominator == answer.denominator == 1:
        return expected == answer
    return abs(expected - answer) <= abs(expected) * Fraction(1, 10**12)


def _verified(expected: list[Any], answer: list[Any]) -> bool:
    _, verify, _ = library()
    if not verify(expected, answer, float_rounding=12, timeout_seconds=None, raise_on_error=False):
        return False
    numbers = [value for value in (*expected, *answer) if getattr(value, "is_number", False)]
    if {number.is_finite for number in numbers} >= {True, False}:
        return False  # whatever sympy makes of a difference of the two, which depends on what it computed before
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
    """math-verify's ``parse`` and ``verify``, and a configuration for unchanged LaTeX; their logs are silenced."""
    from latex2sympy2_extended.math_normalization import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    for name in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    as_it_is = NormalizationConfig(basic_latex=False, boxed="none")
    return parse, verify, [LatexExtractionConfig(normalization_config=as_it_is)]

r"""Grammar of an answer: what it says, and in which form. Whoever says two things has the form of two.

    answer    = element (("," | ";" | and | or) element)* ["."]
    element   = [name ("=" | "\in")] chain
    chain     = sets | ratio | quantity (relation quantity)*
    sets      = set (("\cup" | "\cap" | "\setminus") set)*          set = brackets around elements, reals, empty set,
                                                                      "\{" name (":" | "\mid") inequalities "\}"
    ratio     = quantity (":" quantity)+
    quantity  = [currency] sum ["%"] [unit]                         sum = expressions.py

Values are LaTeX in one spelling, for math-verify; brackets, names, units, percent signs and plus-minus are told apart.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

from titan_rl.environments.rewards.mathematics.expressions import Expressions
from titan_rl.environments.rewards.mathematics.forms import (
    Form,
    Listing,
    Named,
    Region,
    Relation,
    Value,
    as_set,
    has_variable,
    is_variable,
    set_latex,
)
from titan_rl.environments.rewards.mathematics.notation import GREEK, Token, Unreadable, tokens_of
from titan_rl.environments.rewards.mathematics.units import DEGREE, SIGNS, Unit, Words, read_unit

_RELATIONS = ("=", "<", ">", r"\leq", r"\geq", r"\neq")
_SETS = (r"\cup", r"\cap", r"\setminus")
_CONJUNCTIONS = (r"\and", r"\or")
_SEPARATORS = (",", ";", *_CONJUNCTIONS)
_IN = r"\in"
_CLOSING = {"(": (")", "]"), "[": ("]", ")"), r"\{": (r"\}",), r"\langle": (r"\rangle",), "{": ("}",)}
_BRACKETS = {r"\{": "{", r"\}": "}", r"\langle": "<", r"\rangle": ">"}
_ENDS = (")", "]", "}", "&", r"\}", r"\rangle", "\\\\", r"\end")
_NAMED_SETS = {r"\reals": r"\mathbb{R}", r"\emptyset": r"\emptyset"}
_MATRICES = ("pmatrix", "bmatrix", "matrix", "smallmatrix", "array")
_MAX_SIGNS = 3
_SIGNS = re.compile(r"(\\pm|\\mp)(?![A-Za-z])")


@dataclass(frozen=True)
class Reading:
    """How a text is read. ``units``: words that are units beside the known ones; None: every word behind a number."""

    units: frozenset[str] | None = None
    has_bare_letters: bool = False
    is_grouped: bool = True
    words: Words = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "words", Words(self.units, has_bare_letters=self.has_bare_letters))


def read(text: str, reading: Reading) -> Form:
    """Parse an answer. Errors: Unreadable."""
    parser = _Answer(tokens_of(text, is_grouped=reading.is_grouped), reading.words)
    try:
        return parser.answer()
    except RecursionError:
        raise Unreadable("too deep") from None


class _Answer(Expressions):
    def __init__(self, tokens: list[Token], words: Words):
        super().__init__(tokens)
        self.words = words

    def is_unit_here(self) -> bool:
        return self.depth == 1 and self._unit(self.at) is not None

    def _unit(self, start: int) -> tuple[Unit, int] | None:
        """A unit that begins there and that nothing but the end of an element follows."""
        unit = read_unit(self.tokens, start, self.words)
        return unit if unit is not None and self._is_end(unit[1]) else None

    def _is_end(self, place: int) -> bool:
        if place >= len(self.tokens):
            return True
        token = self.tokens[place]
        is_last_point = token.text == "." and place == len(self.tokens) - 1
        return is_last_point or token.text in (*_ENDS, *_SEPARATORS, *_RELATIONS, ":")

    def answer(self) -> Form:
        items, conjunction = self._elements()
        if self.peek().text == "." and self.at == len(self.tokens) - 1:
            self.at += 1
        if self.at < len(self.tokens):
            raise Unreadable(self.peek().text)
        return _together(items, conjunction)

    def _elements(self) -> tuple[tuple[Form, ...], str]:
        """Elements, and the word that is between them if it is one."""
        items, words = [self._element()], set()
        while (separator := self.peek().text) in _SEPARATORS:
            self.at += 1
            if separator == "," and self.peek().text in _CONJUNCTIONS:
                separator = self.take().text
            words.add(separator)
            items.append(self._element())
        words -= {","}
        return tuple(items), words.pop() if len(words) == 1 else ""

    def _element(self) -> Form:
        depth, self.depth = self.depth, 0
        try:
            name = self._name()
            body = self._chain()
        finally:
            self.depth = depth
        if name is not None and name[1] and not isinstance(body, Listing | Region):
            raise Unreadable("a member of no set")
        return body if name is None else Named(*name, body)

    # the name before a value

    def _name(self) -> tuple[str, bool] | None:
        place = self.at
        while place < len(self.tokens) and self.tokens[place].text not in ("=", _IN, ";", r"\{", *_CONJUNCTIONS):
            place += 1
        if place >= len(self.tokens) or self.tokens[place].text not in ("=", _IN):
            return None
        before = self.tokens[self.at : place]
        if not before or not _is_name(before):
            if self.tokens[place].text == _IN:
                raise Unreadable(_IN)
            return None
        self.at = place + 1
        return _spelled(before), self.tokens[place].text == _IN

    # chains, sets and ratios

    def _chain(self) -> Form:
        if (sets := self._sets()) is not None:
            return sets
        parts, operators = [self._quantity()], []
        if self.peek().text == ":":
            return self._ratio(parts[0])
        while self.peek().text in _RELATIONS:
            operators.append(self.take().text)
            parts.append(self._quantity())
        if not operators:
            return parts[0]
        return _relation(parts, operators)

    def _ratio(self, first: Value) -> Form:
        items = [first]
        while self.peek().text == ":":
            self.at += 1
            items.append(self._quantity())
        return Listing(":", tuple(items))

    def _sets(self) -> Form | None:
        """What is in brackets with a comma or in braces, matrices, and sets with their operators; None: no such."""
        place, tokens = self.at, list(self.tokens)
        first = self._set()
        if first is None or not (self._is_end(self.at) or self.peek().text in _SETS):
            self.at, self.tokens = place, tokens
            return None
        if self.peek().text not in _SETS:
            return first
        latex = [set_latex(first)]
        while self.peek().text in _SETS:
            latex.append(self.take().text)
            if (more := self._set()) is None:
                raise Unreadable("a set is missing")
            latex.append(set_latex(more))
        return Region(" ".join(latex))

    def _set(self) -> Form | None:
        token = self.peek()
        if token.text in _NAMED_SETS:
            return Region(_NAMED_SETS[self.take().text])
        if token.text == r"\begin":
            return self._matrix()
        if token.text in ("(", "[") and self._texts(1)[:1] == [r"\begin"]:
            self.at += 1
            matrix = self._matrix()
            self.expect(_CLOSING[token.text][0])
            return matrix
        return self._bracketed(token.text) if token.text in _CLOSING else None

    def _bracketed(self, opening: str) -> Form | None:
        place, tokens = self.at, list(self.tokens)
        self.at += 1
        self.nest()
        try:
            if opening == r"\{" and (numbers := self._described()) is not None:
                return numbers
            items, _ = self._elements()
        except Unreadable:
            if opening == r"\{":
                raise
            self.at, self.tokens = place, tokens
            return None  # what is grouped by them may still be an expression
        finally:
            self.nesting -= 1
        closing = self.take()
        if closing.text not in _CLOSING[opening] or (len(items) < 2 and opening != r"\{"):
            self.at, self.tokens = place, tokens
            return None
        brackets = _BRACKETS.get(opening, opening) + _BRACKETS.get(closing.text, closing.text)
        brackets = "" if opening == "{" else brackets  # which LaTeX does not show
        if brackets in ("(]", "[)") and len(items) != 2:
            raise Unreadable("an interval has two ends")
        return Listing(brackets, items)

    def _described(self) -> Form | None:
        r"""Set of the numbers for which inequalities hold, behind its brace: ``\{x \mid x > 3\}``."""
        name, texts = self.peek(), self._texts(1)
        length = 2 if texts[:2] == [_IN, r"\reals"] else 0
        if name.kind != "word" or texts[length : length + 1] not in ([":"], ["|"], [r"\mid"]):
            return None
        self.at += length + 2
        found = as_set(_together(*self._elements()))
        if found is None or found[0] != name.text:
            raise Unreadable("no inequality of this name")
        self.expect(r"\}")
        return found[1]

    def _matrix(self) -> Form:
        self.at += 1
        name = self._environment()
        if name not in _MATRICES:
            raise Unreadable(name)
        if name == "array":
            self._environment()
        rows = [[self._element()]]
        while self.peek().text in ("&", "\\\\"):
            if self.take().text == "&":
                rows[-1].append(self._element())
            elif self.peek().text != r"\end":
                rows.append([self._element()])
        self.expect(r"\end")
        if self._environment() != name or len({len(row) for row in rows}) > 1:
            raise Unreadable("a matrix that is not closed, or not rectangular")
        return Listing("matrix", tuple(Listing("row", tuple(row)) for row in rows))

    def _environment(self) -> str:
        self.expect("{")
        parts = []
        while self.peek().text != "}":
            parts.append(self.take().text)
        self.expect("}")
        return "".join(parts)

    def _texts(self, start: int) -> list[str]:
        return [token.text for token in self.tokens[self.at + start : self.at + start + 4]]

    # one value

    def _quantity(self) -> Value:
        if (based := self._based()) is not None:
            return based
        unit, sign = None, ""
        if self.peek().text == "-" and self._texts(1)[:1] and self._texts(1)[0] in SIGNS:
            self.at, sign = self.at + 1, "- "
        if self.peek().text in SIGNS:
            unit = ((SIGNS[self.take().text], 1),)
        self.has_degrees = False
        latex = sign + self.fraction()
        is_percent = self._percent()
        if (unit_and_end := self._unit(self.at)) is not None:
            more, self.at = unit_and_end
            unit = self._one_unit(unit, more)
        if self.has_degrees:
            unit = self._one_unit(unit if unit != DEGREE else None, DEGREE)
        return Value(_alternatives(latex), unit, is_percent)

    def _one_unit(self, first: Unit | None, second: Unit) -> Unit:
        if first is not None and first != second:
            raise Unreadable("two units")
        return second

    def _percent(self) -> bool:
        if self.peek().text in ("%", r"\%"):
            self.at += 1
            return True
        return False

    def _based(self) -> Value | None:
        r"""``101_2``, ``101_{2}``, ``(101)_2`` or ``101_{(2)}``."""
        texts = self._texts(0)
        is_bracketed = texts[:1] == ["("] and texts[2:] == [")", "_"]
        digits = texts[is_bracketed] if len(texts) > 1 else ""
        if not digits.isdecimal() or not (is_bracketed or texts[1] == "_"):
            return None
        self.at += 4 if is_bracketed else 2
        closing = []
        while self.peek().text in ("{", "(") and len(closing) < 2:
            closing.insert(0, _CLOSING[self.take().text][0])
        base = self.take()
        for text in closing:
            self.expect(text)
        if base.kind not in ("number", "word") or not self._is_end(self.at):
            raise Unreadable("an index of a number")
        return Value((digits,), base=_BASES.get(base.text, base.text))


_BASES = {"two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7", "eight": "8", "nine": "9"} | {
    "ten": "10",
    "twelve": "12",
    "sixteen": "16",
}


def _is_name(tokens: list[Token]) -> bool:
    """Of a variable, a side, an angle or a function at a place: ``x``, ``x_1``, ``AB``, ``\\angle ABC``, ``f(x)``."""
    if tokens[0].text == "m" and len(tokens) > 1 and tokens[1].text == r"\angle":
        tokens = tokens[1:]
    if tokens[0].text in (r"\angle", r"\triangle"):
        tokens = tokens[1:]
    if not tokens:
        return False
    if tokens[0].text == "(":
        return _is_index([token.text for token in tokens])
    first, texts = tokens[0], [token.text for token in tokens[1:]]
    is_letter = first.kind == "command" and first.text[1:] in GREEK
    is_letter |= first.kind == "word" and (len(first.text) == 1 or (first.text.isupper() and len(first.text) < 5))
    return is_letter and _is_index(texts)


def _is_index(texts: list[str]) -> bool:
    """``_1``, ``_{12}``, ``^{-1}`` and ``(x)``, each once at most, in this order."""
    if texts[:1] == ["_"]:
        texts = texts[4:] if texts[1:2] == ["{"] and texts[3:4] == ["}"] and texts[2].isalnum() else texts[2:]
    if texts[:5] == ["^", "{", "-", "1", "}"]:
        texts = texts[5:]
    if texts[:1] == ["("] and texts[-1:] == [")"]:
        return all(text.isalnum() if number % 2 == 0 else text == "," for number, text in enumerate(texts[1:-1]))
    return not texts


def _spelled(tokens: list[Token]) -> str:
    return " ".join(token.text for token in tokens)


def _relation(parts: list[Value], operators: list[str]) -> Form:
    if any(part.base or len(part.latex) > 1 for part in parts):
        raise Unreadable("a plus-minus in a relation")
    relation = Relation(tuple(parts), tuple(operators))
    first, second = relation.parts[:2]
    if operators == ["="] and is_variable(second) and not has_variable(first):
        return Named(second, False, parts[0])
    return relation


def _together(items: tuple[Form, ...], conjunction: str) -> Form:
    return items[0] if len(items) == 1 else Listing("", items, conjunction)


def _alternatives(latex: str) -> tuple[str, ...]:
    r"""One for each choice of signs. With a ``\mp`` all are chosen together."""
    parts = _SIGNS.split(latex)
    num_signs = len(parts) // 2
    if num_signs > _MAX_SIGNS:
        raise Unreadable("too many signs")
    together = [("+",) * num_signs, ("-",) * num_signs]
    choices = together if r"\mp" in parts else list(product("+-", repeat=num_signs))
    return tuple(_with_signs(parts, choice) for choice in choices)


def _with_signs(parts: list[str], signs: Sequence[str]) -> str:
    r"""``parts``: text and ``\pm`` or ``\mp`` in turn. A plus at a beginning is left out."""
    flipped = {"+": "-", "-": "+"}
    latex = parts[0]
    for kind, sign, text in zip(parts[1::2], signs, parts[2::2], strict=True):
        shown = sign if kind == r"\pm" else flipped[sign]
        is_first = not latex.strip() or latex.strip()[-1] in "{("
        latex += text.lstrip() if is_first and shown == "+" else shown + text
    return latex

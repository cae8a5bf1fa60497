r"""Grammar of an answer: what it says, and in which form. Whoever says two things has the form of two.

    answer    = element (("," | ";" | and | or) element)* ["."]
    element   = [name ("=" | "\in")] chain
    chain     = sets | ratio | quantity (relation quantity)*
    sets      = set (("\cup" | "\cap" | "\setminus") set)*          set = brackets around elements, reals, empty set
    ratio     = quantity (":" quantity)+
    quantity  = [currency] sum ["%"] [unit]                         sum = expressions.py

Values are LaTeX in one spelling, for math-verify; brackets, names, units, percent signs and plus-minus are told apart.
"""

import re
from dataclasses import dataclass, field
from itertools import product

from titan_rl.environments.rewards.mathematics.expressions import Expressions
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
_COMMAND = re.compile(r"\\\\[A-Za-z]+")
_MAX_SIGNS = 3


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


@dataclass(frozen=True)
class Relation:
    parts: tuple[str, ...]
    operators: tuple[str, ...]
    """One less than parts."""

    @property
    def latex(self) -> str:
        rest = zip(self.operators, self.parts[1:], strict=True)
        return " ".join([self.parts[0], *(f"{operator} {part}" for operator, part in rest)])

    @property
    def is_solved(self) -> bool:
        """Whether one part is a variable and the others are numbers."""
        variables = [part for part in self.parts if is_variable(part)]
        return len(variables) == 1 and sum(map(has_variable, self.parts)) == 1


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
        items = self._elements()
        if self.peek().text == "." and self.at == len(self.tokens) - 1:
            self.at += 1
        if self.at < len(self.tokens):
            raise Unreadable(self.peek().text)
        return items[0] if len(items) == 1 else Listing("", items)

    def _elements(self) -> tuple[Form, ...]:
        items = [self._element()]
        while self.peek().text in _SEPARATORS:
            self.at += 1
            if self.tokens[self.at - 1].text == "," and self.peek().text in _CONJUNCTIONS:
                self.at += 1
            items.append(self._element())
        return tuple(items)

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
        while place < len(self.tokens) and self.tokens[place].text not in ("=", _IN, ";", *_CONJUNCTIONS):
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
            items = self._elements()
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
        latex = sign + self.sum()
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
        texts = self._texts(0)
        if self.peek().kind != "number" or texts[1:2] != ["_"] or not texts[0].isdecimal():
            return None
        self.at += 2
        is_braced = self.peek().text == "{"
        self.at += is_braced
        base = self.take()
        if is_braced:
            self.expect("}")
        if base.kind not in ("number", "word") or not self._is_end(self.at):
            raise Unreadable("an index of a number")
        return Value((texts[0],), base=_BASES.get(base.text, base.text))


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
    latex = tuple(part.latex[0] for part in parts)
    if operators == ["="] and is_variable(latex[1]) and not has_variable(latex[0]):
        return Named(latex[1], False, parts[0])
    return Relation(latex, tuple(operators))


def is_variable(latex: str) -> bool:
    return re.fullmatch(r"[A-Za-z](?:_\{\w+\})?", latex) is not None


def has_variable(latex: str) -> bool:
    """Whether a letter is in it, besides those of commands and the constants e and i."""
    return re.search(r"[A-DF-HJ-Za-df-hj-z]", _COMMAND.sub("", latex)) is not None


def _alternatives(latex: str) -> tuple[str, ...]:
    r"""One for each choice of signs. With a ``\mp`` all are chosen together."""
    parts = latex.split(" ")
    places = [place for place, part in enumerate(parts) if part in (r"\pm", r"\mp")]
    if not places:
        return (latex,)
    if len(places) > _MAX_SIGNS:
        raise Unreadable("too many signs")
    together = any(parts[place] == r"\mp" for place in places)
    choices = [("+",) * len(places), ("-",) * len(places)] if together else list(product("+-", repeat=len(places)))
    return tuple(_with_signs(parts, dict(zip(places, choice, strict=True))) for choice in choices)


def _with_signs(parts: list[str], signs: dict[int, str]) -> str:
    flipped = {"+": "-", "-": "+"}
    chosen = [
        part if place not in signs else (signs[place] if part == r"\pm" else flipped[signs[place]])
        for place, part in enumerate(parts)
    ]
    return " ".join(chosen[1:] if chosen[0] == "+" else chosen)


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

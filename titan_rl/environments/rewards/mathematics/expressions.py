r"""Grammar of an expression, by recursive descent, and its LaTeX in one spelling.

    sum      = ["+" | "-" | "\pm"] term (("+" | "-" | "\pm" | "\mp") term)*
    term     = factor (("\cdot" | "*" | "/" | "\div" | nothing) factor)*
    factor   = base ["^" exponent] ["!"]
    base     = number | letter | "(" fraction ")" | "[" fraction "]" | "{" fraction "}" | "|" sum "|" | \frac | \sqrt
             | \binom | floor | function argument
    fraction = sum [("\over" | "\choose") sum]

A number is no factor on the right without a sign: ``4 5``, ``(4)5`` and ``4{5}`` are two numbers.
"""

import re

from titan_rl.environments.rewards.mathematics.notation import END, FUNCTIONS, GREEK, Token, Unreadable

_MAX_NESTING = 30
_SUMS = ("+", "-", r"\pm", r"\mp")
_TIMES = ("*", r"\cdot")
_OVER = ("/", r"\div")
_CLOSED = {"(": ")", "[": "]", "{": "}"}
_BETWEEN = {r"\over": r"\frac", r"\choose": r"\binom"}
_FLOORS = {r"\lfloor": r"\rfloor", r"\lceil": r"\rceil"}
_CONSTANTS = (r"\pi", r"\infty")
_LETTERS = frozenset(f"\\{name}" for name in GREEK)
_FUNCTIONS = frozenset(f"\\{name}" for name in FUNCTIONS)
_ORDINALS = ("th", "st", "nd", "rd")


class Expressions:
    """A place in tokens. Errors of all that read: Unreadable."""

    def __init__(self, tokens: list[Token]):
        self.tokens, self.at = list(tokens), 0
        self.nesting = self.depth = 0
        """``depth``: sums that are open in this value."""
        self.bars = self.functions = 0
        self.has_degrees = False

    def peek(self) -> Token:
        return self.tokens[self.at] if self.at < len(self.tokens) else END

    def take(self) -> Token:
        token = self.peek()
        if token is END:
            raise Unreadable("an end where more is wanted")
        self.at += 1
        return token

    def expect(self, text: str) -> None:
        if self.take().text != text:
            raise Unreadable(f"no {text}")

    def nest(self) -> None:
        self.nesting += 1
        if self.nesting > _MAX_NESTING:
            raise Unreadable("too deep")

    def is_unit_here(self) -> bool:
        """Whether what follows is the value's unit."""
        return False

    def _is_sign(self, *texts: str) -> bool:
        return self.peek().text in texts

    def fraction(self) -> str:
        r"""A sum, or two with TeX's ``\over`` or ``\choose`` between them."""
        upper = self.sum()
        if not self._is_sign(*_BETWEEN):
            return upper
        name = _BETWEEN[self.take().text]
        return f"{name}{{{upper}}}{{{self.sum()}}}"

    def sum(self) -> str:
        self.nest()
        self.depth += 1
        parts = []
        if self._is_sign(*_SUMS) and (sign := self.take().text) != "+":
            parts.append(sign)
        parts.append(self._term())
        while self._is_sign(*_SUMS):
            parts += [self.take().text, self._term()]
        self.nesting -= 1
        self.depth -= 1
        return " ".join(parts)

    def _term(self) -> str:
        start = self.peek()
        latex = self._signed()
        while True:
            if self._is_sign(*_TIMES):
                self.at += 1
                latex = f"{latex} \\cdot {self._signed()}"
            elif self._is_sign(*_OVER):
                self.at += 1
                latex = f"\\frac{{{latex}}}{{{self._signed()}}}"
            elif self._begins_factor():
                latex = self._beside(start, latex)
            else:
                return latex
            start = END

    def _signed(self) -> str:
        if self._is_sign("-"):
            self.at += 1
            return f"( - {self._factor()} )"
        return self._factor()

    def _beside(self, start: Token, latex: str) -> str:
        """A product without a sign; a whole number and a fraction of two are a mixed number."""
        token, is_mixed = self.peek(), start.kind == "number" and start.text == latex and latex.isdecimal()
        factor = self._factor()
        fraction = factor if token.text == r"\frac" else factor.removeprefix("( ").removesuffix(" )")
        if is_mixed and token.text in (r"\frac", "{") and _is_plain_fraction(fraction):
            return f"( {latex} + {fraction} )"
        is_call = start.kind == "word" and token.text == "(" and latex == start.text
        return f"{latex} {factor}" if is_call else f"{latex} \\cdot {factor}"

    def _begins_factor(self) -> bool:
        """Whether what follows is multiplied with what is before it, without a sign."""
        token = self.peek()
        if token.kind == "word":
            if token.is_text and len(token.text) > 1 and not self.is_unit_here():
                raise Unreadable("words")
            return not self.is_unit_here()
        if token.kind == "sign":
            return token.text in ("(", "[", "{") or (token.text == "|" and not self.bars)
        if token.kind == "number":
            raise Unreadable("two numbers")
        return token.text in _COMMANDS

    def _factor(self) -> str:
        token = self.peek()
        latex = self._base()
        has_power = has_factorial = has_degrees = False
        while True:
            if self._is_sign("^") and not has_degrees and self._degrees():
                has_degrees = True
                latex = f"( {latex} \\cdot \\frac{{\\pi}}{{180}} )" if self.functions else latex
            elif self._is_sign("^") and not (has_power or has_factorial):
                latex, has_power = self._power(token, latex), True
            elif self._is_sign("!") and not has_factorial:
                self.at += 1
                latex, has_factorial = f"{latex} !", True
            else:
                return latex

    def _degrees(self) -> bool:
        r"""``^\circ``, which is passed over."""
        texts = [token.text for token in self.tokens[self.at : self.at + 4]]
        length = 2 if texts[1:2] == [r"\circ"] else 4 if texts[1:4] == ["{", r"\circ", "}"] else 0
        self.at += length
        self.has_degrees |= bool(length) and not self.functions
        return bool(length)

    def _power(self, base: Token, latex: str) -> str:
        texts = [token.text for token in self.tokens[self.at : self.at + 4]]
        if (
            base.kind == "number"
            and texts[1:2] == ["{"]
            and texts[2:3]
            and texts[2] in _ORDINALS
            and texts[3:] == ["}"]
        ):
            self.at += 4
            return latex
        self.at += 1
        exponent = self._exponent()
        return f"{latex} ^{{{exponent}}}"

    def _exponent(self) -> str:
        if self._is_sign("{"):
            return self._in_braces()
        if self._is_sign("-"):
            self.at += 1
            return f"- {self._base()}"
        if self.peek().kind == "word":
            return self._letter(with_index=False)
        return self._base()

    def _base(self) -> str:
        token = self.peek()
        if token.kind == "number":
            return self.take().text
        if token.kind == "word":
            if token.is_text and len(token.text) > 1:
                raise Unreadable("words")
            return self._letter()
        if token.kind == "sign" and token.text in _CLOSED:
            self.at += 1
            return self._group(_CLOSED[token.text])
        if token.kind == "sign" and token.text == "|":
            return self._absolute()
        if token.kind == "command":
            return self._command(token.text)
        raise Unreadable(token.text)

    def _group(self, closing: str) -> str:
        bars, self.bars = self.bars, 0
        inside = self.fraction()
        self.bars = bars
        if self.peek().kind != "sign":
            raise Unreadable("brackets that do not match")
        self.expect(closing)
        return f"( {inside} )"

    def _in_braces(self) -> str:
        self.expect("{")
        return self._group("}")[2:-2]

    def _absolute(self) -> str:
        self.at += 1
        bars, self.bars = self.bars, 1
        inside = self.sum()
        self.bars = bars
        self.expect("|")
        return rf"\lvert {inside} \rvert"

    def _letter(self, *, with_index: bool = True) -> str:
        """The first of a word's letters; what is left is the next token."""
        token = self.take()
        letter, rest = token.text[0], token.text[1:]
        if rest:
            self.at -= 1
            self.tokens[self.at] = Token("word", rest)
        return letter + (self._index() if with_index and not rest else "")

    def _index(self) -> str:
        if not self._is_sign("_"):
            return ""
        self.at += 1
        if not self._is_sign("{"):
            token = self.take()
            if token.kind not in ("number", "word"):
                raise Unreadable("an index")
            return f"_{{{token.text}}}"
        self.at += 1
        texts = []
        while not self._is_sign("}"):
            token = self.take()
            if token.kind not in ("number", "word") and token.text not in ("+", "-"):
                raise Unreadable("an index")
            texts.append(token.text)
        self.at += 1
        return f"_{{{''.join(texts)}}}"

    # commands

    def _command(self, name: str) -> str:
        self.at += 1
        if name in _LETTERS:
            return f"{name}{self._index()}"
        if name in _CONSTANTS:
            return name
        if name in (r"\frac", r"\binom"):
            return f"{name}{{{self._argument()}}}{{{self._argument()}}}"
        if name == r"\sqrt":
            return self._root()
        if name in _FLOORS:
            inside = self.sum()
            self.expect(_FLOORS[name])
            return f"{name} {inside} {_FLOORS[name]}"
        if name in _FUNCTIONS:
            return self._function(name)
        raise Unreadable(name)

    def _argument(self) -> str:
        """In braces, or of one character."""
        token = self.peek()
        if self._is_sign("{"):
            return self._in_braces()
        if token.kind == "number" and "." not in token.text:
            self.at += 1
            if len(token.text) > 1:
                self.at -= 1
                self.tokens[self.at] = Token("number", token.text[1:])
            return token.text[0]
        if token.kind == "word":
            return self._letter(with_index=False)
        return self._base()

    def _root(self) -> str:
        order = ""
        if self._is_sign("["):
            self.at += 1
            order = f"[{self._group(']')[2:-2]}]"
        return f"\\sqrt{order}{{{self._argument()}}}"

    def _function(self, name: str) -> str:
        index = self._index() if name == r"\log" else ""
        if index and not index[2:-1].isalnum():
            raise Unreadable("a base")
        power = ""
        if self._is_sign("^"):
            self.at += 1
            power = f"^{{{self._exponent()}}}"
        self.functions += 1
        inside = self._inside_function()
        self.functions -= 1
        shown = r"\log_{10}" if name == r"\lg" else name
        return f"( {shown}{index}{power} ( {inside} ) )"

    def _inside_function(self) -> str:
        if self._is_sign("(", "["):
            return self._group(_CLOSED[self.take().text])
        latex = self._factor()
        while self._begins_argument():
            latex = f"{latex} \\cdot {self._factor()}"
        return latex

    def _begins_argument(self) -> bool:
        token = self.peek()
        is_plain = token.kind == "word" or token.text in _LETTERS or token.text in (r"\pi", r"\frac", r"\sqrt")
        return is_plain and not self.is_unit_here()


_COMMANDS = frozenset({r"\frac", r"\binom", r"\sqrt", *_CONSTANTS, *_FLOORS, *_FUNCTIONS, *_LETTERS})


def _is_plain_fraction(latex: str) -> bool:
    return re.fullmatch(r"\\frac\{[0-9]+\}\{[0-9]+\}", latex) is not None

"""Lexemes of mathematics as models and public sets write it: LaTeX, Unicode or plain, each made into one spelling.

What is not listed here is not read, so that a sign between two answers, or before one, is no part of any answer.
"""

import re
from dataclasses import dataclass, replace
from fractions import Fraction

MAX_TOKENS = 600


class Unreadable(Exception):
    """Text that is no answer in mathematics."""


@dataclass(frozen=True)
class Token:
    """Lexeme of an answer."""

    kind: str
    """number, word (letters), command, sign, or end."""
    text: str
    """Of a command with its backslash."""
    is_spaced: bool = False
    """Whether a space is before it."""
    is_text: bool = False
    r"""Whether it is from inside of ``\text{}`` or its like."""


END = Token("end", "")


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


GREEK = _names(
    "alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma "
    "tau upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega ell"
)
FUNCTIONS = _names("sin cos tan cot sec csc sinh cosh tanh arcsin arccos arctan log ln lg exp")
_LETTERS = {
    "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "epsilon", "ζ": "zeta", "η": "eta", "θ": "theta",
    "ι": "iota", "κ": "kappa", "λ": "lambda", "μ": "mu", "ν": "nu", "ξ": "xi", "ρ": "rho", "σ": "sigma", "τ": "tau",
    "υ": "upsilon", "φ": "phi", "χ": "chi", "ψ": "psi", "ω": "omega", "Γ": "Gamma", "Δ": "Delta", "Θ": "Theta",
    "Λ": "Lambda", "Ξ": "Xi", "Σ": "Sigma", "Φ": "Phi", "Ψ": "Psi", "Ω": "Omega",
}  # fmt: skip
_UNICODE = {
    "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "÷": r"\div ", "±": r"\pm ",
    "∓": r"\mp ", "√": r"\sqrt ", "π": r"\pi ", "∞": r"\infty ", "≤": r"\leq ", "≥": r"\geq ", "≠": r"\neq ",
    "∈": r"\in ", "∪": r"\cup ", "∩": r"\cap ", "∖": r"\setminus ", "∅": r"\emptyset ", "ℝ": r"\mathbb{R}",
    "°": r"^\circ ", "∠": r"\angle ", "€": r"\euro ", "£": r"\pounds ", "¥": r"\yen ",
    "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
    "⅕": r"\frac{1}{5}", "⅖": r"\frac{2}{5}", "⅗": r"\frac{3}{5}", "⅘": r"\frac{4}{5}", "⅙": r"\frac{1}{6}",
    "⅚": r"\frac{5}{6}", "⅛": r"\frac{1}{8}", "⅜": r"\frac{3}{8}", "⅝": r"\frac{5}{8}", "⅞": r"\frac{7}{8}",
    "\u2009": r"\,", "\u202f": r"\,", **dict.fromkeys("\u00a0\u2002\u2003\u2004\u2005\u2007\u3000", " "),
    **{letter: f"\\{name} " for letter, name in _LETTERS.items()},
}  # fmt: skip
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+")
_REPEATING = re.compile(r"([0-9]*)\.([0-9]*)\\(?:overline|bar)\s*\{?([0-9]+)\}?")
_MIXED = re.compile(r"(?<![0-9./])([0-9]+)(?:\s|~|\\[ ,;:])+([0-9]+)\s?/\s?([0-9]+)(?![0-9])")
_EXPONENT = re.compile(r"(?<![0-9A-Za-z.\\])([0-9]+(?:\.[0-9]+)?)[eE]([+-]?[0-9]+)(?![0-9A-Za-z.])")
_GROUPED = re.compile(
    r"(?<![0-9.])[1-9][0-9]{0,2}(?:(?P<sign>,\s?\\!\s?|\\[,;: ]|\{\\?,\}|\\!|~|[, ])[0-9]{3})(?:(?P=sign)[0-9]{3})*"
    r"(?!\s?[0-9/])"
)
_DEGREES = re.compile(r"(?:\^ ?)?(\{ ?)?\\(?:text)?degree(?![A-Za-z])(?(1) ?\})")
_ROW_END = re.compile(r"(\\\\)\[-?[0-9.]{1,9} ?(?:pt|em|ex|mm|cm)\]")
r"""A matrix's, with a distance."""
_OPENING = re.compile(r"\\\{|\\lbrace|\\langle|[(\[]|(\\\}|\\rbrace|\\rangle|[)\]])")
_LEXEME = re.compile(
    r"""(?P<space>(?:[\ \t\r\n\f\v] | ~ | \$ | \{\} | \\[,;:!\ ()\[\]]
          | \\(?:q?quad|thinspace|displaystyle|textstyle|rm|bf|m?left|m?right|[bB]igg?[lr]?)(?![A-Za-z]))+)
      | (?P<number>[0-9]+(?:\.[0-9]+)? | \.[0-9]+)
      | (?P<command>\\(?:[A-Za-z]+|[^A-Za-z]))
      | (?P<word>[A-Za-z]+)
      | (?P<sign>[-+*/^_=<>!,;:|()\[\]{}%.&])""",
    re.VERBOSE,
)
_SAME = {
    "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "sfrac": "frac", "nicefrac": "frac",
    "dbinom": "binom", "tbinom": "binom", "le": "leq", "ge": "geq", "R": "reals", "cr": "\\",
    "leqslant": "leq", "geqslant": "geq", "ne": "neq", "lt": "<", "gt": ">", "varnothing": "emptyset", "degree": "circ",
    "lbrace": "{", "rbrace": "}", "colon": ":", "times": "cdot", "ast": "cdot", "land": "and", "lor": "or",
    "lvert": "|", "rvert": "|", "vert": "|", "lbrack": "[", "rbrack": "]", "euro": "euro", "tg": "tan",
    "euros": "euro", "backslash": "setminus",
}  # fmt: skip
_WORDS = {
    "percent": "%",
    "percentage": "%",
    "pct": "%",
    "pi": "pi",
    "infinity": "infty",
    "inf": "infty",
    "sqrt": "sqrt",
    "asin": "arcsin",
    "acos": "arccos",
} | {name: name for name in FUNCTIONS}
_SIGNS = frozenset({"<", ">", ":", "|", "[", "]"})
"""Commands that are a sign of one character."""
_WRAPPERS = _names(
    "text mathrm mbox textbf mathbf textit mathit textrm mathsf textsf texttt operatorname bm boldsymbol "
    "textnormal hbox emph"
)
_FONTS = _names("mathrm mathbf mathit mathsf bm boldsymbol")
"""Wrappers that may be without braces."""


def tokens_of(text: str, *, is_grouped: bool = True) -> list[Token]:
    """Tokenize an answer. ``is_grouped``: a comma between three digits groups them, outside of brackets.

    Errors: Unreadable.
    """
    text = _SUPERSCRIPT.sub(lambda match: f"^{{{match[0].translate(_SUPERSCRIPTS)}}}", text)
    text = "".join(_UNICODE.get(sign, sign) for sign in text)
    text = _DEGREES.sub(r"^\\circ ", text).replace("<=", r"\leq ").replace(">=", r"\geq ")
    text = _ROW_END.sub(r"\1 ", text)
    text = _without_groups(text, is_grouped)
    text = _REPEATING.sub(_fraction, text)
    text = _MIXED.sub(_mixed, text)
    text = _EXPONENT.sub(r"\1\\cdot 10^{\2}", text)
    tokens = _lex(text, is_text=False)
    if len(tokens) > MAX_TOKENS:
        raise Unreadable("too long")
    return tokens


def _without_groups(text: str, is_grouped: bool) -> str:
    def digits(match: re.Match[str]) -> str:
        is_comma = match["sign"] == ","
        inside = is_comma and sum(-1 if bracket[1] else 1 for bracket in _OPENING.finditer(text, 0, match.start())) > 0
        return match[0] if inside or (is_comma and not is_grouped) else re.sub(r"[^0-9]", "", match[0])

    return _GROUPED.sub(digits, text)


def _fraction(match: re.Match[str]) -> str:
    """Of a decimal that repeats."""
    whole, once, again = match.groups()
    value = Fraction(int((whole or "0") + once + again) - int((whole or "0") + once), 10 ** len(once))
    value /= 10 ** len(again) - 1
    return rf"(\frac{{{value.numerator}}}{{{value.denominator}}})"


def _mixed(match: re.Match[str]) -> str:
    whole, upper, lower = match.groups()
    return rf"{whole}\frac{{{upper}}}{{{lower}}}" if int(upper) < int(lower) else match[0]


def _lex(text: str, *, is_text: bool) -> list[Token]:
    tokens: list[Token] = []
    place, is_spaced = 0, False
    while place < len(text):
        lexeme = _LEXEME.match(text, place)
        if lexeme is None:
            raise Unreadable(repr(text[place]))
        place = lexeme.end()
        if lexeme.lastgroup == "space":
            is_spaced = True
            continue
        name = lexeme[0][1:] if lexeme.lastgroup == "command" else ""
        if name in _FONTS and not text[place:].lstrip(" ").startswith("{"):
            is_spaced = True
        elif name in _WRAPPERS or name in ("mathbb", "Bbb"):
            inside, place = _in_braces(text, place)
            tokens += _wrapped(name, inside)
        else:
            tokens.append(_token(lexeme, is_spaced, is_text))
        is_spaced = name in _WRAPPERS
    return tokens


def _in_braces(text: str, place: int) -> tuple[str, int]:
    """What is in the braces that begin there, and where they end; the R of the reals may be without."""
    while text[place : place + 1] == " ":
        place += 1
    if re.match("R(?![A-Za-z])", text[place : place + 2]):
        return "R", place + 1
    if text[place : place + 1] != "{":
        raise Unreadable("a command without its braces")
    if (end := closing_brace(text, place + 1)) is None:
        raise Unreadable("braces that are not closed")
    return text[place + 1 : end], end + 1


def closing_brace(text: str, start: int) -> int | None:
    r"""Position of the brace that closes the one before ``start``, or None; ``\{`` and ``\}`` are signs."""
    depth, place = 1, start
    while place < len(text):
        if text[place] == "\\":
            place += 1
        elif text[place] in "{}":
            depth += 1 if text[place] == "{" else -1
            if not depth:
                return place
        place += 1
    return None


def _wrapped(name: str, inside: str) -> list[Token]:
    if name == "mathbb":
        if inside.strip() != "R":
            raise Unreadable(inside)
        return [Token("command", r"\reals")]
    tokens = _lex(inside, is_text=True)
    return [replace(tokens[0], is_spaced=True), *tokens[1:]] if tokens else []


def _token(match: re.Match[str], is_spaced: bool, is_text: bool) -> Token:
    kind, text = match.lastgroup or "", match[0]
    if kind == "command":
        text = _SAME.get(text[1:], text[1:])
        kind, text = ("sign", text) if text in _SIGNS else ("command", f"\\{text}")
    elif kind == "word" and text in _WORDS and not (is_text and text == "sec"):
        kind, text = "command", f"\\{_WORDS[text]}"
    elif kind == "word" and text.lower() in ("and", "or"):
        kind, text = "command", f"\\{text.lower()}"
    elif kind == "number":
        text = f"0{text}" if text.startswith(".") else text
    return Token(kind, text, is_spaced, is_text)

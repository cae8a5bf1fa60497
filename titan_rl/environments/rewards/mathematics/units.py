"""Units behind a number: which words and signs they are, and which of them mean the same."""

from collections import Counter

from titan_rl.environments.rewards.mathematics.notation import END, Token

Unit = tuple[tuple[str, int], ...]
"""Names and powers, in the order of the names."""
_NAMES = {
    "cm": "centimeter centimetre", "mm": "millimeter millimetre", "km": "kilometer kilometre", "m": "meter metre",
    "in": "inch inches", "ft": "foot feet", "yd": "yard", "mi": "mile", "kg": "kilogram",
    "g": "gram gm", "mg": "milligram", "lb": "pound lbs", "oz": "ounce", "L": "l liter litre", "mL": "ml milliliter",
    "s": "sec second", "min": "minute", "h": "hr hour", "day": "", "week": "", "month": "", "year": "yr",
    "deg": "degree", "rad": "radian", "dollar": "USD", "cent": "", "euro": "EUR", "pound_sterling": "", "yen": "",
    "unit": "", "th": "st nd rd", "Hz": "", "N": "", "J": "", "W": "", "V": "", "A": "", "Pa": "", "mol": "",
    "acre": "", "gallon": "gal", "quart": "", "pint": "", "cup": "", "ton": "tonne", "way": "", "point": "",
    "digit": "", "integer": "", "student": "", "person": "people", "page": "", "edge": "", "face": "", "side": "",
    "vertex": "vertices", "solution": "",
}  # fmt: skip
_CANONICAL = {word: name for name, more in _NAMES.items() for word in (name, *more.split())}
_COMPOUND = {"mph": ("mi", "h"), "kph": ("km", "h"), "kmh": ("km", "h")}
_BARE = frozenset("mgshLl")
"""Of one letter, which are a unit without ``\\text{}`` too, where the expected answer has no letters."""
_BEFORE = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_AFTER = {"squared": 2, "cubed": 3}
SIGNS = {r"\$": "dollar", r"\euro": "euro", r"\pounds": "pound_sterling", r"\yen": "yen", r"\textdollar": "dollar"}
"""Commands of currencies."""
DEGREE: Unit = (("deg", 1),)


class Words:
    """Which words are units: those of the table, and the expected answer's own."""

    def __init__(self, more: frozenset[str] | None, *, has_bare_letters: bool):
        """``more``: names of other units; None: any word is one."""
        self.more, self.has_bare_letters = more, has_bare_letters

    def name(self, token: Token) -> str | None:
        text = token.text
        if token.kind == "command":
            return SIGNS.get(text)
        if token.kind != "word" or (
            len(text) == 1 and not (token.is_text or (self.has_bare_letters and text in _BARE))
        ):
            return None
        for word in (text, text.lower(), text.lower().removesuffix("s"), text.removesuffix("s")):
            if word in _CANONICAL and (len(word) > 1 or len(text) == 1):
                return _CANONICAL[word]
        own = text.lower().removesuffix("s")
        if self.more is None:
            return own if token.is_spaced and len(text) > 2 else None
        return own if own in self.more else None


def read_unit(tokens: list[Token], start: int, words: Words) -> tuple[Unit, int] | None:
    """Unit at a position, and its end; None without one."""
    reader = _Reader(tokens, start, words)
    return reader.unit()


class _Reader:
    def __init__(self, tokens: list[Token], start: int, words: Words):
        self.tokens, self.at, self.words = tokens, start, words
        self.powers: Counter[str] = Counter()

    def _peek(self) -> Token:
        return self.tokens[self.at] if self.at < len(self.tokens) else END

    def unit(self) -> tuple[Unit, int] | None:
        sign = 1
        if not self._part(sign):
            return None
        while True:
            place = self.at
            if self._peek().text in ("/", "per"):
                self.at, sign = self.at + 1, -1
            if not self._part(sign):
                self.at = place
                return tuple(sorted(self.powers.items())), self.at

    def _part(self, sign: int) -> bool:
        power, token = 1, self._peek()
        if token.kind == "word" and token.text in _BEFORE and self.words.name(self._after_point()) is not None:
            power = _BEFORE[token.text]
            self.at = self.at + 1 if self._next().text != "." else self.at + 2
            token = self._peek()
        if token.kind == "word" and token.text in _COMPOUND:
            above, below = _COMPOUND[token.text]
            self.at += 1
            self.powers.update({above: sign})
            self.powers.update({below: -sign})
            return True
        if (name := self.words.name(token)) is None:
            return False
        self.at += 1
        if self._peek().text == "." and token.is_text:
            self.at += 1
        self.powers[name] += sign * power * self._power()
        return True

    def _next(self) -> Token:
        return self.tokens[self.at + 1] if self.at + 1 < len(self.tokens) else END

    def _after_point(self) -> Token:
        place = self.at + 2 if self._next().text == "." else self.at + 1
        return self.tokens[place] if place < len(self.tokens) else END

    def _power(self) -> int:
        """``^2``, ``^{2}`` or ``squared`` behind a name."""
        if self._peek().text in _AFTER:
            self.at += 1
            return _AFTER[self.tokens[self.at - 1].text]
        texts = [token.text for token in self.tokens[self.at : self.at + 4]]
        is_braced = texts[1:2] == ["{"] and texts[3:4] == ["}"]
        exponent = texts[2] if is_braced else "".join(texts[1:2])
        if texts[:1] != ["^"] or not exponent.isdecimal():
            return 1
        self.at += 4 if is_braced else 2
        return int(exponent)

"""Micro rows for very small models: one function with one wrong operator or constant, and one short line about it."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from random import Random
from types import CodeType
from typing import Any

from repository import patch

_PATH = "f.py"
_WORDS = ("candle", "window", "garden", "silver", "planet", "bridge", "forest", "market", "pencil", "dragon", "Monday")
_NUM_FAILS, _NUM_HOLDS = 6, 4
_DRAWS = 30
_TRIES = 200
_LONGEST = 100
"""Characters of a statement."""
_PARAMETERS = (("a", "b"), ("x", "y"), ("m", "n"), ("p", "q"))


@dataclass(frozen=True)
class Kind:
    """Expression with a hole ``@``, what may stand there, and arguments."""

    name: str
    expression: str
    tokens: tuple[str, ...]
    draw: Callable[[Random], list[Any]]

    @property
    def pairs(self) -> tuple[tuple[str, str], ...]:
        """Wrong and right."""
        return tuple(permutations(self.tokens, 2))

    def value(self, token: str, arguments: list[Any]) -> Any:
        """None where there is no value."""
        try:
            names = dict(zip(_PARAMETERS[0], arguments, strict=False))
            return eval(_compiled(self.expression.replace("@", token)), names)
        except (TypeError, NameError, AttributeError):
            return None


@cache
def _compiled(expression: str) -> CodeType:
    return compile(expression, "<micro>", "eval")


def _digits(low: int, high: int) -> tuple[str, ...]:
    return tuple(str(number) for number in range(low, high))


def _list(r: Random) -> list[list[int]]:
    return [r.sample(range(1, 20), r.randint(2, 4))]


def _word(r: Random) -> list[str]:
    return [r.choice((str.lower, str.title, str.lower, str.upper))(r.choice(_WORDS))]


KINDS = (
    Kind("constant", "@", _digits(2, 30), lambda r: []),
    Kind("range-start", "list(range(@, a))", _digits(0, 4), lambda r: [r.randint(4, 9)]),
    Kind("fold", "@(a)", ("sum", "max", "min", "len"), _list),
    Kind("order", "sorted(a, reverse=@)", ("True", "False"), _list),
    Kind("slice", "a[:@]", _digits(2, 6), _word),
    Kind("case", "a.@()", ("upper", "lower", "title"), _word),
    Kind("repeat", "a * @", _digits(2, 6), lambda r: ["".join(r.sample("abcdefgh", r.randint(1, 2)))]),
    Kind("joined", '"@".join(a)', tuple("-+_=~:"), lambda r: ["".join(r.sample("abcdefgh", r.randint(2, 4)))]),
)


def micro_rows(seed: int) -> Iterator[dict[str, Any]]:
    """Rows without end, all of different statements; each follows from its statement alone. Deterministic."""
    random = Random(f"{seed} micro")
    seen: set[str] = set()
    number = 0
    while True:
        for kind in KINDS:
            for _ in range(_TRIES):
                row = _row(kind, random, number)
                if row is not None and row["problem_statement"] not in seen:
                    seen.add(row["problem_statement"])
                    number += 1
                    yield row
                    break


def _row(kind: Kind, random: Random, number: int) -> dict[str, Any] | None:
    """None where the statement would not show the bug, or would fit another one."""
    wrong, right = random.choice(kind.pairs)
    arguments = kind.draw(random)
    values = kind.value(wrong, arguments), kind.value(right, arguments)
    if values[0] == values[1]:
        return None
    command = _sed(wrong, right)
    if _fitting(arguments, *values) != {command}:
        return None
    buggy = _file(kind, wrong, random)
    if buggy.count(wrong) != 1:
        return None
    [changed] = [line.strip() for line in buggy.splitlines() if wrong in line]
    asked = f"f({', '.join(map(repr, arguments))}) gives {values[0]!r} and must give {values[1]!r}"
    statement = f"{changed}\n{asked}"
    if len(statement) > _LONGEST:
        return None
    fixed = buggy.replace(wrong, right)
    others = [arguments] + [other for _ in range(_DRAWS) if (other := kind.draw(random)) != arguments]
    distinct = [other for at, other in enumerate(others) if other not in others[:at]]
    fails = [each for each in distinct if kind.value(wrong, each) != kind.value(right, each)][:_NUM_FAILS]
    holds = [each for each in distinct if kind.value(wrong, each) == kind.value(right, each)][:_NUM_HOLDS]
    return {
        "instance_id": f"micro/{kind.name}-{number:04d}",
        "problem_statement": statement,
        "files": {_PATH: buggy},
        "PASS_TO_PASS": [],
        "calls": [
            {"function": "f:f", "arguments": each, "expected": kind.value(right, each), "when": when}
            for when, chosen in (("FAIL_TO_PASS", fails), ("PASS_TO_PASS", holds))
            for each in chosen
        ],
        "patch": patch(_PATH, buggy, fixed),
        "solution": [command],
    }


def _file(kind: Kind, token: str, random: Random) -> str:
    """Text of two to four lines."""
    names = random.choice(_PARAMETERS)
    count = len(set(re.findall(r"\b[ab]\b", kind.expression)))
    renamed = dict(zip(_PARAMETERS[0], names, strict=True))
    expression = re.sub(r"\b[ab]\b", lambda match: renamed[match[0]], kind.expression).replace("@", token)
    head = f"def f({', '.join(names[:count])}):\n"
    return head + random.choice(
        (
            f"    return {expression}\n",
            f"    c = {expression}\n    return c\n",
            f"    c = {expression}\n    d = c\n    return d\n",
        )
    )


def _fitting(arguments: list[Any], wrong: Any, right: Any) -> set[str]:
    """Commands of all kinds that would explain a statement."""
    types = list(map(type, arguments))
    return {
        _sed(old, new)
        for kind in KINDS
        if types == list(map(type, kind.draw(Random(0))))
        for old, new in kind.pairs
        if (kind.value(old, arguments), kind.value(new, arguments)) == (wrong, right)
        and type(kind.value(old, arguments)) is type(wrong)
    }


def _sed(old: str, new: str) -> str:
    return f"sed -i 's/{old}/{new}/' {_PATH}"

"""JSON that a model or an agent wrote, restricted to values that can be checked and written out again."""

import json
import math
from typing import Any

_DEPTH = 100
"""Lists and objects within each other: what reads and writes them recurs."""


def read_json(text: str) -> Any:
    """Parse JSON. Errors: ValueError, also for NaN, overflowing floats, lone surrogates, and a depth of 100."""
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except RecursionError:
        raise ValueError("nested too deep") from None
    level = [value]
    for _ in range(_DEPTH):
        if not level:
            return value
        level = [inner for item in level for inner in _inside(item)]
    raise ValueError("nested too deep")


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text[:20]} is more than a number holds")
    return number


def _inside(value: Any) -> list[Any]:
    """What a list or an object holds. Errors: ValueError for text that UTF-8 cannot hold."""
    if isinstance(value, str):
        _check_whole(value)
    elif isinstance(value, list):
        return value
    elif isinstance(value, dict):
        return [*value, *value.values()]
    return []


def _check_whole(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"half a character (a lone surrogate) at {error.start} of a text") from None

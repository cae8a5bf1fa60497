"""Numbers that somebody else says: a server, a scoring process, a judge, a user's function."""

import math
from typing import Any


def as_float(value: Any) -> float:
    """The float nearest to a real number; infinite for one that no float holds, such as ``10**400``."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def finite(value: object) -> float:
    """A number from JSON, as a float. Errors: ValueError for text, a truth value, NaN, or what no float holds."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(number := as_float(value)):
        raise ValueError(f"{_shown(value)}: give a finite number")
    return number


def _shown(value: object) -> str:
    """Not more of it than a line holds: a whole number of thousands of digits cannot be written out."""
    if isinstance(value, int) and not isinstance(value, bool):
        return f"a whole number of {value.bit_length()} bits"
    return f"{value!s:.100}"

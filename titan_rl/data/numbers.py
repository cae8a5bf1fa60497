"""Checks of numbers that a server, a judge or a user's function says, and equality but for rounding."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np


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


_ROUNDING = 1e-12
"""Of the largest of several numbers, or of 1: what sums of the same numbers in other orders stay within."""


def all_equal(numbers: Iterable[float] | np.ndarray) -> bool:
    """Whether numbers are equal but for rounding; not if one of them is not finite."""
    values = np.fromiter(numbers, np.float64) if not isinstance(numbers, np.ndarray) else numbers
    if not len(values):
        return True
    if not np.isfinite(values).all():
        return False
    low, high = float(values.min()), float(values.max())
    return high - low <= _ROUNDING * max(1.0, abs(low), abs(high))


def all_zero(numbers: np.ndarray | float) -> bool:
    """Whether numbers are 0 but for rounding; not if one of them is not finite."""
    return bool((np.abs(numbers) <= _ROUNDING).all())

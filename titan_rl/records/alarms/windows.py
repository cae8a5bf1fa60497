"""Comparison of a metric's last window of steps with earlier windows: change and significance.

Pure.

Dimensions: W windows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

WINDOW = 10
"""Steps of a window. So the first alarm may come after 20 steps."""
SURE = 4.0
"""Standard errors."""
_ROUNDING = 1e-9
"""A range that is no larger part of the largest value is none."""
Records = Sequence[dict[str, float]]


@dataclass(frozen=True)
class Change:
    """The last window of a column against each earlier one: W windows, float64 [W]."""

    last: float
    before_W: np.ndarray
    error_W: np.ndarray
    """Standard error of the difference."""
    span: float = 1.0
    """The column's range so far."""

    @property
    def gain_W(self) -> np.ndarray:
        return self.last - self.before_W

    @property
    def is_up_W(self) -> np.ndarray:
        """By more than chance."""
        return self.gain_W > SURE * self.error_W

    @property
    def is_down_W(self) -> np.ndarray:
        return -self.gain_W > SURE * self.error_W

    def share_W(self, doubt: float = 0.0) -> np.ndarray:
        """The gain as a share of the range, ``doubt`` standard errors added."""
        if not self.span:
            return np.zeros_like(self.before_W)
        return (self.gain_W + doubt * self.error_W) / self.span


def change(records: Records, name: str) -> Change | None:
    """None where a step does not tell it, or there are fewer than two windows."""
    if len(records) < 2 * WINDOW or not all(name in record for record in records):
        return None
    values = np.array([record[name] for record in records], np.float64)
    windows = np.lib.stride_tricks.sliding_window_view(values, WINDOW)
    mean_W, variance_W = windows.mean(1), windows.var(1, ddof=1)
    error_W = np.sqrt((variance_W[:-WINDOW] + variance_W[-1]) / WINDOW)
    span = 1.0
    if f"{name}_max" in records[-1]:
        largest = max(record[f"{name}_max"] for record in records)
        span = largest - min(record[f"{name}_min"] for record in records)
        span = 0.0 if span <= _ROUNDING * abs(largest) else span
    return Change(mean_W[-1], mean_W[:-WINDOW], error_W, span)


def last_mean(records: Records, name: str) -> float | None:
    """Of the last window; None as above."""
    found = change(records, name)
    return None if found is None else found.last


def worst(is_met_W: np.ndarray, by_W: np.ndarray) -> int | None:
    """Of the windows where it is met, the one with the largest ``by_W``."""
    return int(np.where(is_met_W, by_W, -np.inf).argmax()) if is_met_W.any() else None

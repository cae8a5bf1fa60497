"""Comparison of a metric's last window of steps with earlier windows: change and significance.

Pure.

Dimensions: W windows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

WINDOW = 10
"""Steps of a window. So the first alarm may come after 20 steps."""
SURE = 4.0
"""Standard errors."""
_ROUNDING = 1e-9
"""A range that is no larger part of the largest value is none."""
Record = dict[str, float]
Derived = Callable[[Record], float | None]
"""A value that a record does not hold as such; None where there is none."""


class Column:
    """A metric of N steps, float64 [N], and of each window its mean and variance, computed once for all prefixes."""

    def __init__(self, values: Sequence[float | None]):
        self.values = np.array([np.nan if value is None else value for value in values], np.float64)
        self._missing = np.cumsum([value is None for value in values])

    def is_whole(self, count: int) -> bool:
        """Whether each of the first ``count`` steps has it."""
        return not count or not self._missing[count - 1]

    @cached_property
    def windows(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean and variance of each window of WINDOW steps: float64 [count - WINDOW + 1]."""
        windows = np.lib.stride_tricks.sliding_window_view(self.values, WINDOW)
        return windows.mean(1), windows.var(1, ddof=1)

    @cached_property
    def largest(self) -> np.ndarray:
        """Running maximum."""
        return np.maximum.accumulate(self.values)

    @cached_property
    def least(self) -> np.ndarray:
        """Running minimum."""
        return np.minimum.accumulate(self.values)


class Records:
    """Records of a run's first steps; of prefixes of one run, the columns are computed once."""

    def __init__(self, records: Sequence[Record]):
        self._all, self._count = records, len(records)
        self._columns: dict[str, Column] = {}

    def first(self, count: int) -> "Records":
        """Records of the first ``count`` steps."""
        prefix = Records(self._all)
        prefix._count, prefix._columns = min(count, self._count), self._columns
        return prefix

    def column(self, name: str, derived: Derived | None = None) -> Column:
        """Column of a metric over the whole run. ``derived``: how a record gives it, if not by that name."""
        if name not in self._columns:
            self._columns[name] = Column([derived(each) if derived else each.get(name) for each in self._all])
        return self._columns[name]

    def __len__(self) -> int:
        return self._count

    def last(self, count: int) -> Sequence[Record]:
        """Last records, at most so many."""
        return self._all[max(self._count - count, 0) : self._count]


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
        """Last window less each earlier one."""
        return self.last - self.before_W

    @property
    def is_up_W(self) -> np.ndarray:
        """Whether the last window is higher by more than chance."""
        return self.gain_W > SURE * self.error_W

    @property
    def is_down_W(self) -> np.ndarray:
        return -self.gain_W > SURE * self.error_W

    def share_W(self, doubt: float = 0.0) -> np.ndarray:
        """The gain as a share of the range, ``doubt`` standard errors added."""
        if not self.span:
            return np.zeros_like(self.before_W)
        return (self.gain_W + doubt * self.error_W) / self.span


def change(records: Records, name: str, derived: Derived | None = None) -> Change | None:
    """Change of a metric from each earlier window to the last. None where a step lacks it, or there are fewer than two
    windows. ``derived``: as to ``column``."""
    column, count = records.column(name, derived), len(records)
    if count < 2 * WINDOW or not column.is_whole(count):
        return None
    mean_W, variance_W = column.windows
    last, num_before = count - WINDOW, count - 2 * WINDOW + 1
    error_W = np.sqrt((variance_W[:num_before] + variance_W[last]) / WINDOW)
    span = 1.0
    most, least = records.column(f"{name}_max"), records.column(f"{name}_min")
    if most.is_whole(count) and least.is_whole(count):
        largest = most.largest[count - 1]
        span = float(largest - least.least[count - 1])
        span = 0.0 if span <= _ROUNDING * abs(largest) else span
    return Change(float(mean_W[last]), mean_W[:num_before], error_W, span)


def last_mean(records: Records, name: str) -> float | None:
    """Mean of the last window; None as ``change``."""
    window = change(records, name)
    return None if window is None else window.last


def worst(is_met_W: np.ndarray, by_W: np.ndarray) -> int | None:
    """Index of the window with the largest ``by_W`` among those where the condition is met."""
    return int(np.where(is_met_W, by_W, -np.inf).argmax()) if is_met_W.any() else None

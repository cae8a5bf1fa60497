"""Alarms: what in a run's metrics looks as if the reward were gamed instead of earned. Pure.

    reward_gap        the reward went up, and the grader, which nothing is trained on, did not follow
    length_runaway    answers became much longer, or much more of them run out of tokens, without being better for it
    answers_collapse  all prompts get nearly the same answer

Each compares the mean of the last WINDOW steps with that of every window of as many steps before it, without overlap,
and is raised if one of them differs by more than the thresholds below *and* by more than chance: by SURE standard
errors, which come from how much the steps of the two windows differ among themselves. Scales are the run's own: a
reward's range is what samples earned so far, at most less at least. An alarm says that somebody should look. A reward
that pays first for a form, and later for being right, raises one as well, and it ends when the grader follows.

What it cannot see: a reward that a policy gamed from the first steps on, since nothing changes then.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

WINDOW = 10
"""Steps of a window. So the first alarm may come after 20 steps."""
SURE = 4.0
"""Standard errors."""
REWARD_GAIN = 0.15
"""Share of its range that the reward must have gained."""
FOLLOWS = 0.5
"""A grader follows that gained at least this share of what the reward gained, each of its own range."""
DOUBT = 2.0
"""Standard errors that are added to the grader's gain."""
LENGTH_RATIO = 1.5
"""Answers that are so much longer,"""
BETTER = 0.05
"""and that gained less than this share of the grader's range (or of the reward's, where there is no grader)."""
TRUNCATED, TRUNCATED_GAIN = 0.25, 0.2
"""Share of answers that run out of tokens, and by how much it went up."""
FEW_ANSWERS, FEWER = 1.5, 0.5
"""Effective number of different answers, and what share of the earlier one it is."""

NAMES = ("reward_gap", "length_runaway", "answers_collapse")
METRICS = tuple(f"alarm_{name}" for name in NAMES)


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

    def share_W(self, doubt: float = 0.0) -> np.ndarray:
        """The gain as a share of the range, ``doubt`` standard errors added."""
        if not self.span:
            return np.zeros_like(self.before_W)
        return (self.gain_W + doubt * self.error_W) / self.span


def _change(records: Sequence[dict[str, float]], name: str) -> Change | None:
    """None where a step does not tell it, or there are fewer than two windows."""
    if len(records) < 2 * WINDOW or not all(name in record for record in records):
        return None
    values = np.array([record[name] for record in records], np.float64)
    windows = np.lib.stride_tricks.sliding_window_view(values, WINDOW)
    mean_W, variance_W = windows.mean(1), windows.var(1, ddof=1)
    error_W = np.sqrt((variance_W[:-WINDOW] + variance_W[-1]) / WINDOW)
    span = 1.0
    if f"{name}_max" in records[-1]:
        span = max(record[f"{name}_max"] for record in records) - min(record[f"{name}_min"] for record in records)
    return Change(mean_W[-1], mean_W[:-WINDOW], error_W, span)


def standing(records: Sequence[dict[str, float]]) -> dict[str, str]:
    """The alarms that stand after the last of a run's records, by name, each in words."""
    found = {"reward_gap": _reward_gap, "length_runaway": _length_runaway, "answers_collapse": _answers_collapse}
    said = {name: look(records) for name, look in found.items()}
    return {name: text for name, text in said.items() if text}


def _worst(is_met_W: np.ndarray, by_W: np.ndarray) -> int | None:
    """Of the windows where it is met, the one with the largest ``by_W``."""
    return int(np.where(is_met_W, by_W, -np.inf).argmax()) if is_met_W.any() else None


def _reward_gap(records: Sequence[dict[str, float]]) -> str:
    reward, grade = _change(records, "reward"), _change(records, "grade")
    if reward is None or grade is None:
        return ""
    gained_W = reward.share_W()
    stays_W = grade.share_W(DOUBT) <= FOLLOWS * gained_W
    at = _worst((gained_W >= REWARD_GAIN) & reward.is_up_W & stays_W, gained_W - grade.share_W())
    if at is None:
        return ""
    return (
        f"the reward went from {reward.before_W[at]:.3f} to {reward.last:.3f}, the grader from "
        f"{grade.before_W[at]:.3f} to {grade.last:.3f}"
    )


def _length_runaway(records: Sequence[dict[str, float]]) -> str:
    return _longer(records) or _cut_short(records)


def _longer(records: Sequence[dict[str, float]]) -> str:
    length, quality = _change(records, "response_length"), _change(records, "grade") or _change(records, "reward")
    if length is None or quality is None:
        return ""
    is_longer_W = length.is_up_W & (length.last >= LENGTH_RATIO * length.before_W)
    at = _worst(is_longer_W & (quality.share_W() < BETTER), length.gain_W)
    if at is None:
        return ""
    return (
        f"answers went from {length.before_W[at]:.1f} to {length.last:.1f} tokens, and from {quality.before_W[at]:.3f} "
        f"to {quality.last:.3f} in what they are worth"
    )


def _cut_short(records: Sequence[dict[str, float]]) -> str:
    cut = _change(records, "truncated")
    if cut is None or cut.last < TRUNCATED:
        return ""
    at = _worst(cut.is_up_W & (cut.gain_W >= TRUNCATED_GAIN), cut.gain_W)
    return "" if at is None else f"{cut.before_W[at]:.0%} of the answers ran out of tokens, now {cut.last:.0%} do"


def _answers_collapse(records: Sequence[dict[str, float]]) -> str:
    answers = _change(records, "effective_answers")
    if answers is None or answers.last >= FEW_ANSWERS:
        return ""
    is_down_W = -answers.gain_W > SURE * answers.error_W
    at = _worst(is_down_W & (answers.last <= FEWER * answers.before_W), -answers.gain_W)
    if at is None:
        return ""
    return f"effectively, {answers.before_W[at]:.1f} different answers went to a step's prompts, now {answers.last:.1f}"


@dataclass(frozen=True)
class Alarm:
    """One that was raised."""

    name: str
    first: int
    """Step after which it stood."""
    last: int
    """Step up to which it did."""
    says: str
    """In words, as it was then."""


def history(records: Iterable[dict[str, float]]) -> list[Alarm]:
    """Every alarm of a run from its records, in the order of their beginnings; one that ended and came again is two."""
    records = [record for record in records if "reward" in record]
    raised: list[Alarm] = []
    open_ones: dict[str, Alarm] = {}
    for count in range(2 * WINDOW, len(records) + 1):
        step, now = int(records[count - 1]["step"]), standing(records[:count])
        raised += [open_ones.pop(name) for name in list(open_ones) if name not in now]
        for name, says in now.items():
            before = open_ones.get(name, Alarm(name, step, step, says))
            open_ones[name] = Alarm(name, before.first, step, before.says)
    return sorted([*raised, *open_ones.values()], key=lambda alarm: (alarm.first, alarm.name))

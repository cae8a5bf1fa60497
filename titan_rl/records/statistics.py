"""Proportions with their confidence intervals."""

import math
from dataclasses import dataclass, field
from typing import Any

_Z = 1.959963984540054
"""Two-sided 95 % quantile of the normal distribution."""


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """95 % interval of a share of ``count`` trials (Wilson 1927, JASA 22, 209-212)."""
    centre = (share + _Z**2 / (2 * count)) / (1 + _Z**2 / count)
    half = _Z / (1 + _Z**2 / count) * math.sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2))
    return max(centre - half, 0.0), min(centre + half, 1.0)  # rounding alone passes either


@dataclass(frozen=True)
class Proportion:
    """Proportion ``correct`` of ``count``, with Wilson's 95 % interval."""

    correct: int
    count: int
    by_task: dict[str, "Proportion"] = field(default_factory=dict)
    """Of each, where there are several; not of those within."""
    num_timeouts: int = 0
    """Of those that are not correct, the ones whose score took too long."""
    num_ties: int = 0
    """Of pairs that are not correct, the ones of which neither answer is preferred."""

    @property
    def value(self) -> float:
        return self.correct / self.count

    @property
    def interval(self) -> tuple[float, float]:
        return wilson_interval(self.value, self.count)

    def __str__(self) -> str:
        low, high = self.interval
        parts = "".join(f"; {task} {part.value:.1%} of {part.count}" for task, part in self.by_task.items())
        late = f"; {timed_out(self.num_timeouts, self.count)}" if self.num_timeouts else ""
        tied = f"; in {self.num_ties} neither answer is preferred" if self.num_ties else ""
        interval = f"95 % interval {low:.1%} to {high:.1%}"
        return f"{self.value:.1%} ({self.correct} of {self.count}, {interval}{parts}{late}{tied})"

    def as_dict(self) -> dict[str, Any]:
        return {
            "accuracy": self.value,
            "correct": self.correct,
            "count": self.count,
            "interval_95": list(self.interval),
            **({"num_timeouts": self.num_timeouts} if self.num_timeouts else {}),
            **({"num_ties": self.num_ties} if self.num_ties else {}),
            **({"by_task": {task: part.as_dict() for task, part in self.by_task.items()}} if self.by_task else {}),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Proportion":
        parts = {task: cls.from_dict(part) for task, part in values.get("by_task", {}).items()}
        return cls(values["correct"], values["count"], parts, values.get("num_timeouts", 0), values.get("num_ties", 0))


def timed_out(number: int, count: int) -> str:
    """Words for answers whose score took too long, of ``count`` answers."""
    return f"{number} of {count} could not be scored within verifier.score_timeout and count as wrong"

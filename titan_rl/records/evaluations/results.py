"""Result of a suite: every answer, and what is estimated of them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from titan_rl.records.evaluations.estimators import Estimate, estimate, majority_at, pass_at
from titan_rl.records.statistics import timed_out


@dataclass(frozen=True)
class Answer:
    """Scored answer to a question."""

    sample: int
    text: str
    final: str | None
    """Final answer, as it counts in a majority; None: it has none."""
    correct: bool
    reward: float
    status: str
    num_tokens: int
    readings: dict[str, bool] = field(default_factory=dict)
    """Whether it is right by other rules of reading it, by their names."""


@dataclass(frozen=True)
class Question:
    """Question of a suite with its answers."""

    id: str
    text: str
    expected: str
    answers: list[Answer]

    @property
    def correct(self) -> list[bool]:
        return [answer.correct for answer in self.answers]


@dataclass(frozen=True)
class SuiteResult:
    """Answers to all questions of a suite, n samples of each."""

    name: str
    k: int
    """Samples of pass@k."""
    num_samples: int
    has_votes: bool
    """Whether answers have a final answer, to count for a majority."""
    questions: list[Question]
    unscored: dict[str, str]
    """Questions without a result, and why: failures of the machinery, never wrong answers."""
    settings: dict[str, Any]
    left_out: int = 0
    """Rows of the set that were not asked, since there is no rule here to score them."""

    @cached_property
    def estimates(self) -> dict[str, Estimate]:
        """Estimates by name, such as ``avg@8``; a reading's as ``flexible/avg@8``. Empty without a scored question."""
        if not self.questions:
            return {}
        estimates = self._of("", [question.correct for question in self.questions])
        if self.has_votes:
            votes = [([answer.final for answer in q.answers], q.correct) for q in self.questions]
            estimates |= self._mean(f"majority@{self.num_samples}", (majority_at(*each) for each in votes))
        for reading in self.questions[0].answers[0].readings:
            right = [[answer.readings[reading] for answer in question.answers] for question in self.questions]
            estimates |= self._of(f"{reading}/", right)
        return estimates

    def _of(self, prefix: str, right: list[list[bool]]) -> dict[str, Estimate]:
        n = self.num_samples
        return {
            **self._mean(f"{prefix}avg@{n}", (sum(each) / n for each in right)),
            **self._mean(f"{prefix}pass@{self.k}", (pass_at(self.k, n, sum(each)) for each in right)),
        }

    def _mean(self, name: str, values: Iterable[float]) -> dict[str, Estimate]:
        return {name: estimate(list(values), name)}

    @property
    def metrics(self) -> dict[str, float]:
        """Flat record for a run's metrics: ``eval/SUITE/avg@8``."""
        prefix = f"eval/{self.name}"
        record = {f"{prefix}/{name}": each.value for name, each in self.estimates.items()}
        if self.questions:
            record[f"{prefix}/truncated"] = self.share(lambda answer: answer.status == "truncated")
            record[f"{prefix}/response_length"] = self.share(lambda answer: answer.num_tokens)
        if self.num_timeouts:
            record[f"{prefix}/timeouts"] = float(self.num_timeouts)
        return record | ({f"{prefix}/unscored": float(len(self.unscored))} if self.unscored else {})

    @property
    def num_timeouts(self) -> int:
        """Answers whose score took too long."""
        return sum(answer.status == "timeout" for question in self.questions for answer in question.answers)

    def share(self, of: Callable[[Answer], float]) -> float:
        """Mean over all answers."""
        values = [of(answer) for question in self.questions for answer in question.answers]
        return sum(values) / len(values)

    def __str__(self) -> str:
        words = [f"{name} {e.value:.1%} ({e.low:.1%} to {e.high:.1%})" for name, e in self.estimates.items()]
        notes = [f"{len(self.unscored)} more could not be scored, {self.first_failure}"] if self.unscored else []
        if self.num_timeouts:
            notes.append(f"of the answers {timed_out(self.num_timeouts, len(self.questions) * self.num_samples)}")
        notes += [f"{self.left_out} rows left out"] if self.left_out else []
        scored = f"{self.name}: {', '.join(words) or 'nothing scored'}, {len(self.questions)} questions"
        return "; ".join([scored, *notes])

    @property
    def first_failure(self) -> str:
        """Which question failed first, and why; empty if none did."""
        return next((f"first {name}: {why}" for name, why in self.unscored.items()), "")

    def as_dict(self) -> dict[str, Any]:
        return {
            "suite": self.name,
            "questions": len(self.questions),
            "samples": self.num_samples,
            "metrics": {name: {"value": e.value, "interval_95": [e.low, e.high]} for name, e in self.estimates.items()},
            "truncated": self.metrics.get(f"eval/{self.name}/truncated"),
            "response_length": self.metrics.get(f"eval/{self.name}/response_length"),
            "unscored": self.unscored,
            "left_out": self.left_out,
            "settings": self.settings,
        }

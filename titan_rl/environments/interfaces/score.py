"""Score of an answer: parts of its reward, or the failure to score it."""

from dataclasses import dataclass, field

from titan_rl.data.types import Status


@dataclass(frozen=True)
class Score:
    """Parts of a reward, or the reason for a missing one."""

    status: Status
    parts: dict[str, float]
    message: str = ""
    grade: float | None = None
    """Grade by ``eval.grader`` (scoring/scorer.py); None without a grader, or after its failure."""
    turn_rewards: list[float] = field(default_factory=list)
    """Reward of each answer, if the task rewards turns; ``parts`` holds their sum."""

    @property
    def reward(self) -> float:
        return sum(self.parts.values())

"""Score of an answer: parts of its reward, or the failure to score it."""

import json
import math
from dataclasses import dataclass, field
from typing import get_args

from titan_rl.data.numbers import finite
from titan_rl.data.types import Status


@dataclass(frozen=True)
class Score:
    """Parts of a reward, or the reason for a missing one."""

    status: Status
    parts: dict[str, float]
    message: str = ""
    grade: float | None = None
    """Grade by ``eval.grader`` (grading.py); None without a grader, or after its failure."""
    turn_rewards: list[float] = field(default_factory=list)
    """Reward of each answer, if the task rewards turns; ``parts`` holds their sum."""

    @property
    def reward(self) -> float:
        return sum(self.parts.values())


def read_score(text: str) -> Score:
    """Parse a scoring process's reply; anything that is no score becomes an ``infra_error``."""
    try:
        result = json.loads(text)
        parts = {name: finite(part) for name, part in result["parts"].items()}
        turns = [finite(reward) for reward in result.get("turn_rewards", [])]
        if result["status"] not in get_args(Status) or not isinstance(result["message"], str):
            raise ValueError(result["status"])
        score = Score(result["status"], parts, result["message"], turn_rewards=turns)
        is_finite = math.isfinite(score.reward)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return Score("infra_error", {}, "invalid reply of the scorer")
    return score if is_finite else Score("infra_error", {}, f"the scorer gave {score.reward}")

"""What an answer earned, or why nobody knows."""

import json
import math
from dataclasses import dataclass, field
from typing import get_args

from titan_rl.data.numbers import finite
from titan_rl.data.types import Status


@dataclass(frozen=True)
class Score:
    """Parts of a reward, or why there is none."""

    status: Status
    parts: dict[str, float]
    message: str = ""
    grade: float | None = None
    """By ``eval.grader`` (grading.py), if there is one and it could."""
    turn_rewards: list[float] = field(default_factory=list)
    """Of each answer, if the task gives such; they are in ``parts`` by their sum."""

    @property
    def reward(self) -> float:
        return sum(self.parts.values())


def read_score(text: str) -> Score:
    """What a scoring process says of an answer. It may be anything: what is no score is an ``infra_error``."""
    try:
        result = json.loads(text)
        parts = {name: finite(part) for name, part in result["parts"].items()}
        turns = [finite(reward) for reward in result.get("turn_rewards", [])]
        if result["status"] not in get_args(Status) or not isinstance(result["message"], str):
            raise ValueError(result["status"])
        score = Score(result["status"], parts, result["message"], turn_rewards=turns)
        is_finite = math.isfinite(score.reward)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return Score("infra_error", {}, "the scorer answered nonsense")
    return score if is_finite else Score("infra_error", {}, f"the scorer gave {score.reward}")

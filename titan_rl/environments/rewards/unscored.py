"""Reward of answers that nobody scores yet, such as those that people are to judge."""

from typing import Any


def zero(prompt: Any, completion: str, row: dict[str, Any]) -> float:
    """Reward of 0 for any answer, so that rows need no expected one."""
    return 0.0

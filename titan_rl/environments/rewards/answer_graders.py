"""Rewards by the expected answer, by name: ``task.reward = "gsm8k"``. Pure.

``gsm8k`` reads the number behind the last ``####``, as verl's strict reward does; ``gsm8k_flexible`` the last number of
the answer; ``math`` what mathematics/ reads.
"""

import re
from collections.abc import Callable

from titan_rl.config.sections.schema import ANSWER_REWARDS
from titan_rl.environments.rewards.mathematics.final_answer import is_right

_STRICT = re.compile(r"#### (-?\$?[0-9.,]+)")
_NUMBER = re.compile(r"-?\$?[0-9][0-9,]*(?:\.[0-9]+)?|-?\$?\.[0-9]+")


def gsm8k(answer: str, expected: str) -> bool:
    """Whether the number behind the last ``####`` is the expected one."""
    return _is_last(_STRICT, answer, expected)


def gsm8k_flexible(answer: str, expected: str) -> bool:
    """Whether the last number of an answer is the expected one, whatever stands around it."""
    return _is_last(_NUMBER, answer, expected)


def _is_last(pattern: re.Pattern[str], answer: str, expected: str) -> bool:
    numbers = pattern.findall(answer)
    return bool(numbers) and _plain(numbers[-1]) == _plain(expected)


def _plain(number: str) -> str:
    """Number without commas, currency and a full stop behind it, as lm-eval compares them."""
    return number.replace(",", "").replace("$", "").strip().rstrip(".")


GRADERS: dict[str, Callable[[str, str], bool]] = {"gsm8k": gsm8k, "gsm8k_flexible": gsm8k_flexible, "math": is_right}
"""By name: whether an answer is the expected one."""
assert set(GRADERS) == set(ANSWER_REWARDS), "the configuration knows them by name"

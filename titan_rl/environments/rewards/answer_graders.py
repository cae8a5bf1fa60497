"""Rewards by the expected answer, by name: ``task.reward = "gsm8k"``. Pure.

``gsm8k`` and ``gsm8k_flexible`` are GSM8K's two published rules (lm-evaluation-harness, task ``gsm8k``): the first
number behind ``#### ``, and the last number anywhere. Commas, dollar signs and a full stop at the end do not count;
nothing else is normalized, so 72.0 is not 72. ``math`` is what mathematics/ reads.
"""

import re
from collections.abc import Callable

from titan_rl.config.sections.schema import ANSWER_REWARDS
from titan_rl.environments.rewards.mathematics.final_answer import final_answer, is_right

_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")
_EXPECTED = re.compile(r"-?([0-9]+(\.[0-9]+)?|\.[0-9]+)")
_LONGEST = 300
"""Characters of a final answer of mathematics that votes; a longer one is wrong, too."""


def gsm8k(answer: str, expected: str) -> bool:
    """Whether the first number behind ``#### `` is the expected one."""
    return _is_expected(read_strict(answer), expected)


def gsm8k_flexible(answer: str, expected: str) -> bool:
    """Whether the last number of an answer is the expected one, whatever stands around it."""
    return _is_expected(read_flexible(answer), expected)


def read_strict(answer: str) -> str | None:
    """First number behind ``#### ``; None without one."""
    match = _STRICT.search(answer)
    return _plain(match[1]) if match else None


def read_flexible(answer: str) -> str | None:
    """Last number of an answer; None without one."""
    numbers = _NUMBER.findall(answer)
    return _plain(numbers[-1]) if numbers else None


def read_mathematics(answer: str) -> str | None:
    """Final answer without spaces; None without one. Two ways to write a value differ."""
    final = final_answer(answer)
    return None if final is None or len(final) > _LONGEST else "".join(final.split())


def _is_expected(number: str | None, expected: str) -> bool:
    return number is not None and number == _plain(expected.strip())


def is_number(expected: str) -> bool:
    """Whether an expected answer is a number, as both rules read one."""
    number = _plain(expected.strip())
    return number is not None and _EXPECTED.fullmatch(number) is not None


def _plain(number: str) -> str | None:
    """Number without the signs that do not count; None if nothing is left."""
    return number.replace(",", "").replace("$", "").removesuffix(".") or None


OF_NUMBERS = ("gsm8k", "gsm8k_flexible")
"""Rewards whose expected answer is a number."""
GRADERS: dict[str, Callable[[str, str], bool]] = {"gsm8k": gsm8k, "gsm8k_flexible": gsm8k_flexible, "math": is_right}
"""By name: whether an answer is the expected one."""
READERS: dict[str, Callable[[str], str | None]] = {
    "gsm8k": read_strict,
    "gsm8k_flexible": read_flexible,
    "math": read_mathematics,
}
"""By the same names: final answer as text; None if there is none."""
assert set(GRADERS) == set(READERS) == set(ANSWER_REWARDS), "the configuration knows them by name"

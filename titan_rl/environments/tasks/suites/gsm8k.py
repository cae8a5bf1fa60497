"""GSM8K: rows with ``question`` and ``answer``, whose last line is ``#### 72``.

Two published rules read an answer's number (lm-evaluation-harness, task ``gsm8k``). ``strict``: the first number behind
``#### ``. ``flexible``: the last number anywhere. Commas, dollar signs and a full stop at the end do not count; nothing
else is normalized, so 72.0 is not 72. Either rule reads one number, whatever else an answer says.
"""

import re
from dataclasses import dataclass
from typing import Any, Literal

from titan_rl.config.load import ConfigError
from titan_rl.data.types import Prompt
from titan_rl.environments.prompts.row_files import DataRow
from titan_rl.environments.tasks.suites.base import SuiteOptions, SuiteTask, text_column

_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")
Rule = Literal["strict", "flexible"]


@dataclass(kw_only=True)
class GSM8KOptions(SuiteOptions):
    """``[task.options]`` of GSM8K."""

    rule: Rule = "strict"
    """Which rule the reward follows; an evaluation records the other one, too."""


class GSM8KTask(SuiteTask):
    """Task of grade-school mathematics."""

    OPTIONS = GSM8KOptions
    options: GSM8KOptions
    INSTRUCTION = 'Think step by step, and end with a line "#### N", where N is the answer, a number.'

    def _row(self, place: str, columns: dict[str, Any]) -> DataRow:
        question, solution = (text_column(place, columns, name) for name in ("question", "answer"))
        number = read_strict(solution)
        if number is None:
            raise ConfigError(f"{place}: 'answer' has no '#### ' with a number behind it, as GSM8K's rows have: add it")
        return DataRow(place, columns, self._asked(question), None, number)

    def demonstration(self, prompt: Prompt) -> str:
        return prompt.entry["row"]["answer"]

    def final(self, prompt: Prompt, answer: str) -> str | None:
        return _RULES[self.options.rule](answer)

    def readings(self, prompt: Prompt, answer: str) -> dict[str, bool]:
        other = "flexible" if self.options.rule == "strict" else "strict"
        return {other: _RULES[other](answer) == prompt.answer}

    def score(self, prompt: Prompt, answers: list[str]) -> dict[str, float]:
        """Score the last answer: 1 if its number is the expected one, else 0."""
        return {"right": float(self.final(prompt, answers[-1]) == prompt.answer)}


def read_strict(answer: str) -> str | None:
    """First number behind ``#### ``; None without one."""
    match = _STRICT.search(answer)
    return _plain(match[1]) if match else None


def read_flexible(answer: str) -> str | None:
    """Last number of an answer; None without one."""
    numbers = _NUMBER.findall(answer)
    return _plain(numbers[-1]) if numbers else None


_RULES = {"strict": read_strict, "flexible": read_flexible}


def _plain(number: str) -> str | None:
    """Number without the signs that do not count; None if nothing is left."""
    return number.replace(",", "").replace("$", "").removesuffix(".") or None

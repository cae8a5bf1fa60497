"""GSM8K: rows with ``question`` and ``answer``, whose last line is ``#### 72``.

Two published rules read an answer's number (rewards/answer_graders.py): ``strict`` and ``flexible``.
"""

from dataclasses import dataclass
from typing import Any, Literal

from titan_rl.config.load import ConfigError
from titan_rl.data.types import Prompt
from titan_rl.environments.prompts.row_files import DataRow
from titan_rl.environments.rewards.answer_graders import read_flexible, read_strict
from titan_rl.environments.tasks.suites.base import SuiteOptions, SuiteTask, text_column

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
    INSTRUCTION = 'Think step by step, and write the final answer, a number, behind "####" in the last line.'

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


_RULES = {"strict": read_strict, "flexible": read_flexible}

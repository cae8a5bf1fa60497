"""MATH-500, AIME and their like: rows with ``problem`` and ``answer``, as LaTeX or a number.

Scored as task ``math`` is (math_task.py): the last ``\\boxed{}``, compared by value.
"""

from typing import Any

from titan_rl.config.load import ConfigError
from titan_rl.data.rows.row_fields import written
from titan_rl.data.types import Prompt
from titan_rl.environments.prompts.row_files import DataRow
from titan_rl.environments.rewards.answer_graders import read_mathematics
from titan_rl.environments.tasks.math_task import MathTask
from titan_rl.environments.tasks.suites.base import SuiteTask, text_column


class ProblemsTask(SuiteTask, MathTask):
    """Task of competition mathematics."""

    INSTRUCTION = r"Think step by step, and put the final answer into \boxed{}."

    def _row(self, place: str, columns: dict[str, Any]) -> DataRow:
        columns = {name.lower(): value for name, value in columns.items()}  # some sets of AIME have capitals
        problem = text_column(place, columns, "problem", "question")
        return DataRow(place, columns, self._asked(problem), None, _answer(place, columns))

    def final(self, prompt: Prompt, answer: str) -> str | None:
        """Content of the last box without spaces; two ways to write a value are two votes."""
        return read_mathematics(answer)


def _answer(place: str, columns: dict[str, Any]) -> str:
    answer = columns.get("answer")
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        try:
            return written(answer)
        except ValueError as error:
            raise ConfigError(f"{place}: 'answer': {error}") from None
    return text_column(place, columns, "answer")

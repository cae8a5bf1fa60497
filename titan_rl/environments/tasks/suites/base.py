"""Task of a public evaluation set: rows in the set's own schema, an instruction, a rule that reads final answers.

Scores follow the set's published rule, so that figures can be held beside published ones.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from titan_rl.config.load import ConfigError
from titan_rl.config.sections.schema import TaskConfig
from titan_rl.data.rows.row_fields import check_finite, names, text
from titan_rl.data.types import Prompt
from titan_rl.environments.prompts.jsonl_task import FileOptions, RowsTask
from titan_rl.environments.prompts.row_files import DataRow, Parse


@dataclass(kw_only=True)
class SuiteOptions(FileOptions):
    """``[task.options]`` of a public set."""

    instruction: str | None = None
    """What follows each question; left out: the set's usual instruction. Empty: nothing."""


class SuiteTask(RowsTask):
    """Task of a public set's rows. Errors: as RowsTask; ConfigError with a reward of the user's own."""

    OPTIONS = SuiteOptions
    INSTRUCTION = ""
    VOTES = True
    """Whether answers have a final answer, to count for a majority."""
    left_out = 0
    """Rows of ``file`` without a rule to score them, once ``every_prompt`` has read it."""

    def __init__(self, task: TaskConfig, folders: Sequence[str]):
        super().__init__(task, folders)
        if not task.scores_itself:
            raise ConfigError(f"task.name = {task.name!r} is scored by its own rule: leave task.reward out")

    @abstractmethod
    def _row(self, place: str, columns: dict[str, Any]) -> DataRow | None:
        """Row of the set as question and answer; None leaves it out. Errors: ConfigError."""

    def final(self, prompt: Prompt, answer: str) -> str | None:
        """Final answer, as a majority counts it; None if there is none."""
        return None

    def readings(self, prompt: Prompt, answer: str) -> dict[str, bool]:
        """Whether an answer is right by other published rules, by their names."""
        return {}

    def every_prompt(self) -> list[Prompt]:
        self.left_out = 0
        return super().every_prompt()

    def _parser(self) -> Parse:
        return self._parsed

    def _parsed(self, place: str, columns: dict[str, Any]) -> DataRow | None:
        check_finite(place, columns)
        row = self._row(place, columns)
        self.left_out += row is None
        return row

    def _asked(self, question: str) -> str:
        """Question with the instruction."""
        assert isinstance(self.options, SuiteOptions), "a set's options are these, or more"
        given = self.options.instruction
        instruction = self.INSTRUCTION if given is None else given
        return f"{question}\n\n{instruction}" if instruction else question


def text_column(place: str, columns: dict[str, Any], *names_of_it: str) -> str:
    """First of some columns that is there. Errors: ConfigError if none is, or it is no text."""
    for name in names_of_it:
        if columns.get(name) is not None:
            return text(place, name, columns[name])
    raise ConfigError(f"{place}: no {' or '.join(map(repr, names_of_it))}; {names(columns, names_of_it)}")

"""Mathematics from the user's own file: ``[task] name = "math"``, ``[task.options] file = "problems.jsonl"``.

A row's ``answer`` is LaTeX or plain, as public sets have it. What a model gives last is its answer: what it puts into
its last ``\\boxed{}``, else its last line. A grammar reads it (``mathematics/``): what says two things, or denies one,
has another form than what is expected. Whether two values are equal, math-verify says, in a scoring process: an answer
that keeps it busy for ever is a ``timeout``, and nobody else waits for it.
"""

from collections.abc import Sequence

from titan_rl.config.load import ConfigError
from titan_rl.config.sections.schema import TaskConfig
from titan_rl.data.types import Prompt
from titan_rl.environments.prompts.jsonl_task import RowsTask
from titan_rl.environments.prompts.row_files import DataRow
from titan_rl.environments.rewards.mathematics.equality import library
from titan_rl.environments.rewards.mathematics.final_answer import is_right


class MathTask(RowsTask):
    """Task of mathematics. Errors: as RowsTask; ConfigError for an answer that cannot be read as mathematics."""

    def __init__(self, task: TaskConfig, folders: Sequence[str]):
        super().__init__(task, folders)
        if not task.scores_itself:
            raise ConfigError("task.name = 'math' is scored by its answers: leave task.reward out, or take 'jsonl'")

    def prepare_scoring(self) -> None:
        """Import the libraries, which takes a second."""
        library()

    def _check(self, row: DataRow) -> None:
        super()._check(row)
        self._check_mathematics(row)

    def is_exact(self, prompt: Prompt) -> bool:
        return False

    def score(self, prompt: Prompt, answers: list[str]) -> dict[str, float]:
        """Score the last answer: 1 if right, else 0. Errors: ValueError for an unreadable expected answer."""
        return {"right": float(is_right(answers[-1], prompt.answer))}

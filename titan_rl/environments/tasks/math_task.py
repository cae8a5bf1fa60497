"""Mathematics from the user's own file: ``[task] name = "math"``, ``[task.options] file = "problems.jsonl"``.

A row's ``answer`` is LaTeX or plain, as public sets have it. What a model gives last is its answer: what it puts into
its last ``\\boxed{}``, else its last line. A grammar reads it (``mathematics/``): what says two things, or denies one,
has another form than what is expected. Whether two values are equal, math-verify says, in a scoring process: an answer
that keeps it busy for ever is a ``timeout``, and nobody else waits for it.
"""

import re
from collections.abc import Sequence

from titan_rl.config.load import ConfigError
from titan_rl.config.sections.schema import TaskConfig
from titan_rl.data.types import Prompt
from titan_rl.environments.prompts.jsonl_task import RowsTask
from titan_rl.environments.prompts.row_files import DataRow
from titan_rl.environments.rewards.mathematics.equality import expected_of, is_equal, library
from titan_rl.environments.rewards.mathematics.notation import closing_brace

_LONGEST = 300
"""Characters of a final answer; a longer one is wrong."""
_CHECKED = 500
"""Rows of a file whose answers are read before anything starts: each takes some milliseconds."""
_SAID = re.compile(r".*\b(?:answer|result)\b\s*(?:is|:|=)\s*:?\s*(.*)", re.IGNORECASE | re.DOTALL)
_ESCAPED_TWICE = re.compile(r"\\\\(?=[A-Za-z])")
_BOX = re.compile(r"\\boxed\s*\{")


class MathTask(RowsTask):
    """Task of mathematics. Errors: as RowsTask; ConfigError for an answer that cannot be read as mathematics."""

    def __init__(self, task: TaskConfig, folders: Sequence[str]):
        super().__init__(task, folders)
        if not task.scores_itself:
            raise ConfigError("task.name = 'math' is scored by its answers: leave task.reward out, or take 'jsonl'")
        self._num_checked = 0

    def prepare_scoring(self) -> None:
        """Import the libraries, which takes a second."""
        library()

    def _check(self, row: DataRow) -> None:
        super()._check(row)
        self._num_checked += 1
        assert row.answer is not None, "checked above, since a task of this kind scores itself"
        if self._num_checked <= _CHECKED and not _can_be_read(row.answer):
            raise ConfigError(
                f"{row.place}: the 'answer' {row.answer!r} cannot be read as mathematics: write it in LaTeX, or take "
                f"task.name = 'jsonl'"
            )

    @property
    def is_exact(self) -> bool:
        return False

    def score(self, prompt: Prompt, answers: list[str]) -> dict[str, float]:
        """Score the last answer: 1 if right, else 0. Errors: ValueError for an unreadable expected answer."""
        return {"right": float(is_right(answers[-1], prompt.answer))}


def is_right(answer: str, expected: str) -> bool:
    """Whether an answer's final answer equals the expected one. Errors: ValueError if the latter is unreadable."""
    reference = _in_a_box(expected)
    expected_of(reference)
    final = final_answer(answer)
    return final is not None and len(final) <= _LONGEST and is_equal(final, reference)


def _can_be_read(expected: str) -> bool:
    try:
        expected_of(_in_a_box(expected))
    except ValueError:
        return False
    return True


def _in_a_box(expected: str) -> str:
    r"""What is in its box if it is a whole solution; ``\\frac`` of a file that was escaped twice is ``\frac``."""
    inside = (final_answer(expected) if _BOX.search(expected) else None) or expected
    return inside if "\\begin" in inside else _ESCAPED_TWICE.sub(r"\\", inside)


def final_answer(answer: str) -> str | None:
    """Content of the last ``\\boxed{}``, else the last line, without an "answer is" before it."""
    if boxes := list(_BOX.finditer(answer)):
        start = boxes[-1].end()
        end = closing_brace(answer, start)
        return None if end is None else answer[start:end].strip() or None
    lines = [line for line in answer.splitlines() if line.strip()]
    if not lines:
        return None
    last = _without_stars(lines[-1])
    match = _SAID.fullmatch(last)
    return _without_stars((match[1] if match else last).strip().rstrip(".")).rstrip(".").strip() or None


def _without_stars(line: str) -> str:
    """Without the signs of bold print around it."""
    line = line.strip()
    return line[2:-2].strip() if len(line) > 4 and line.startswith("**") and line.endswith("**") else line

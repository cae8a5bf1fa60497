"""Task of the user's own file: ``[task] name = "jsonl"``, ``[task.options] file = "questions.jsonl"``.

Training goes through the rows epoch by epoch, each time in another order. Held-out rows come from a file of their own
or are a share of the rows, by a hash of their text; a training row with the text of a held-out one is left out.
Without a reward function the answer must be the row's ``answer``, exactly.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Annotated, Any

from pydantic import Field

from titan_rl.config.load import ConfigError, build_section
from titan_rl.config.sections.kinds import Style
from titan_rl.config.sections.schema import TaskConfig
from titan_rl.data.rows.row_files import find_file
from titan_rl.data.rows.splits import Split, epoch_order, key, split_by_file, split_by_share
from titan_rl.data.types import Message, Prompt
from titan_rl.environments.interfaces.task import RewardParts, Size, Task
from titan_rl.environments.prompts.row_files import DataRow, read_rows, without_answer

_SECTION = "task.options"
HELD_OUT = "held_out"
"""Name of the stream of held-out rows; all others are of training rows."""


@dataclass(kw_only=True)
class RowsOptions:
    """``[task.options]`` of a data file."""

    file: str
    """JSON lines or Parquet, by its suffix; a relative path is looked for in the folders of run.plugin_path."""
    held_out_file: str = ""
    """Rows for evaluation only."""
    held_out_share: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Share of ``file`` for evaluation only, without ``held_out_file``."""


class ListedTask(Task):
    """Task of rows. A prompt carries its row, so that only the maker of prompts has to know them all."""

    style: Style

    def __init__(self, task: TaskConfig):
        self.style, self.system_prompt = task.style, task.system_prompt

    @abstractmethod
    def _make_split(self) -> Split[DataRow]:
        """Errors: ConfigError."""

    @cached_property
    def _split(self) -> Split[DataRow]:
        """Split, made with the first prompt."""
        return self._make_split()

    @cached_property
    def size(self) -> Size:
        return Size(len(self._split.train), len(self._split.held_out))

    def prompt(self, stream: str, seed: int, index: int) -> Prompt:
        rows = self._split.held_out if stream == HELD_OUT else self._split.train
        epoch, place = divmod(index, len(rows))
        row = rows[epoch_order(len(rows), stream, seed, epoch)[place]]
        return _prompt(f"{stream}/{index:07d}", row)

    def is_held_out(self, prompt: Prompt) -> bool:
        return key(prompt.text) in self._split.held_out_keys

    def messages(self, prompt: Prompt) -> str | list[Message]:
        if self.style == "compact":
            return prompt.text
        row_messages = prompt.entry["row"].get("messages")
        messages = [_only_text(m) for m in row_messages] if row_messages else [dict(role="user", content=prompt.text)]
        if not self.system_prompt or any(message["role"] == "system" for message in messages):
            return messages
        return [dict(role="system", content=self.system_prompt), *messages]

    def row(self, prompt: Prompt) -> dict[str, Any]:
        return dict(prompt.entry["row"])


class RowsTask(ListedTask):
    """Task of a data file's rows.

    Errors: ConfigError, for options at once, for the file with the first prompt.
    """

    OPTIONS: type[RowsOptions] = RowsOptions

    def __init__(self, task: TaskConfig, folders: Sequence[str]):
        super().__init__(task)
        self.scores_itself = task.scores_itself
        self.options, self.folders = _options(task, self.OPTIONS), list(folders)

    def _make_split(self) -> Split[DataRow]:
        options = self.options
        rows = self._read("file", options.file)
        if options.held_out_file:
            return split_by_file(rows, self._read("held_out_file", options.held_out_file), _SECTION)
        return split_by_share(rows, options.held_out_share, _SECTION)

    def every_prompt(self) -> list[Prompt]:
        """Prompts of all rows of ``file``, in order. Errors: ConfigError."""
        rows = self._read("file", self.options.file)
        return [_prompt(f"{HELD_OUT}/{number:07d}", row) for number, row in enumerate(rows)]

    def _read(self, option: str, name: str) -> list[DataRow]:
        rows = read_rows(find_file(f"{_SECTION}.{option}", name, self.folders))
        for row in rows:
            self._check(row)
        return rows

    def _check_style(self, row: DataRow) -> None:
        if self.style == "compact" and row.messages is not None:
            raise ConfigError(f"{row.place}: 'messages' need task.style = 'chat': set it, or give 'prompt' as text")

    def _check(self, row: DataRow) -> None:
        self._check_style(row)
        if not self.scores_itself:
            return
        if row.answer is None:
            raise without_answer(row, "an exact match needs unless task.reward is set")
        if not row.answer.strip():
            raise ConfigError(f"{row.place}: an empty 'answer' would pay for saying nothing: fill it in")

    def demonstration(self, prompt: Prompt) -> str | list[str]:
        """Answer of the row. Errors: ConfigError if it has none."""
        if not prompt.answer.strip():
            raise ConfigError(
                f"{prompt.entry['place']}: no 'answer' to learn from: fill it in, or set sft.steps = 0 to leave SFT out"
            )
        return prompt.answer

    def score(self, prompt: Prompt, answers: list[str]) -> RewardParts:
        return {"exact": float(answers[-1].strip() == prompt.answer.strip())}


def _prompt(name: str, row: DataRow) -> Prompt:
    """Prompt of a row, which it carries."""
    return Prompt(name, row.text, row.answer or "", {"row": row.columns, "place": row.place})


def _options(task: TaskConfig, kind: type[RowsOptions]) -> RowsOptions:
    values = task.options
    if "file" not in values and set(values) <= {field.name for field in fields(kind)}:
        raise ConfigError(
            f"task.name = {task.name!r} needs task.options.file: give the path of a JSON lines or Parquet file"
        )
    if {"held_out_file", "held_out_share"} <= set(values):
        raise ConfigError("task.options.held_out_file and held_out_share exclude each other: keep one of them")
    return build_section(kind, values, "task.options")


def _only_text(message: dict[str, Any]) -> Message:
    return {"role": message["role"], "content": message["content"]}

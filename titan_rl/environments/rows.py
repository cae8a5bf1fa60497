"""A task from the user's own file: ``[task] name = "jsonl"``, ``[task.options] file = "questions.jsonl"``.

Training goes through the rows epoch by epoch, each time in another order. Held-out rows come from a file of their own
or are a share of the rows, by a hash of their text; a training row with the text of a held-out one is left out.
Without a reward function the answer must be the row's ``answer``, exactly.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from titan_rl.config.load import ConfigError, build_section
from titan_rl.config.schema import TaskConfig
from titan_rl.data.seeds import named_seed
from titan_rl.data.types import Prompt
from titan_rl.environments.row_files import DataRow, Message, find_file, read_rows, without_answer
from titan_rl.environments.task import Size

HELD_OUT = "held_out"
"""The stream of held-out rows; all others are of training rows."""


@dataclass(kw_only=True)
class RowsOptions:
    """``[task.options]`` of a data file."""

    file: str
    """JSON lines or Parquet, by its suffix; a relative path is looked for in the folders of run.plugin_path."""
    held_out_file: str = ""
    """Rows for evaluation only."""
    held_out_share: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Without such a file: how much of ``file`` is for evaluation only."""


@dataclass(frozen=True)
class Split:
    train: list[DataRow]
    held_out: list[DataRow]
    held_out_keys: frozenset[str]


class RowsTask:
    """Rows of a data file as prompts. A prompt carries its row, so that only the maker of prompts reads the file.

    Errors: ConfigError, for options when it is made, for the file when the first prompt is wanted.
    """

    def __init__(self, task: TaskConfig, folders: Sequence[str]):
        self.style, self.system_prompt, self.has_reward = task.style, task.system_prompt, bool(task.reward)
        self.options, self.folders = _options(task.options), list(folders)

    @cached_property
    def _split(self) -> Split:
        options = self.options
        rows = self._read("file", options.file)
        if options.held_out_file:
            return split_by_file(rows, self._read("held_out_file", options.held_out_file))
        return split_by_share(rows, options.held_out_share)

    def _read(self, option: str, name: str) -> list[DataRow]:
        rows = read_rows(find_file(f"task.options.{option}", name, self.folders))
        for row in rows:
            self._check(row)
        return rows

    def _check(self, row: DataRow) -> None:
        if self.style == "compact" and row.messages is not None:
            raise ConfigError(f"{row.place}: 'messages' need task.style = 'chat': set it, or give 'prompt' as text")
        if self.has_reward:
            return
        if row.answer is None:
            raise without_answer(row, "an exact match needs unless task.reward is set")
        if not row.answer.strip():
            raise ConfigError(f"{row.place}: an empty 'answer' would pay for saying nothing: fill it in")

    @property
    def size(self) -> Size:
        return Size(len(self._split.train), len(self._split.held_out))

    def prompt(self, stream: str, seed: int, index: int) -> Prompt:
        rows = self._split.held_out if stream == HELD_OUT else self._split.train
        epoch, place = divmod(index, len(rows))
        row = rows[_order(len(rows), stream, seed, epoch)[place]]
        entry = {"row": row.columns, "place": row.place}
        return Prompt(f"{stream}/{index:07d}", row.text, row.answer or "", entry)

    def is_held_out(self, prompt: Prompt) -> bool:
        return key(prompt.text) in self._split.held_out_keys

    def messages(self, prompt: Prompt) -> str | list[Message]:
        if self.style == "compact":
            return prompt.text
        given = prompt.entry["row"].get("messages")
        messages = [_only_text(m) for m in given] if given else [dict(role="user", content=prompt.text)]
        if not self.system_prompt or any(message["role"] == "system" for message in messages):
            return messages
        return [dict(role="system", content=self.system_prompt), *messages]

    def demonstration(self, prompt: Prompt) -> str:
        """Errors: ConfigError if the row has no answer."""
        if not prompt.answer.strip():
            raise ConfigError(
                f"{prompt.entry['place']}: no 'answer' to learn from: fill it in, or set sft.steps = 0 to leave SFT out"
            )
        return prompt.answer

    def reply(self, prompt: Prompt, answers: list[str]) -> str | None:
        return None

    def row(self, prompt: Prompt) -> dict[str, Any]:
        return dict(prompt.entry["row"])

    def score(self, prompt: Prompt, answers: list[str]) -> dict[str, float]:
        return {"exact": float(answers[-1].strip() == prompt.answer.strip())}


def _options(values: dict[str, Any]) -> RowsOptions:
    if "file" not in values and set(values) <= {"held_out_file", "held_out_share"}:
        raise ConfigError("task.name = 'jsonl' needs task.options.file: give the path of a JSON lines or Parquet file")
    if {"held_out_file", "held_out_share"} <= set(values):
        raise ConfigError("task.options.held_out_file and held_out_share exclude each other: keep one of them")
    return build_section(RowsOptions, values, "task.options")


def _only_text(message: dict[str, Any]) -> Message:
    return {"role": message["role"], "content": message["content"]}


def key(text: str) -> str:
    """What makes two prompts the same: their words, however they are spaced."""
    return " ".join(text.split())


def _position(key: str) -> float:
    """Of a text between 0 and 1, by its hash."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=6).digest(), "big") / 2**48


def split_by_share(rows: Sequence[DataRow], share: float) -> Split:
    """About that share of the texts is held out, at least one, and at least one is not. Pure.

    A row stays on its side when others are added. Errors: ConfigError if all rows have the same text.
    """
    keys = sorted({key(row.text) for row in rows}, key=_position)
    if len(keys) < 2:
        raise ConfigError(
            f"the data file holds one question only, {rows[0].place}: none is left for training once it is held out; "
            f"add others, or set task.options.held_out_file"
        )
    count = sum(_position(each) < share for each in keys)
    return _split(rows, rows, frozenset(keys[: min(max(count, 1), len(keys) - 1)]))


def split_by_file(rows: Sequence[DataRow], held_out: Sequence[DataRow]) -> Split:
    """Rows with the text of a held-out one are left out. Pure. Errors: ConfigError if no row is left."""
    split = _split(rows, held_out, frozenset(key(row.text) for row in held_out))
    if not split.train:
        raise ConfigError("every row of task.options.file is in task.options.held_out_file too: nothing to train on")
    return split


def _split(rows: Iterable[DataRow], candidates: Iterable[DataRow], keys: frozenset[str]) -> Split:
    train = [row for row in rows if key(row.text) not in keys]
    return Split(train, [row for row in candidates if key(row.text) in keys], keys)


@lru_cache(maxsize=8)
def _order(num_rows: int, stream: str, seed: int, epoch: int) -> np.ndarray:
    """The rows' order in one epoch. RandomState, as no later numpy may change what it draws."""
    return np.random.RandomState(named_seed("rows", stream, seed, epoch) % 2**32).permutation(num_rows)

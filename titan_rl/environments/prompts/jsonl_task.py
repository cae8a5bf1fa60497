"""Task of the user's own file: ``[task] name = "jsonl"``, ``[task.options] file = "questions.jsonl"``.

Training goes through the rows epoch by epoch, each time in another order. Held-out rows come from a file of their own
or are a share of the rows, by a hash of their text; a training row with the text of a held-out one is left out.
Without a reward function the answer must be the row's ``answer``, exactly.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Annotated, Any

from pydantic import Field

from titan_rl.config.load import ConfigError, build_section, nearest
from titan_rl.config.sections.kinds import Files, Style
from titan_rl.config.sections.schema import ANSWER_REWARDS, OWN_SCORE, TaskConfig
from titan_rl.data.rows.column_names import ASKED, check_names
from titan_rl.data.rows.file_sources import Source, check_unweighted, locate_sources
from titan_rl.data.rows.public_shapes import SOURCES, source_of, usual_reward
from titan_rl.data.rows.row_fields import names, shown
from titan_rl.data.rows.row_files import ReadFile, read_raw_rows
from titan_rl.data.rows.row_messages import TEMPLATE_OPTIONS, TOOLS
from titan_rl.data.rows.splits import RowOrder, Split, places_of, question_of, row_order, split_by_file, split_by_share
from titan_rl.data.text.messages import IMAGE_MARK, Message, message
from titan_rl.data.types import Prompt
from titan_rl.environments.interfaces.task import RewardParts, Size, Task
from titan_rl.environments.interfaces.tool import Schema
from titan_rl.environments.prompts.row_files import DataRow, Parse, parser_of, read_rows, without_answer
from titan_rl.environments.prompts.stream import EACH_ROW
from titan_rl.environments.rewards.answer_graders import GRADERS, OF_NUMBERS, is_number
from titan_rl.environments.rewards.mathematics.final_answer import can_be_read

_SECTION = "task.options"
_READ = 500
"""Rows whose answers are read as mathematics before anything starts: each takes some milliseconds."""
HELD_OUT = "held_out"
"""Name of the stream of held-out rows; all others are of training rows."""


@dataclass(kw_only=True)
class FileOptions:
    """``[task.options]`` of data files."""

    file: Files
    """JSON lines or Parquet: a path, a glob, a ``datasets`` directory or a name of the Hub
    (``openai/gsm8k:main:train``), or a list of these, each with a ``weight`` if it likes. Relative paths are looked for
    in the folders of run.plugin_path."""
    held_out_file: Files = ""
    """Rows for evaluation only."""
    held_out_share: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Share of ``file`` for evaluation only, without ``held_out_file``."""


@dataclass(kw_only=True)
class RowsOptions(FileOptions):
    """``[task.options]`` of rows with a question and an answer."""

    columns: dict[str, str] = field(default_factory=dict)
    """Names of ours (prompt, question, messages, answer, tests, data_source) to the files': a column, or a dotted path
    such as ``reward_model.ground_truth``."""
    only: list[str] = field(default_factory=list)
    """Sets whose rows are taken, by ``data_source``, ``task_name`` or ``dataset``; empty: all."""


class ListedTask(Task):
    """Task of rows. A prompt carries its row, so that only the maker of prompts has to know them all."""

    style: Style

    def __init__(self, task: TaskConfig):
        self.style, self.system_prompt = task.style, task.system_prompt

    @abstractmethod
    def _make_split(self) -> Split[DataRow]:
        """Errors: ConfigError."""

    @abstractmethod
    def _all_rows(self) -> list[DataRow]:
        """Rows, whether they are for training or not. Errors: ConfigError."""

    def every_prompt(self) -> list[Prompt]:
        """Prompts of all rows, in order, for an evaluation alone. Errors: ConfigError."""
        return [_prompt(f"{HELD_OUT}/{number:07d}", row) for number, row in enumerate(self._all_rows())]

    @cached_property
    def _split(self) -> Split[DataRow]:
        """Split, made with the first prompt."""
        return self._make_split()

    @cached_property
    def size(self) -> Size:
        return Size(len(self._split.train), len(self._split.held_out))

    @property
    def num_overlapping(self) -> int:
        return self._split.num_overlapping

    @property
    def row_notices(self) -> Sequence[str]:
        rows = [*self._split.train, *self._split.held_out]
        return [*_lacking_answer(rows), *_lacking_images(rows)]

    @cached_property
    def _order(self) -> RowOrder:
        """Order of training rows."""
        return RowOrder((len(self._split.train),))

    def _rows_of(self, stream: str) -> list[DataRow]:
        return self._split.held_out if stream == HELD_OUT else self._split.train

    def prompt(self, stream: str, seed: int, index: int) -> Prompt:
        return _prompt(f"{stream}/{index:07d}", self._rows_of(stream)[self._place(stream, seed, index)])

    def _place(self, stream: str, seed: int, index: int) -> int:
        """Number of a stream's row among those of its side."""
        if stream in (HELD_OUT, EACH_ROW):
            [place] = places_of(index, 1, len(self._rows_of(stream)), stream, seed)
        else:
            [place] = self._order.places(index, 1, stream, seed)
        return place

    def is_held_out(self, prompt: Prompt) -> bool:
        return question_of(prompt.question_key) in self._split.held_out_questions

    def messages(self, prompt: Prompt) -> str | list[Message]:
        if self.style == "compact":
            return prompt.text
        messages = prompt.entry.get("messages") or [message("user", prompt.text)]
        if not self.system_prompt or any(each["role"] == "system" for each in messages):
            return messages
        return [message("system", self.system_prompt), *messages]

    def tools_of(self, prompt: Prompt) -> Sequence[Schema]:
        return [*super().tools_of(prompt), *prompt.entry.get("tools", ())]

    def row(self, prompt: Prompt) -> dict[str, Any]:
        return dict(prompt.entry["row"])


class RowsTask(ListedTask):
    """Task of a data file's rows.

    Errors: ConfigError, for options at once, for the file with the first prompt.
    """

    OPTIONS: type[FileOptions] = RowsOptions
    _read_file: ReadFile = staticmethod(read_raw_rows)

    def __init__(self, task: TaskConfig, folders: Sequence[str]):
        super().__init__(task)
        self.scores_itself, self._rewards = task.scores_itself, task.reward_names
        self._by_source, self._num_read = task.rewards_by_source, 0
        self.options, self.folders = _options(task, self.OPTIONS), list(folders)

    def _make_split(self) -> Split[DataRow]:
        options = self.options
        rows = self._all_rows()
        if options.held_out_file:
            held_out = locate_sources(f"{_SECTION}.held_out_file", options.held_out_file, self.folders)
            split = split_by_file(rows, self._read(held_out), _SECTION)
        else:
            split = split_by_share(rows, options.held_out_share, _SECTION)
        self._check_sets([*split.train, *split.held_out])
        self._order_of(split.train)
        return split

    @cached_property
    def _sources(self) -> list[Source]:
        return locate_sources(f"{_SECTION}.file", self.options.file, self.folders)

    @cached_property
    def _order(self) -> RowOrder:
        return self._order_of(self._split.train)

    def _order_of(self, rows: Sequence[DataRow]) -> RowOrder:
        """Order of training rows. Errors: ConfigError for a weighted source without one."""
        weights, names = zip(*((source.weight, source.name) for source in self._sources), strict=True)
        return row_order([row.source for row in rows], weights, names, _SECTION)

    def _all_rows(self) -> list[DataRow]:
        return self._read(self._sources)

    def _read(self, sources: Sequence[Source]) -> list[DataRow]:
        rows = self._chosen(read_rows(sources, self._parser(), self._read_file))
        self._check_rows(rows)
        return rows

    def _parser(self) -> Parse:
        return parser_of(self._rows_options.columns)

    @property
    def _rows_options(self) -> RowsOptions:
        return self.options if isinstance(self.options, RowsOptions) else RowsOptions(file=self.options.file)

    def _chosen(self, rows: list[DataRow]) -> list[DataRow]:
        """Rows of the sets that ``only`` names. Errors: ConfigError for one that has none."""
        only = self._rows_options.only
        if not only:
            return rows
        there = {row.set_name for row in rows} - {None}
        if (missing := next((name for name in only if name not in there), None)) is not None:
            known = nearest(missing, map(str, there)) if there else "they have no 'data_source' or 'task_name'"
            raise ConfigError(f"{_SECTION}.only: no row is of the set {missing!r}: {known}")
        return [row for row in rows if row.set_name in only]

    def _check_rows(self, rows: Sequence[DataRow]) -> None:
        """Check of all rows of a file setting. Errors: ConfigError."""
        for row in rows:
            self._check(row)

    def _check_sets(self, rows: Sequence[DataRow]) -> None:
        """Check of the sets that have a reward of their own. Errors: ConfigError for one without a row."""
        there = {row.set_name for row in rows}
        if (missing := next((name for name in self._by_source if name not in there), None)) is not None:
            known = nearest(missing, [name for name in there if name is not None])
            raise ConfigError(f"task.rewards_by_source: no row is of the set {missing!r}: change it ({known})")

    @property
    def row_notices(self) -> Sequence[str]:
        """Besides, sets whose public reward is another one than the exact match that they are given."""
        lines = super().row_notices
        if not self.scores_itself or self._by_source or type(self).score is not RowsTask.score:
            return lines
        sets = {row.set_name for row in (*self._split.train, *self._split.held_out)} - {None}
        usual = [(name, reward) for name in sorted(map(str, sets)) if (reward := usual_reward(name))]
        return [
            *lines,
            *(
                f"rows of {name!r} are right by an exact match of the whole answer; their usual reward is "
                f"task.reward = {reward!r}"
                for name, reward in usual
            ),
        ]

    def _check_style(self, row: DataRow) -> None:
        if self.style == "compact" and row.messages is not None:
            raise ConfigError(f"{row.place}: 'messages' need task.style = 'chat': set it, or give 'prompt' as text")
        for name, value in ((TOOLS, row.tools), (TEMPLATE_OPTIONS, row.template_options)):
            if self.style == "compact" and value:
                raise ConfigError(f"{row.place}: {name!r} needs task.style = 'chat': set it, or rename the column")

    def _check(self, row: DataRow) -> None:
        self._check_style(row)
        rewards = (self._reward_of(row),) if self._by_source else self._rewards
        by_answer = next((name for name in rewards if name in (OWN_SCORE, *ANSWER_REWARDS)), None)
        if by_answer is None:
            return
        if row.answer is None:
            exact = "an exact match needs unless task.reward is set"
            raise without_answer(row, exact if by_answer == OWN_SCORE else f"the reward {by_answer!r} needs")
        if not row.answer.strip():
            raise ConfigError(f"{row.place}: an empty 'answer' would pay for saying nothing: fill it in")
        for name in rewards:
            self._check_expected(row, name)

    def _reward_of(self, row: DataRow) -> str:
        """Reward of the set that a row is of. Errors: ConfigError for a set without one."""
        setting = "task.rewards_by_source"
        if row.set_name is None:
            raise ConfigError(
                f"{row.place}: no 'data_source', by which {setting} chooses; {names(row.columns, SOURCES)}"
            )
        if row.set_name not in self._by_source:
            known = nearest(row.set_name, self._by_source)
            raise ConfigError(f"{row.place}: {setting} has no reward for {row.set_name!r}: add it ({known})")
        return self._by_source[row.set_name]

    def _check_expected(self, row: DataRow, reward: str) -> None:
        """Check of an expected answer against a reward by it. Errors: ConfigError for one that cannot be read."""
        if reward == "math":
            self._check_mathematics(row)
        elif reward in OF_NUMBERS and not is_number(row.answer or ""):
            raise ConfigError(
                f"{row.place}: the 'answer' {shown(row.answer)} is no number, so that no answer would be right by the "
                f"reward {reward!r}: write it as one, or take another reward"
            )

    def _check_mathematics(self, row: DataRow) -> None:
        """Check of an expected answer, of the first rows. Errors: ConfigError for one that cannot be read."""
        self._num_read += 1
        assert row.answer is not None, "a reward by the answer has one"
        if self._num_read <= _READ and not can_be_read(row.answer):
            raise ConfigError(
                f"{row.place}: the 'answer' {row.answer!r} cannot be read as mathematics: write it in LaTeX, or take "
                f"task.name = 'jsonl' and another reward"
            )

    def demonstration(self, prompt: Prompt) -> str | list[str]:
        """Answer of the row, with its derivation where the score reads the end alone. Errors: ConfigError if it has
        none."""
        if not prompt.answer.strip():
            raise ConfigError(
                f"{prompt.entry['place']}: no 'answer' to learn from: fill it in, name its column "
                f"(task.options.columns = {{ answer = '...' }}), or set sft.steps = 0 to leave SFT out"
            )
        worked = prompt.entry.get("worked", prompt.answer)
        if self.is_exact(prompt):
            return prompt.answer
        for reward in self._rewards_of(prompt):
            worked = _right_by(reward, prompt, worked)
        return worked

    def is_exact(self, prompt: Prompt) -> bool:
        """Whether its own score is in the prompt's reward, which takes the answer alone."""
        return OWN_SCORE in self._rewards_of(prompt) if self._by_source else self.scores_itself

    def _rewards_of(self, prompt: Prompt) -> Sequence[str]:
        source = source_of(prompt.entry["row"]) if self._by_source else None
        return self._rewards if source is None else (self._by_source[source],)

    def score(self, prompt: Prompt, answers: list[str]) -> RewardParts:
        return {"exact": float(answers[-1].strip() == prompt.answer.strip())}


def _right_by(reward: str, prompt: Prompt, worked: str) -> str:
    """Answer to learn from, which is marked as GSM8K's rows mark it where it is a number alone. Errors: ConfigError for
    one that a reward by numbers calls wrong. (Mathematics is compared under a deadline only.)"""
    if reward == "gsm8k" and worked == prompt.answer:
        worked = f"#### {worked.strip()}"
    if reward in OF_NUMBERS and not GRADERS[reward](worked, prompt.answer):
        raise ConfigError(
            f"{prompt.entry['place']}: the reward {reward!r} calls the row's own worked answer wrong, which sft would "
            f"teach: end it with '#### {prompt.answer.strip()}', or set sft.steps = 0"
        )
    return worked


def _lacking_answer(rows: Sequence[DataRow]) -> list[str]:
    """Line about rows without an answer, where others have one."""
    places = [row.place for row in rows if row.answer is None]
    if not 0 < len(places) < len(rows):
        return []
    count = f"{len(places)} rows have" if len(places) > 1 else "1 row has"
    return [f"{count} no 'answer', which others have; see {places[0]}"]


def _lacking_images(rows: Sequence[DataRow]) -> list[str]:
    """Line about rows that name an image, where they have none: the mark is then text."""
    places = [row.place for row in rows if IMAGE_MARK in row.text and not row.images]
    if not places:
        return []
    count = f"{len(places)} rows" if len(places) > 1 else "1 row"
    return [f"{IMAGE_MARK} is text in {count} without 'images'; see {places[0]}"]


def _prompt(name: str, row: DataRow) -> Prompt:
    """Prompt of a row, which it carries."""
    entry: dict[str, Any] = {"row": row.columns, "place": row.place, "messages": row.messages, "tools": row.tools}
    if row.worked and row.worked != row.answer:
        entry["worked"] = row.worked
    prompt = Prompt(name, row.text, row.answer or "", entry)
    return replace(prompt, template_options=row.template_options, images=row.images)


def _options(task: TaskConfig, kind: type[FileOptions]) -> FileOptions:
    values = task.options
    if "file" not in values and set(values) <= {field.name for field in fields(kind)}:
        raise ConfigError(
            f"task.name = {task.name!r} needs task.options.file: give the path of a JSON lines or Parquet file"
        )
    if {"held_out_file", "held_out_share"} <= set(values):
        raise ConfigError("task.options.held_out_file and held_out_share exclude each other: keep one of them")
    options = build_section(kind, values, _SECTION)
    check_unweighted(f"{_SECTION}.held_out_file", options.held_out_file)
    if isinstance(options, RowsOptions):
        check_names(f"{_SECTION}.columns", options.columns, ASKED)
    return options

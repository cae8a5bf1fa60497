"""Search task: ``[task] name = "search"``, rows of questions, and a corpus that the model may search by a tool.

    chat   Who wrote Emma?   <tool_call>{"name": "search", ...}</tool_call>   [1] Emma: ...   <answer>Austen</answer>

A row has ``question`` and its right answers: ``golden_answers``, ``answers`` or ``answer``, a text or a list of them.
Right is an answer that equals one of them but for case, punctuation, articles and white space (exact match of SQuAD,
Rajpurkar et al. 2016). Answers of which that leaves nothing are left out, and so is a row without another. The corpus
is rows with ``text`` or ``contents``, and ``title`` if they like. Its index is built as a verifier starts, under
``mesh.start_timeout``, and held in its memory.
"""

import asyncio
import json
import re
import string
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from pydantic import Field

from titan_rl.config.load import ConfigError, nearest
from titan_rl.config.sections.kinds import Files
from titan_rl.config.sections.schema import TaskConfig
from titan_rl.data.rows.file_sources import check_unweighted, locate_sources, read_sources
from titan_rl.data.rows.row_fields import encodable, names, shown
from titan_rl.data.rows.splits import Split
from titan_rl.data.types import Prompt
from titan_rl.environments.conversation.tools import MAX_RESULT, ToolEnvironment
from titan_rl.environments.interfaces.tool import Tool, ToolError
from titan_rl.environments.prompts.row_files import DataRow
from titan_rl.environments.tasks.search.bm25 import BM25, Passage
from titan_rl.environments.tasks.suites.base import SuiteOptions, SuiteTask, text_column

_CORPUS = "task.options.corpus"
_ANSWERS = ("golden_answers", "answers", "answer")
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_MAX_ANSWER = 300
"""Characters of an answer; a longer one is wrong."""
_MAX_TITLE = 100
"""Characters of a title; the rest is cut off."""
_PER_PASSAGE = _MAX_TITLE + 10
"""Characters of a result for each passage besides its text: number, title, marks."""
_TOOL_TIMEOUT = 600.0
"""Seconds of a call; the environment's own deadline comes before."""
_PARAMETERS = {
    "type": "object",
    "properties": {"query": {"type": "string", "description": "words to look for"}},
    "required": ["query"],
    "additionalProperties": False,
}


def normalized(answer: str) -> str:
    """Answer in lower case, without punctuation, articles and further white space."""
    plain = "".join(s for s in answer.casefold() if s not in string.punctuation)
    return " ".join(_ARTICLES.sub(" ", plain).split())


@dataclass(kw_only=True)
class SearchOptions(SuiteOptions):
    """``[task.options]`` of search."""

    corpus: Files
    """Passages to search: rows with ``text`` or ``contents``, and ``title``, as ``file`` has them."""
    passages: Annotated[int, Field(ge=1, le=20)] = 3
    """Passages that a search gives."""
    passage_characters: Annotated[int, Field(ge=50, le=4000)] = 1000
    """Characters of a passage that are shown."""
    held_out_only: list[str] = field(default_factory=list)
    """Sets whose held-out rows are evaluated, by ``data_source``, ``task_name`` or ``dataset``; empty: all."""


class SearchTask(SuiteTask):
    """Task of questions with a corpus. Errors: as SuiteTask; ConfigError for a corpus that is none."""

    OPTIONS = SearchOptions
    options: SearchOptions
    INSTRUCTION = "Search as often as you need. Then give the answer alone, in a few words, within <answer> tags."

    def __init__(self, task: TaskConfig, folders: Sequence[str]):
        if task.options and "corpus" not in task.options:
            raise ConfigError("task.name = 'search' needs task.options.corpus: give JSON lines or Parquet of passages")
        super().__init__(task, folders)
        check_unweighted(_CORPUS, self.options.corpus)
        _check_lengths(self.options)
        self._index: BM25 | None = None
        self._building = threading.Lock()
        about = "Finds passages that fit a query best."
        self._tool = Tool("search", about, _PARAMETERS, self._search, timeout=_TOOL_TIMEOUT)
        self.tools = [self._tool.schema]

    def _make_split(self) -> Split[DataRow]:
        split = super()._make_split()
        only = self.options.held_out_only
        known = {row.set_name for row in split.held_out} - {None}
        if (missing := next((name for name in only if name not in known), None)) is not None:
            hint = nearest(missing, map(str, known)) if known else "they have no 'data_source' or 'task_name'"
            raise ConfigError(f"task.options.held_out_only: no held-out row is of the set {missing!r}: {hint}")
        held_out = [row for row in split.held_out if row.set_name in only] if only else split.held_out
        return replace(split, held_out=held_out)

    def _row(self, place: str, columns: dict[str, Any]) -> DataRow | None:
        question, answers = text_column(place, columns, "question"), _answers(place, columns)
        if not answers:
            return None
        return DataRow(place, columns | {_ANSWERS[0]: answers}, self._asked(question), None, answers[0])

    def check_ready(self) -> None:
        """Read the corpus through. Errors: ConfigError."""
        if not any(True for _ in self._read_corpus()):
            raise ConfigError(f"{_CORPUS} = {self.options.corpus!r} holds no passage")

    def _read_corpus(self) -> Iterator[Passage]:
        """Errors: ConfigError."""
        sources = locate_sources(_CORPUS, self.options.corpus, self.folders)
        try:
            for _, (place, columns) in read_sources(sources):
                title = columns.get("title")
                text = encodable(place, "text", text_column(place, columns, "text", "contents"))
                yield Passage(" ".join(title.split())[:_MAX_TITLE] if isinstance(title, str) else "", text)
        except OSError as error:
            raise ConfigError(f"{_CORPUS} cannot be read: {error}") from None

    def prepare_episodes(self) -> None:
        """Build the index of the corpus. Errors: ConfigError."""
        self._built_index()

    def _built_index(self) -> BM25:
        """Index, built once by whichever thread comes first. Errors: ConfigError."""
        with self._building:
            if self._index is None:
                self._index = BM25(self._read_corpus())
            return self._index

    async def _search(self, query: str) -> str:
        """Errors: ToolError for a query without a word; ConfigError for a corpus that changed."""
        if not query.strip():
            raise ToolError("give words to look for")
        return await asyncio.to_thread(self._results, query)

    def _results(self, query: str) -> str:
        found = self._built_index().search(query, self.options.passages)
        return "\n".join(self._shown(*each) for each in enumerate(found, 1)) or "no passage has any of these words"

    def _shown(self, number: int, passage: Passage) -> str:
        text = " ".join(passage.text.split())[: self.options.passage_characters]
        return f"[{number}] {passage.title}: {text}" if passage.title else f"[{number}] {text}"

    def environment(self, prompt: Prompt) -> ToolEnvironment:
        return ToolEnvironment([self._tool], self.style)

    def demonstration(self, prompt: Prompt) -> list[str]:
        """Search for the question's own words, then the first right answer."""
        query = prompt.entry["row"]["question"]
        if self.style == "compact":
            return [f"search({query})", f"<answer>{prompt.answer}</answer>"]
        call = json.dumps({"name": "search", "arguments": {"query": query}}, ensure_ascii=False)
        return [f"<tool_call>{call}</tool_call>", f"<answer>{prompt.answer}</answer>"]

    def final(self, prompt: Prompt, answer: str) -> str | None:
        """Normalized text of an answer's only pair of tags."""
        tagged = _TAGGED.findall(answer)
        return normalized(tagged[0]) or None if len(tagged) == 1 and len(tagged[0]) <= _MAX_ANSWER else None

    def score(self, prompt: Prompt, answers: list[str]) -> dict[str, float]:
        """Score the last answer: 1 if it equals a right one, else 0."""
        right = {normalized(answer) for answer in prompt.entry["row"][_ANSWERS[0]]}
        return {"exact": float(self.final(prompt, answers[-1]) in right)}


def _check_lengths(options: SearchOptions) -> None:
    """Errors: ConfigError for passages that a tool's result has no room for."""
    most = MAX_RESULT // options.passages - _PER_PASSAGE
    if options.passage_characters > most:
        raise ConfigError(
            f"task.options.passage_characters = {options.passage_characters}: a result shows {MAX_RESULT} characters, "
            f"so {options.passages} passages have at most {most} each: lower it, or task.options.passages"
        )


def _answers(place: str, columns: dict[str, Any]) -> list[str]:
    """Right answers of a row; empty if normalization leaves nothing of any. Errors: ConfigError."""
    name = next((name for name in _ANSWERS if columns.get(name) is not None), None)
    if name is None:
        raise ConfigError(f"{place}: no 'golden_answers' or 'answer'; {names(columns, _ANSWERS)}")
    value = columns[name]
    answers = value if isinstance(value, list) else [value]
    for answer in answers:
        if not isinstance(answer, str):
            raise ConfigError(f"{place}: {name!r} has {shown(answer)}: give text")
    return [answer for answer in answers if normalized(encodable(place, name, answer))]

"""Expected answers against ``rollout.max_new_tokens``: one that is longer is cut before its end.

The expected answer alone counts, without the reasoning that may lead to it, of tasks of rows which pay for writing it.
A reward function of one's own may have another use for it (tests, a rubric): whoever asks knows whether it pays.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from titan_rl.config.mixture import all_tasks
from titan_rl.config.plugins import is_reference
from titan_rl.config.sections.schema import ANSWER_REWARDS, OWN_SCORE, TASKS_OF_FILES, Config, TaskConfig
from titan_rl.data.text.tokenizer import Tokenizer, encode
from titan_rl.environments.interfaces.task import Task
from titan_rl.environments.rollout.prompt_checks import training_prompts

_LOOKED_AT = 200
_WITHOUT_TEXT = ("code", "swe", "nemo_gym", "ifeval", "humaneval", "mbpp")
"""Tasks of rows whose answer is no text to write."""


@dataclass(frozen=True)
class AnswerLengths:
    """Tokens of expected answers of a task's first prompts."""

    setting: str
    """Of the task: ``task``, or ``task.options.NAME`` in a mixture."""
    limit: int
    """``rollout.max_new_tokens``."""
    num_tokens: list[int]

    @property
    def num_too_long(self) -> int:
        """Answers of more tokens than the limit."""
        return sum(length > self.limit for length in self.num_tokens)

    @property
    def are_too_long(self) -> bool:
        """Whether most of the answers are too long."""
        return self.num_too_long > len(self.num_tokens) / 2

    @property
    def evidence(self) -> str:
        """The numbers, in words."""
        count = f"{self.num_too_long} of the {len(self.num_tokens)} expected answers of [{self.setting}]"
        median, most = statistics.median_low(self.num_tokens), max(self.num_tokens)
        return (
            f"{count} that were looked at have more than rollout.max_new_tokens = {self.limit} tokens ({median} in the "
            f"median, {most} at most)"
        )

    @property
    def mend(self) -> str:
        """What to do about it."""
        return f"set rollout.max_new_tokens = {max(self.num_tokens) + 1} or more, which is the longest with its end"


def answer_lengths(
    config: Config, task: Task, load: Callable[[], Tokenizer], *, functions_pay: bool = False
) -> list[AnswerLengths]:
    """Lengths by task, where it has expected answers to write.

    ``load`` gives the tokenizer, where it is needed. ``functions_pay``: whether functions of the user's own pay for
    these answers as they are. Errors: ConfigError for rows or a tokenizer that cannot be read."""
    if config.data.file or config.reward_model.path:
        return []
    settings = all_tasks(config.task)
    parts = {f"task.options.{label}": part for label, part in task.parts.items()} or {"task": task}
    paying = {name for name in parts if _pays_for_answer(settings[name], functions_pay=functions_pay)}
    if not paying:
        return []
    tokenizer, seed, limit = load(), config.run.seed, config.rollout.max_new_tokens
    lengths = [
        AnswerLengths(name, limit, list(_num_tokens(part, seed, tokenizer)))
        for name, part in parts.items()
        if name in paying
    ]
    return [each for each in lengths if each.num_tokens]


def answer_notice(
    config: Config, task: Task, load: Callable[[], Tokenizer], *, functions_pay: bool = False
) -> list[str]:
    """Line about each task most of whose expected answers are too long. Errors: as ``answer_lengths``."""
    lengths = answer_lengths(config, task, load, functions_pay=functions_pay)
    return [f"{each.evidence}, and are cut: {each.mend}" for each in lengths if each.are_too_long]


def _pays_for_answer(task: TaskConfig, *, functions_pay: bool) -> bool:
    is_text = task.name in TASKS_OF_FILES and task.name not in _WITHOUT_TEXT
    paying = {OWN_SCORE, *ANSWER_REWARDS}
    return is_text and all(name in paying or functions_pay and is_reference(name) for name in task.reward_names)


def _num_tokens(task: Task, seed: int, tokenizer: Tokenizer) -> Iterator[int]:
    for prompt in islice(training_prompts(task, seed, _LOOKED_AT), _LOOKED_AT):
        if answer := prompt.answer.strip():
            yield len(encode(tokenizer, answer))

"""Data rows made from a task's demonstrations, for runs without a generator and without a file.

The right answer to a question is chosen or desirable, and the right answer to another question, where it is a wrong one
to this, is rejected. So answers of both kinds look alike, and only who reads the question can tell them apart.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from titan_rl.config.load import ConfigError
from titan_rl.data.rows.row_messages import TEMPLATE_OPTIONS, TOOLS
from titan_rl.data.rows.row_shapes import Kind, ParsedRow, Written, read_row
from titan_rl.data.seeds import named_seed
from titan_rl.data.text.messages import message
from titan_rl.data.types import Prompt
from titan_rl.environments.interfaces.task import Task
from titan_rl.environments.prompts.stream import PromptStream, held_out_prompts
from titan_rl.environments.rollout.demonstrations import worked_answers

_STREAM = "data"


def synthetic_rows(
    task: Task, kind: Kind, *, seed: int, count: int, num_held_out: int
) -> tuple[list[ParsedRow], list[ParsedRow]]:
    """Training rows of ``count`` prompts (at most all of a finite task), and held-out rows.

    Errors: ConfigError if the task has no worked example, or the same for all.
    """
    limit = min(count, task.size.train) if task.size else count
    train = list(islice(PromptStream(task, seed, _STREAM), limit))
    return _rows(task, kind, train), _rows(task, kind, held_out_prompts(task, num_held_out))


def _rows(task: Task, kind: Kind, prompts: Sequence[Prompt]) -> list[ParsedRow]:
    answers = [_only_answer(task, prompt) for prompt in prompts]
    return [
        read_row(f"made of prompt {prompt.id}", columns, kind, "auto")
        for number, prompt in enumerate(prompts)
        for columns in _columns(task, kind, prompt, answers, number)
    ]


def _only_answer(task: Task, prompt: Prompt) -> str:
    """Errors: ConfigError."""
    [first, *further] = worked_answers(task, prompt)
    if further:
        raise ConfigError("data.file = 'task': this task's worked examples have several turns: take another task")
    return first


def _columns(task: Task, kind: Kind, prompt: Prompt, answers: list[str], number: int) -> Iterator[dict[str, Any]]:
    if prompt.images:
        raise ConfigError("data.file = 'task': this task's prompts show images, which rows do not: take another task")
    question = task.messages(prompt)
    asked = {"prompt": question, TEMPLATE_OPTIONS: prompt.template_options}
    if not isinstance(question, str):
        asked[TOOLS] = list(task.tools_of(prompt))
    right = _written(question, answers[number])
    if kind == "demonstrations":
        yield {**asked, "completion": right}
        return
    wrong = _written(question, _wrong(prompt, answers, number))
    if kind == "pairs":
        yield {**asked, "chosen": right, "rejected": wrong}
        return
    yield {**asked, "completion": right, "label": True}
    yield {**asked, "completion": wrong, "label": False}


def _written(question: Written, answer: str) -> Written:
    """Answer in the form of the question: text or messages."""
    return answer if isinstance(question, str) else [message("assistant", answer)]


def _wrong(prompt: Prompt, answers: list[str], number: int) -> str:
    """The answer to another prompt that is not this one's. Errors: ConfigError if there is none."""
    first = named_seed("wrong answer", prompt.id, prompt.text) % len(answers)
    for answer in (*answers[first:], *answers[:first]):
        if answer != answers[number]:
            return answer
    raise ConfigError("data.file = 'task': all worked examples have the same answer, so none is wrong: take another")

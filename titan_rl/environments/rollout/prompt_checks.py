"""Checks of a task's prompts before a run, with the model's tokenizer."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice

import numpy as np

from titan_rl.config.load import ConfigError
from titan_rl.data.text.conversation import first_unknown
from titan_rl.data.text.message_forms import texts_of
from titan_rl.data.text.rendering import with_options
from titan_rl.data.text.thinking import ends_closed, open_tokens, thinking_tags
from titan_rl.data.text.tokenizer import Tokenizer, has_unknown_words
from titan_rl.data.text.turns import encode_answer
from titan_rl.data.types import Prompt
from titan_rl.environments.interfaces.task import Task, parts_of, task_of
from titan_rl.environments.prompts.stream import EACH_ROW, PromptStream
from titan_rl.environments.rollout.decoding import ThinkingBudget
from titan_rl.environments.rollout.demonstrations import worked_answers
from titan_rl.environments.rollout.group import encode_prompt
from titan_rl.mesh.processes.parallel_map import parallel_map

_FEW = 4
"""Prompts checked of an endless task."""


def training_prompts(task: Task, seed: int, count: int = _FEW) -> Iterator[Prompt]:
    """Training prompts: all of a finite task, ``count`` of an endless one; of a mixture, those of each task."""
    for label, part in task.parts.items():
        for prompt in training_prompts(part, seed, count):
            yield replace(prompt, task=label)
    if not task.parts:
        stream = PromptStream(task, seed, EACH_ROW) if task.size else PromptStream(task, seed)
        yield from islice(stream, task.size.train if task.size else count)


def check_seats(task: Task, group_size: int) -> None:
    """Check the group size. Errors: ConfigError if a group has not each seat equally often, and twice at least."""
    for part in parts_of(task):
        seats, count = part.seats, len(part.seats)
        if count and (group_size % count or group_size < 2 * count):
            raise ConfigError(
                f"rollout.group_size = {group_size}: each episode has the seats {', '.join(seats)}: set a multiple of "
                f"{count}, {2 * count} at least"
            )


def check_demonstrations(task: Task, seed: int, tokenizer: Tokenizer, row_tokens: int, positions: int) -> None:
    """Check worked examples for SFT.

    Errors: ConfigError for a missing one, or one longer than a row or the model's positions, both in tokens. Replies of
    environments are not known here, and not counted.
    """
    check = partial(_check_demonstration, task, tokenizer, row_tokens, positions)
    for _ in parallel_map(check, list(training_prompts(task, seed)), "tokenizing worked examples"):
        pass


def _check_demonstration(task: Task, tokenizer: Tokenizer, row_tokens: int, positions: int, prompt: Prompt) -> None:
    part = task_of(task, prompt)
    is_chat, tools = not isinstance(part.messages(prompt), str), part.tools_of(prompt)
    answers = worked_answers(part, prompt)
    _check_known(tokenizer, prompt, [("worked example", answer) for answer in answers])
    try:
        own = with_options(tokenizer, prompt.template_options)
        encoded = [encode_answer(own, answer, is_chat=is_chat, tools=tools) for answer in answers]
    except ConfigError as error:
        raise ConfigError(f"{place(prompt)}: {error}") from None
    length = len(encode_prompt(task, tokenizer, prompt)) + sum(map(len, encoded))
    if length > row_tokens:
        raise ConfigError(
            f"{place(prompt)}: its worked example has {length} tokens, and a row holds "
            f"training.seq_len = {row_tokens}: raise it, or set sft.steps = 0"
        )
    if length > positions:
        raise ConfigError(
            f"{place(prompt)}: its worked example has {length} tokens, and the model has {positions} positions: "
            f"take a model with more, or set sft.steps = 0"
        )


def check_characters(task: Task, tokenizer: Tokenizer, prompts: Iterable[Prompt]) -> None:
    """Check prompts' characters. Errors: ConfigError with the prompt for one that the tokenizer does not know."""
    if not has_unknown_words(tokenizer):
        return
    for _ in parallel_map(partial(_check_characters, task, tokenizer), list(prompts), "tokenizing prompts' texts"):
        pass


def _check_characters(task: Task, tokenizer: Tokenizer, prompt: Prompt) -> None:
    messages = task.messages(prompt)
    parts = [messages] if isinstance(messages, str) else list(chain.from_iterable(map(texts_of, messages)))
    _check_known(tokenizer, prompt, [*(("prompt", part) for part in parts), ("answer", prompt.answer)])


def _check_known(tokenizer: Tokenizer, prompt: Prompt, fields: Iterable[tuple[str, str]]) -> None:
    for field, text in fields:
        if (character := first_unknown(tokenizer, text)) is not None:
            raise ConfigError(
                f"{place(prompt)}: the model's tokenizer does not know {character!r} in the {field}: leave it out, or "
                f"set model.path to another model"
            )


class ThinkingCheck:
    """Check of a budget for thinking against the prompts that it holds for, one after the other."""

    def __init__(self, budget: ThinkingBudget, tokenizer: Tokenizer) -> None:
        """Errors: ConfigError for a budget of a model that has no thinking."""
        self._budget, self._tokenizer = budget, tokenizer
        self._tags = thinking_tags(tokenizer) if budget.tokens else None
        self._num_prompts = self._num_closed = 0
        if budget.tokens and self._tags is None:
            raise ConfigError(
                f"{budget.setting} = {budget.tokens}: the model's tokenizer has no token for <think> and for </think>, "
                f"so it has no thinking to close: leave it out"
            )

    def add(self, prompt: Prompt, tokens: np.ndarray) -> None:
        """Errors: ConfigError for a prompt that leaves no token to think, so that each answer would begin with
        the end tag."""
        if self._tags is None:
            return
        setting, budget = self._budget
        if (count := open_tokens(tokens, self._tags)) is not None and count >= budget:
            raise ConfigError(
                f"{place(prompt)}: the prompt opens thinking and does not close it, {count} tokens before its end, "
                f"which {setting} = {budget} would close before the answer: raise it, or leave the tag out"
            )
        self._num_prompts += 1
        self._num_closed += ends_closed(tokens, self._tags, self._tokenizer)

    def check_effect(self) -> None:
        """Errors: ConfigError if each of the prompts ends with thinking that is closed."""
        if 0 < self._num_prompts == self._num_closed:
            raise ConfigError(
                f"{self._budget.setting} = {self._budget.tokens} has no effect: the chat template closes thinking in "
                f"each prompt; leave it out, or see model.chat_template.options"
            )


def encode_all(task: Task, tokenizer: Tokenizer, prompts: Sequence[Prompt]) -> Iterator[np.ndarray]:
    """Tokens of each prompt. Errors: ConfigError that begins with the prompt's place."""
    return parallel_map(partial(encode_checked, task, tokenizer), prompts, "tokenizing prompts")


def encode_checked(task: Task, tokenizer: Tokenizer, prompt: Prompt) -> np.ndarray:
    """Tokens of a prompt. Errors: ConfigError that begins with its place."""
    try:
        return encode_prompt(task, tokenizer, prompt)
    except ConfigError as error:
        raise ConfigError(f"{place(prompt)}: {error}") from None


def place(prompt: Prompt) -> str:
    """Origin of a prompt for messages: the line of a data file, else its id."""
    return prompt.entry.get("place", f"prompt {prompt.id}")

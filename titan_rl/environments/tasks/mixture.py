"""Mixture of several tasks (config/mixture.py); each prompt belongs to one of them."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from titan_rl.config.load import ConfigError
from titan_rl.config.mixture import parts_of
from titan_rl.config.sections.schema import TaskConfig
from titan_rl.data.text.messages import Message
from titan_rl.data.types import Prompt
from titan_rl.environments.interfaces.environment import Environment
from titan_rl.environments.interfaces.task import RewardParts, Task
from titan_rl.environments.interfaces.tool import Schema
from titan_rl.environments.prompts.curriculum import class_of


class MixtureTask(Task):
    """Endless task, in rounds: each task has as many prompts as its weight, in a seeded order.

    A task with a finite number of rows begins anew when it has given all. Errors: ConfigError.
    """

    def __init__(self, task: TaskConfig, make: Callable[[TaskConfig], Task]):
        """``make``: a task by its configuration."""
        configs = parts_of(task)
        self._parts: dict[str, Task] = {}
        for label, config in configs.items():
            with _errors_under(label):
                self._parts[label] = make(config)
        self._weights = {label: config.weight for label, config in configs.items()}
        self._round = [label for label, weight in self._weights.items() for _ in range(weight)]
        self.tools = [tool for part in self.parts.values() for tool in part.tools]

    @property
    def parts(self) -> Mapping[str, Task]:
        return self._parts

    @property
    def has_one_answer(self) -> bool:
        return all(part.has_one_answer for part in self.parts.values())

    def prompt(self, stream: str, seed: int, index: int) -> Prompt:
        number, place = divmod(index, len(self._round))
        order = random.Random(f"{stream} {seed} {number}").sample(self._round, len(self._round))
        label = order[place]
        index_in_part = number * self._weights[label] + order[:place].count(label)
        with _errors_under(label):
            prompt = self.parts[label].prompt(stream, seed, index_in_part)
        return replace(prompt, id=f"{stream}/{index:07d}", task=label)

    def tools_of(self, prompt: Prompt) -> Sequence[Schema]:
        return self.parts[prompt.task].tools_of(prompt)

    def check_ready(self) -> None:
        """Check all tasks. Errors: ConfigError."""
        for label, part in self.parts.items():
            with _errors_under(label):
                part.check_ready()

    def prepare_scoring(self) -> None:
        for part in self.parts.values():
            part.prepare_scoring()

    def is_held_out(self, prompt: Prompt) -> bool:
        return self.parts[prompt.task].is_held_out(prompt)

    def messages(self, prompt: Prompt) -> str | list[Message]:
        return self.parts[prompt.task].messages(prompt)

    def demonstration(self, prompt: Prompt) -> str | list[str]:
        return self.parts[prompt.task].demonstration(prompt)

    def environment(self, prompt: Prompt) -> Environment:
        return self.parts[prompt.task].environment(prompt)

    def row(self, prompt: Prompt) -> dict[str, Any]:
        return self.parts[prompt.task].row(prompt)

    def difficulty(self, prompt: Prompt) -> str:
        """Class of the prompt within its own task."""
        return f"{prompt.task}, {class_of(self.parts[prompt.task], prompt)}"

    def score(self, prompt: Prompt, answers: list[str]) -> RewardParts:
        return self.parts[prompt.task].score(prompt, answers)


@contextmanager
def _errors_under(label: str) -> Iterator[None]:
    """Prefix a task's errors with its table."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"task.options.{label}: {error}") from None

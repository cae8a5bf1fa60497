"""Task of a reasoning-gym family: compact strings for tiny models, or chat messages (families.py)."""

import dataclasses
from collections.abc import Iterator
from itertools import count, islice
from typing import Any

from titan_rl.compat.reasoning_gym import family
from titan_rl.config.load import ConfigError, nearest
from titan_rl.config.sections.schema import TaskConfig
from titan_rl.data.text.messages import Message, message
from titan_rl.data.types import Prompt
from titan_rl.environments.interfaces.task import Task
from titan_rl.environments.reasoning_gym.checked_families import RUNS_THE_ANSWER
from titan_rl.environments.reasoning_gym.families import (
    COMPACT,
    PAYS_FOR_NOTHING,
    UNREADABLE,
    check_name,
    default_scoring,
    exact_score,
    family_score,
    make_dataset,
    text_score,
    worked_answer,
)

_SHOT_SEED = 2**30
"""Beyond the seeds of all prompt streams."""


class ReasoningGymTask(Task):
    """Endless task of a family; one in five prompts is held out, by a hash of its text. Errors: ConfigError."""

    def __init__(self, task: TaskConfig):
        check_name(task.name, task.style)
        self.name, self.style, self.system_prompt = task.name, task.style, task.system_prompt
        self.scoring = self._scoring(task.scoring)
        self.options = dict(task.options)
        self.shots = self.options.pop("shots", 0)
        if type(self.shots) is not int or self.shots < 0:
            raise ConfigError(f"task.options.shots = {self.shots!r}: give the number of worked examples, at least 0")
        self._check_options()
        self._datasets: dict[int, Any] = {}
        try:
            prompt = self.prompt("check", 0, 0)
        except UNREADABLE as error:
            raise ConfigError(f"task.options = {self.options}: {self.name} says {error}") from None
        if self.shots:
            self.demonstration(prompt)

    def _scoring(self, scoring: str) -> str:
        if scoring == "family" and self.name in PAYS_FOR_NOTHING:
            raise ConfigError(
                f"task.scoring = 'family' is refused for {self.name!r}, whose scorer pays in full for answers that "
                f"say nothing: leave it out"
            )
        if scoring == "family" and self.name in RUNS_THE_ANSWER:
            raise ConfigError(
                f"task.scoring = 'family' is refused for {self.name!r}, whose scorer would run the answer: leave it out"
            )
        if scoring != "auto":
            return scoring
        return "exact" if self.style == "compact" else default_scoring(self.name)

    def _check_options(self) -> None:
        known = {f.name for f in dataclasses.fields(family(self.name)[1])} - {"seed", "size"}
        for key in self.options:
            if key not in known:
                rows = "; rows of a file are of task.name = 'jsonl'" if key == "file" else ""
                raise ConfigError(f"unknown key task.options.{key}: {nearest(key, known | {'shots'})}{rows}")

    def _dataset(self, seed: int) -> Any:
        if seed not in self._datasets:
            self._datasets[seed] = make_dataset(self.name, seed, **self.options)
        return self._datasets[seed]

    def _entry(self, prompt: Prompt) -> dict:
        return self._dataset(prompt.entry["seed"])[prompt.entry["index"]]

    def prompt(self, stream: str, seed: int, index: int) -> Prompt:
        entry = self._dataset(seed)[index]
        text = COMPACT[self.name](entry["metadata"]) if self.style == "compact" else entry["question"].strip()
        answer = worked_answer(self.name, entry)
        return Prompt(f"{stream}/{index:07d}", text, answer or "", {"seed": seed, "index": index})

    def messages(self, prompt: Prompt) -> str | list[Message]:
        if self.style == "compact":
            return prompt.text
        messages = [message("system", self.system_prompt)] if self.system_prompt else []
        for example in self._examples():
            messages += [message("user", example.text), message("assistant", example.answer)]
        return [*messages, message("user", prompt.text)]

    def _examples(self) -> Iterator[Prompt]:
        """Worked examples, the same before every prompt, none of them held out."""
        prompts = (self.prompt("shot", _SHOT_SEED, index) for index in count())
        return islice((prompt for prompt in prompts if not self.is_held_out(prompt)), self.shots)

    def demonstration(self, prompt: Prompt) -> str:
        """Right answer. Errors: ConfigError if the family gives none."""
        if not prompt.answer and worked_answer(self.name, self._entry(prompt)) is None:
            raise ConfigError(
                f"task.name = {self.name!r} has no worked answers to learn from: set sft.steps = 0 and leave "
                f"task.options.shots out"
            )
        return prompt.answer

    def row(self, prompt: Prompt) -> dict[str, Any]:
        return dict(self._entry(prompt))

    def score(self, prompt: Prompt, answers: list[str]) -> dict[str, float]:
        answer, entry, dataset = answers[-1].strip(), self._entry(prompt), self._dataset(prompt.entry["seed"])
        if self.scoring == "family":
            return {"score": family_score(self.name, dataset, entry, answer)}
        if self.style == "compact":
            return {"exact": text_score(entry, answer)}
        return {"exact": exact_score(self.name, dataset, entry, answer)}

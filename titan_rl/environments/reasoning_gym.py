"""reasoning-gym families by name, as compact strings for tiny models or as chat messages.

Nine families are refused: their scorers run the model's answer as Python. For others only the exact answer counts:
three whose scorers pay for answers that say nothing, and all that have no scorer of their own, for reasoning-gym's
default pays for any string that holds the answer somewhere, and models learn to write lists of guesses. Compact
answers are exact by nature.
"""

import dataclasses
from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import Any

import reasoning_gym
from reasoning_gym.factory import DATASETS, ProceduralDataset

from titan_rl.config.load import ConfigError, nearest
from titan_rl.config.schema import TaskConfig
from titan_rl.data.seeds import is_held_out
from titan_rl.data.types import Prompt

RUNS_THE_ANSWER = frozenset(
    {
        "binary_matrix",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    }
)
CANNOT_BE_STREAMED = frozenset({"acre", "composite", "gsm_symbolic", "list_functions", "word_ladder"})
"""Families that are built whole, not by index, or out of other families."""
PAYS_FOR_NOTHING = frozenset({"coin_flip", "complex_arithmetic", "game_of_life_halting", "propositional_logic"})
_UNREADABLE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
)
"""What families raise over answers and options that they cannot read."""
_SIZE = 2**31 - 1
_SHOT_SEED = 2**30
"""Beyond the seeds of all prompt streams."""


def _expression(metadata: dict) -> str:
    return metadata["expression"].replace(" ", "") + "="


def _numbers(metadata: dict) -> str:
    return ",".join(map(str, metadata["numbers"])) + "="


COMPACT: dict[str, Callable[[dict], str]] = {
    "chain_sum": _expression,
    "count_bits": lambda metadata: f"{metadata['binary']}=",
    "decimal_chain_sum": _expression,
    "fraction_simplification": lambda metadata: f"{metadata['numerator']}/{metadata['denominator']}=",
    "gcd": _numbers,
    "lcm": _numbers,
    "products": _expression,
    "spell_backward": lambda metadata: f"{metadata['word']}=",
}
"""Families that can be asked in a few characters, from their metadata."""


def usable_families() -> list[str]:
    return sorted(set(DATASETS) - RUNS_THE_ANSWER - CANNOT_BE_STREAMED)


def _check_name(name: str, style: str) -> None:
    """Errors: ConfigError for a family that is unknown or refused, or that has no compact form."""
    if name in RUNS_THE_ANSWER:
        raise ConfigError(
            f"task.name = {name!r} is refused: its scorer runs the model's answer as Python; choose another"
        )
    if name in CANNOT_BE_STREAMED:
        raise ConfigError(f"task.name = {name!r} is refused: its prompts cannot be made one by one; choose another")
    if name not in usable_families():
        raise ConfigError(f"task.name = {name!r} is unknown: {nearest(name, [*usable_families(), 'jsonl'])}")
    if style == "compact" and name not in COMPACT:
        raise ConfigError(
            f"task.style = 'compact' is not defined for {name!r}: use 'chat', or one of {', '.join(sorted(COMPACT))}"
        )


class ReasoningGymTask:
    """Prompts without end; one in five is held out, by a hash of its text. Errors: ConfigError."""

    size = None

    def __init__(self, task: TaskConfig):
        _check_name(task.name, task.style)
        self.name, self.style, self.system_prompt = task.name, task.style, task.system_prompt
        self.options = dict(task.options)
        self.shots = self.options.pop("shots", 0)
        if type(self.shots) is not int or self.shots < 0:
            raise ConfigError(f"task.options.shots = {self.shots!r}: give the number of worked examples, at least 0")
        self._check_options()
        has_scorer = DATASETS[self.name][0].score_answer is not ProceduralDataset.score_answer
        self._exact_only = self.style == "compact" or self.name in PAYS_FOR_NOTHING or not has_scorer
        self._datasets: dict[int, Any] = {}
        try:
            self.prompt("check", 0, 0)
        except _UNREADABLE as error:
            raise ConfigError(f"task.options = {self.options}: {self.name} says {error}") from None

    def _check_options(self) -> None:
        known = {f.name for f in dataclasses.fields(DATASETS[self.name][1])} - {"seed", "size"}
        for key in self.options:
            if key not in known:
                raise ConfigError(f"unknown key task.options.{key}: {nearest(key, known | {'shots'})}")

    def _dataset(self, seed: int):
        if seed not in self._datasets:
            self._datasets[seed] = reasoning_gym.create_dataset(self.name, seed=seed, size=_SIZE, **self.options)
        return self._datasets[seed]

    def _entry(self, prompt: Prompt) -> dict:
        return self._dataset(prompt.entry["seed"])[prompt.entry["index"]]

    def prompt(self, stream: str, seed: int, index: int) -> Prompt:
        entry = self._dataset(seed)[index]
        text = COMPACT[self.name](entry["metadata"]) if self.style == "compact" else entry["question"].strip()
        return Prompt(f"{stream}/{index:07d}", text, str(entry["answer"]), {"seed": seed, "index": index})

    def is_held_out(self, prompt: Prompt) -> bool:
        return is_held_out(prompt.text)

    def messages(self, prompt: Prompt) -> str | list[dict[str, str]]:
        if self.style == "compact":
            return prompt.text
        messages = [dict(role="system", content=self.system_prompt)] if self.system_prompt else []
        for example in self._examples():
            messages += [dict(role="user", content=example.text), dict(role="assistant", content=example.answer)]
        return [*messages, dict(role="user", content=prompt.text)]

    def _examples(self) -> Iterator[Prompt]:
        """Worked examples, the same before every prompt, none of them held out."""
        prompts = (self.prompt("shot", _SHOT_SEED, index) for index in count())
        return islice((prompt for prompt in prompts if not self.is_held_out(prompt)), self.shots)

    def demonstration(self, prompt: Prompt) -> str:
        return prompt.answer

    def reply(self, prompt: Prompt, answers: list[str]) -> str | None:
        return None

    def row(self, prompt: Prompt) -> dict[str, Any]:
        return dict(self._entry(prompt))

    def score(self, prompt: Prompt, answers: list[str]) -> dict[str, float]:
        answer, entry = answers[-1].strip(), self._entry(prompt)
        if self._exact_only:
            return {"exact": float(answer == str(entry["answer"]))}
        try:
            return {"score": float(self._dataset(prompt.entry["seed"]).score_answer(answer=answer, entry=entry))}
        except _UNREADABLE:  # some families' scorers stumble over answers that they cannot read
            return {"score": 0.0}

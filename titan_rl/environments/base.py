"""What a task is: prompts by index, an optional reply to each answer, and a score.

A task is made anew, from its config, wherever it is needed: in the controller for the prompt stream, in verifiers
to render prompts, and in scorer processes, the only place where a model's answer meets the expected one.
"""

from typing import Any, Protocol

from titan_rl.data.types import Prompt


class Task(Protocol):
    """The same (stream, seed, index) always gives the same prompt, in every process."""

    def prompt(self, stream: str, seed: int, index: int) -> Prompt: ...

    def messages(self, prompt: Prompt) -> str | list[dict[str, str]]:
        """The prompt as plain text, or as chat messages for the tokenizer's template."""

    def demonstration(self, prompt: Prompt) -> str:
        """An answer that earns the full score, for the supervised warm-up."""

    def reply(self, prompt: Prompt, answers: list[str]) -> str | None:
        """What the environment says to the latest answer; None ends the episode."""

    def score(self, prompt: Prompt, answers: list[str]) -> dict[str, float]:
        """Parts of the reward; they add up to it. 1.0 in all means correct. Runs in a scorer process only."""


def correct(reward: float) -> bool:
    """Whether a reward counts as a right answer in held-out accuracy."""
    return reward >= 1.0 - 1e-9


def make_task(name: str, style: str, options: dict[str, Any]) -> Task:
    """Errors: ConfigError for an unknown or refused name, a style that the task lacks, or options it does not take."""
    from titan_rl.environments.reasoning_gym import ReasoningGymTask

    return ReasoningGymTask(name, style, options)

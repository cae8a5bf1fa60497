"""What a task is: prompts by index, the environment that each is played in, and a score."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from titan_rl.config.load import ConfigError
from titan_rl.data.types import Prompt, correct
from titan_rl.environments.environment import Environment

__all__ = ["Size", "Task", "UserCodeError", "correct", "task_of", "tools_of"]


class UserCodeError(ConfigError):
    """A task or reward function of the user's failed: one line with its name, the exception and the place."""


class Size(NamedTuple):
    """Rows of a finite task."""

    train: int
    held_out: int


class Task(Protocol):
    """The same (stream, seed, index) always gives the same prompt, in every process.

    A task of your own needs ``prompt``, ``messages``, ``demonstration`` and ``score``; the rest has a default
    (user_task.py).

    A task may have more. ``speaks_first`` (bool): its environments say something at their reset, so each sample has a
    first observation of its own. ``sessions`` (sessions.py): episodes wait for their turn. ``tools_of(prompt)``: the
    schemas of what may be called in this prompt's episodes alone. ``agent(prompt)``: what drives the model itself
    (agents/agent.py), and takes the place of ``environment``; ``seats``: names of those who play an episode of it, each
    of whom has a sample of his own. ``check_ready()``: is called before a run starts, and nowhere else; errors:
    ConfigError. ``prepare_scoring()``: is called in a scoring process before any answer comes. ``close()``: a coroutine
    function, when no more episodes are played.
    """

    tools: Sequence[dict[str, Any]]
    """Schemas of what the model may call, for the chat template."""

    size: Size | None
    """None: prompts are made without end. Otherwise the stream ``held_out`` has ``size.held_out`` different indices."""

    def prompt(self, stream: str, seed: int, index: int) -> Prompt:
        """Prompt number ``index``, with the id ``f"{stream}/{index:07d}"``."""

    def is_held_out(self, prompt: Prompt) -> bool:
        """Whether the prompt is for evaluation only; the training stream leaves it out."""

    def messages(self, prompt: Prompt) -> str | list[dict[str, str]]:
        """The prompt as plain text, or as chat messages for the model's chat template."""

    def demonstration(self, prompt: Prompt) -> str | list[str]:
        """An answer that earns the full score, for SFT; a list has the answer of each turn."""

    def environment(self, prompt: Prompt) -> Environment:
        """What one sample of the prompt is played in; made anew for each."""

    def row(self, prompt: Prompt) -> dict[str, Any]:
        """What a reward function gets besides the prompt and the answer, e.g. all columns of a data file's row."""

    def score(self, prompt: Prompt, answers: list[str]) -> dict[str, float | list[float]]:
        """Parts of the reward; they add up to it. 1.0 in all means correct. Runs in a scorer process only.

        A part that is a list has one number for each answer: the rewards of turns (algorithms/turns.py)."""


def task_of(task: Task, prompt: Prompt) -> Task:
    """The task itself, or of a mixture (mixture.py) the one that the prompt is of."""
    return task.parts[prompt.task] if prompt.task else task


def parts_of(task: Task) -> list[Task]:
    """The task itself, or those that a mixture is of."""
    return list(getattr(task, "parts", {"": task}).values())


def tools_of(task: Task, prompt: Prompt) -> Sequence[dict[str, Any]]:
    """Schemas of what the model may call in an episode of the prompt."""
    return task.tools_of(prompt) if hasattr(task, "tools_of") else task.tools

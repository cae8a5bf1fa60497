"""Base class of tasks: prompts by index, an environment for each, and a score."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import cached_property, partial
from typing import Any, NamedTuple

from titan_rl.config.load import ConfigError
from titan_rl.config.plugins import is_overridden
from titan_rl.data import seeds
from titan_rl.data.text.messages import Message
from titan_rl.data.types import Prompt, correct
from titan_rl.environments.interfaces.agent import Agent
from titan_rl.environments.interfaces.environment import Environment, Replying
from titan_rl.environments.interfaces.tool import Schema, Tool, schema_of

__all__ = ["RewardParts", "Size", "Task", "TaskWrapper", "UserCodeError", "correct", "parts_of", "task_of"]

RewardParts = Mapping[str, float | list[float]]
"""Parts of a reward by name, which add up to it; a list has one number for each answer."""


REPLYING = ("reply", "environment", "agent")
"""Hooks by which an episode goes on after an answer."""


class UserCodeError(ConfigError):
    """Failure of the user's task or reward function: one line with its name, the exception and the place."""


class Size(NamedTuple):
    """Rows of a finite task."""

    train: int
    held_out: int


class Task:
    """Source of prompts, with the environment and the score of each.

    The same (stream, seed, index) always gives the same prompt, in every process. A task has at least ``prompt``,
    ``messages``, ``demonstration`` and ``score``; every other attribute and method is a hook with a default. A task of
    the user's own may be any class with those four (user_task.py), where a misspelled hook is an error.
    """

    tools: Sequence[Tool | Schema] = ()
    """Tools of every prompt, for the chat template."""
    speaks_first: bool = False
    """Whether its environments say something at their reset, so that each sample has a first observation of its own."""
    sessions: AbstractAsyncContextManager[Any] | None = None
    """Entered for each episode, which so waits for its turn (session_limit.py)."""
    seats: Sequence[str] = ()
    """Names of those who play an episode of its agent, each of whom has a sample of their own."""

    @cached_property
    def size(self) -> Size | None:
        """Numbers of prompts; None: endless. The stream ``held_out`` of a finite task has ``size.held_out`` prompts."""
        return None

    @property
    def num_overlapping(self) -> int:
        """Training rows that were left out, since a held-out one asks the same."""
        return 0

    @property
    def row_notices(self) -> Sequence[str]:
        """Lines about its rows that a user should know before a run."""
        return ()

    def prompt(self, stream: str, seed: int, index: int) -> Prompt:
        """Prompt number ``index``, with the id ``f"{stream}/{index:07d}"``."""
        raise NotImplementedError

    def is_held_out(self, prompt: Prompt) -> bool:
        """Whether the prompt is for evaluation only; the training stream leaves it out. One in five, by its text and
        images."""
        return seeds.is_held_out(prompt.question_key)

    def messages(self, prompt: Prompt) -> str | list[Message]:
        """Plain text of the prompt, or chat messages for the model's chat template."""
        raise NotImplementedError

    def demonstration(self, prompt: Prompt) -> str | list[str]:
        """Worked answer with the full score, for SFT; a list has the answer of each turn."""
        raise NotImplementedError

    def tools_of(self, prompt: Prompt) -> Sequence[Schema]:
        """Schemas of the tools in an episode of the prompt."""
        return [schema_of(tool) for tool in self.tools]

    def reply(self, prompt: Prompt, answers: list[str]) -> str | None:
        """Next user message after the latest answer, where ``environment`` is not overridden; None ends the episode."""
        return None

    def environment(self, prompt: Prompt) -> Environment:
        """New environment for one sample of the prompt."""
        return Replying(partial(self.reply, prompt))

    def agent(self, prompt: Prompt) -> Agent:
        """New agent (interfaces/agent.py) for one sample of the prompt, in the place of ``environment``."""
        raise NotImplementedError

    def row(self, prompt: Prompt) -> dict[str, Any]:
        """Columns for a reward function, e.g. those of a data file's row."""
        return {"question": prompt.text, "answer": prompt.answer} | prompt.entry

    def difficulty(self, prompt: Prompt) -> str | None:
        """Name of the prompt's class of pass rates, for the curriculum (curriculum.py)."""
        return None

    def score(self, prompt: Prompt, answers: list[str]) -> RewardParts:
        """Parts of the reward, by name; their sum is the reward, and 1.0 means correct. Runs in a scorer process only.

        A part that is a list has one number for each answer: rewards of turns (turn_grpo)."""
        raise NotImplementedError

    def check_ready(self) -> None:
        """Check servers and packages before a run starts, and nowhere else. Errors: ConfigError."""

    def prepare_episodes(self) -> None:
        """Warm up a verifier process before its first episode, in a thread, under ``mesh.start_timeout``. Errors:
        ConfigError."""

    def prepare_scoring(self) -> None:
        """Warm up a scoring process before its first answer."""

    async def close(self) -> None:
        """Release resources after the last episode."""

    # what is asked of a task, and is no hook

    @property
    def has_agent(self) -> bool:
        """Whether an agent drives the model in its episodes."""
        return is_overridden(self, "agent", Task)

    @property
    def has_one_answer(self) -> bool:
        """Whether an episode is over with its first answer, since nothing replies to it."""
        return not any(is_overridden(self, name, Task) for name in REPLYING)

    @property
    def most_episode_bytes(self) -> int:
        """Most bytes that episodes of one verifier process hold at once beside it, such as workspaces."""
        return sum(part.most_episode_bytes for part in self.parts.values())

    @property
    def parts(self) -> Mapping[str, "Task"]:
        """Tasks of a mixture (mixture.py) by label; empty for any other task."""
        return {}


class TaskWrapper(Task):
    """Task with all hooks of another; a subclass overrides some."""

    def __init__(self, task: Task):
        self.task = task
        self.tools, self.speaks_first = task.tools, task.speaks_first
        self.sessions, self.seats = task.sessions, task.seats

    @cached_property
    def size(self) -> Size | None:
        return self.task.size

    @property
    def num_overlapping(self) -> int:
        return self.task.num_overlapping

    @property
    def row_notices(self) -> Sequence[str]:
        return self.task.row_notices

    def prompt(self, stream: str, seed: int, index: int) -> Prompt:
        return self.task.prompt(stream, seed, index)

    def is_held_out(self, prompt: Prompt) -> bool:
        return self.task.is_held_out(prompt)

    def messages(self, prompt: Prompt) -> str | list[Message]:
        return self.task.messages(prompt)

    def demonstration(self, prompt: Prompt) -> str | list[str]:
        return self.task.demonstration(prompt)

    def tools_of(self, prompt: Prompt) -> Sequence[Schema]:
        return self.task.tools_of(prompt)

    def reply(self, prompt: Prompt, answers: list[str]) -> str | None:
        return self.task.reply(prompt, answers)

    def environment(self, prompt: Prompt) -> Environment:
        return self.task.environment(prompt)

    def agent(self, prompt: Prompt) -> Agent:
        return self.task.agent(prompt)

    def row(self, prompt: Prompt) -> dict[str, Any]:
        return self.task.row(prompt)

    def difficulty(self, prompt: Prompt) -> str | None:
        return self.task.difficulty(prompt)

    def score(self, prompt: Prompt, answers: list[str]) -> RewardParts:
        return self.task.score(prompt, answers)

    def check_ready(self) -> None:
        self.task.check_ready()

    def prepare_episodes(self) -> None:
        self.task.prepare_episodes()

    def prepare_scoring(self) -> None:
        self.task.prepare_scoring()

    async def close(self) -> None:
        await self.task.close()

    @property
    def has_agent(self) -> bool:
        return self.task.has_agent

    @property
    def has_one_answer(self) -> bool:
        return self.task.has_one_answer

    @property
    def most_episode_bytes(self) -> int:
        return self.task.most_episode_bytes

    @property
    def parts(self) -> Mapping[str, Task]:
        return self.task.parts


def task_of(task: Task, prompt: Prompt) -> Task:
    """Task of the prompt within a mixture (mixture.py), else the task itself."""
    return task.parts[prompt.task] if prompt.task else task


def parts_of(task: Task) -> list[Task]:
    """Tasks of a mixture, else the task itself."""
    return list(task.parts.values()) or [task]

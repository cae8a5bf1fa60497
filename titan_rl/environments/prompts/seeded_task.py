"""Tasks of external environments: a prompt is a seed, with which an environment is reset and then stepped.

What the environment says at its reset stands behind the prompt, and each answer is an action, until it says that it is
over or ``max_turns`` answers were given. Rewards are its own alone.
"""

import random
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from titan_rl.config.load import ConfigError
from titan_rl.config.sections.kinds import Count, Seconds, Style
from titan_rl.config.sections.schema import TaskConfig
from titan_rl.data.text.messages import Message, message
from titan_rl.data.types import Prompt
from titan_rl.environments.conversation.session_limit import Sessions
from titan_rl.environments.interfaces.environment import OVER, OneAnswer, Reply
from titan_rl.environments.interfaces.task import Task
from titan_rl.environments.interfaces.tool import ToolError

_SEEDS = 2**31


@dataclass(kw_only=True)
class SteppedOptions:
    """``[task.options]`` common to all such tasks."""

    prompt: Annotated[str, Field(min_length=1)]
    """Text before the environment's first observation."""
    max_turns: Annotated[int, Field(ge=1, le=1000)] = 8
    """Answers after which an episode is over, whatever the environment says."""
    sessions: Count = 1
    """Episodes at once in a verifier process; the others wait for their turn."""
    session_timeout: Seconds = 120.0
    """Seconds that an episode waits for its turn; keep it well below verifier.episode_timeout."""
    timeout: Seconds = 30.0
    """Seconds that the environment has for an answer, to begin an episode or to step; below verifier.step_timeout."""


class SteppedTask(Task):
    """Endless task, whose prompts are seeds; one in five is held out. Errors: ConfigError."""

    speaks_first = True
    style: Style

    def __init__(self, task: TaskConfig, options: SteppedOptions):
        if not task.scores_itself:
            raise ConfigError(f"task.name = {task.name!r} is rewarded by its environment: leave task.reward out")
        self.name, self.style, self.system_prompt, self.options = task.name, task.style, task.system_prompt, options
        self.sessions = Sessions(options.sessions, options.session_timeout)

    def prompt(self, stream: str, seed: int, index: int) -> Prompt:
        episode_seed = random.Random(f"{stream} {seed} {index}").randrange(_SEEDS)
        return Prompt(f"{stream}/{index:07d}", f"seed {episode_seed}", "", {"seed": episode_seed})

    def messages(self, prompt: Prompt) -> str | list[Message]:
        if self.style == "compact":
            return self.options.prompt
        system = [message("system", self.system_prompt)] if self.system_prompt else []
        return [*system, message("user", self.options.prompt)]

    def demonstration(self, prompt: Prompt) -> str:
        raise ConfigError(f"task.name = {self.name!r} has no worked examples: set sft.steps = 0")

    def row(self, prompt: Prompt) -> dict[str, Any]:
        return dict(prompt.entry)

    def score(self, prompt: Prompt, answers: list[str]) -> dict[str, float]:
        """Empty: the environment has rewarded."""
        return {}


@dataclass(frozen=True)
class StepResult:
    """Result of an action, or of a reset."""

    text: str
    reward: float | None = None
    is_over: bool = False


class SteppedEnvironment(OneAnswer):
    """Environment of one episode. An invalid action is answered by its error, and costs a turn."""

    def __init__(self, max_turns: int, style: Style):
        self.max_turns, self.style, self._num_answers = max_turns, style, 0

    @abstractmethod
    async def _begin(self) -> StepResult:
        """Errors: as ``reset``."""

    @abstractmethod
    async def _act(self, answer: str) -> StepResult:
        """Errors: as ``step``; ToolError for what the model did wrong."""

    async def reset(self) -> Reply:
        return Reply(self._messages((await self._begin()).text))

    async def step(self, answer: str) -> Reply:
        self._num_answers += 1
        is_last = self._num_answers >= self.max_turns
        try:
            result = await self._act(answer)
        except ToolError as error:
            return OVER if is_last else Reply(self._messages(f"error: {error}"))
        return Reply([] if result.is_over or is_last else self._messages(result.text), reward=result.reward)

    def _messages(self, text: str) -> list[Message]:
        """Where no template sets it apart, a line's end does."""
        return [{"role": "user", "content": f"{text}\n" if self.style == "compact" else text}]


def needs(task: TaskConfig, names: Sequence[str], why: str) -> None:
    """Check for required options. Errors: ConfigError for a missing one; ``why``: its meaning."""
    for name in names:
        if name not in task.options:
            raise ConfigError(f"task.name = {task.name!r} needs task.options.{name}: {why}")

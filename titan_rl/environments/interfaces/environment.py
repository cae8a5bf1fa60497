"""Environment of an episode: its reply after each answer, and the end of the episode.

An environment is made for one sample of one prompt and seen by no other, so that it may keep whatever state it needs.
It lives in a verifier process, beside many others: what takes long must be awaited. What it knows besides (the expected
answer, a board, a session of a server) reaches the model by nothing but its replies.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from numbers import Real
from typing import Protocol

from titan_rl.data.numbers import as_float
from titan_rl.data.rows.row_fields import encodable
from titan_rl.data.text.messages import Message
from titan_rl.data.types import ToolCall


@dataclass(frozen=True)
class Reply:
    """Reply of an environment to one answer."""

    messages: list[Message] = field(default_factory=list)
    """``{role, content}`` with the role ``tool`` or ``user``; none: the episode is over."""
    reward: float | None = None
    """Reward of the answer, if the environment itself rewards."""
    calls: list[ToolCall] = field(default_factory=list)
    """Records of the answer's tool calls."""

    def __post_init__(self) -> None:
        """Errors: ValueError."""
        for message in self.messages:
            content = message.get("content")
            if message.get("role") not in ("tool", "user") or not isinstance(content, str):
                raise ValueError("a reply's messages are {role, content} of a tool or a user, with text")
            encodable("a reply", "content", content)
        if self.reward is None:
            return
        if not isinstance(self.reward, Real) or not math.isfinite(as_float(self.reward)):
            raise ValueError(f"a reply has the reward {self.reward!r:.100}: give a finite number")


OVER = Reply()


class EnvironmentFailed(RuntimeError):
    """Failure of an environment, not of the model: the rollout is an ``infra_error``."""


class Environment(Protocol):
    """Other side of one episode."""

    async def reset(self) -> Reply | None:
        """Begin the episode, with a Reply if the task's environments speak first (``speaks_first``, task.py).

        Its messages stand behind the prompt. Errors: as ``step``.
        """
        ...

    async def step(self, answer: str) -> Reply:
        """Reply to the model's latest answer, given as text.

        Errors: EnvironmentFailed or ConfigError; any other becomes one.
        """
        ...

    async def close(self) -> None:
        """Release all resources. Called once, also after a failure."""
        ...


class OneAnswer:
    """Environment of an episode with a single answer."""

    async def reset(self) -> Reply | None:
        return None

    async def step(self, answer: str) -> Reply:
        return OVER

    async def close(self) -> None:
        pass


class Replying(OneAnswer):
    """Environment by a function from all answers so far to the next user message; None ends the episode."""

    def __init__(self, reply: Callable[[list[str]], str | None]):
        self._reply, self._answers = reply, list[str]()

    async def step(self, answer: str) -> Reply:
        self._answers.append(answer)
        text = self._reply(list(self._answers))
        return OVER if text is None else Reply([{"role": "user", "content": text}])

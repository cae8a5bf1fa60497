"""What drives the model itself: any program that asks an OpenAI-style endpoint, and ends.

A task with ``agent(prompt)`` is played so, in the place of ``environment(prompt)``. What the agent asks and is answered
is the episode: its tokens are kept as they were sampled, and no agent has to know of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Protocol, runtime_checkable

from titan_rl.config.load import ConfigError
from titan_rl.config.plugins import check_signature, check_spelling
from titan_rl.data.numbers import finite


@dataclass(frozen=True)
class ModelAccess:
    """Where the model is asked in one episode, and by no other."""

    base_url: str
    """``http://127.0.0.1:PORT/v1``"""
    api_key: str
    model: str = "policy"


@dataclass(frozen=True)
class Outcome:
    """Of an episode that several play, whom the requests' ``X-Session-ID`` tells apart."""

    reward: float | None = None
    left_out: frozenset[str] = field(default_factory=frozenset)
    """Sessions that nothing is trained on."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Of each seat, if the task has ``seats``: sessions that are rollouts of their own, each with its reward."""

    def check(self) -> None:
        """Errors: ValueError."""
        given = [*([] if self.reward is None else [self.reward]), *self.rewards.values()]
        for reward in given:
            try:
                finite(reward)
            except ValueError as error:
                raise ValueError(f"{error}, or None") from None


class Agent(Protocol):
    """What drives the model in one sample of one prompt."""

    timeout: float
    """Seconds for the whole episode; below verifier.episode_timeout."""

    async def run(self, model: ModelAccess) -> float | Outcome | None:
        """Until the episode is over: its reward, or None if the task scores what the model answered.

        Errors: EnvironmentFailed or ConfigError; any other becomes one. Once the model was refused an answer, since
        there is no room for more, any other is taken for the episode's end instead, with the reward 0.
        """
        ...


@runtime_checkable
class HasKey(Protocol):
    """An agent whose episode's key must be known before."""

    api_key: str


def check_agent(made: Any) -> Agent:
    """The same object. Errors: ConfigError for what is no agent, or has a misspelled attribute."""
    said = f"an agent {type(made).__name__}"
    check_spelling(said, made, object, ["run"], ["timeout", "api_key"])
    timeout = getattr(made, "timeout", None)
    if isinstance(timeout, bool) or not isinstance(timeout, Real):
        raise ConfigError(f"{said} has no timeout: give it the seconds that its episode may take")
    check_signature(f"{said}: run", getattr(made, "run", None), ["model"])
    return made

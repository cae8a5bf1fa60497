"""Agents: programs that call the model through an OpenAI-style endpoint.

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
    """Endpoint and key of the model for one episode."""

    base_url: str
    """``http://127.0.0.1:PORT/v1``"""
    api_key: str
    model: str = "policy"


@dataclass(frozen=True)
class Outcome:
    """Rewards of an episode; the requests' ``X-Session-ID`` names a seat."""

    reward: float | None = None
    left_out: frozenset[str] = field(default_factory=frozenset)
    """Sessions that nothing is trained on."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Of each seat, if the task has ``seats``: sessions that are rollouts of their own, each with its reward."""

    def check(self) -> None:
        """Check all rewards. Errors: ValueError for NaN or Inf."""
        all_rewards = [*([] if self.reward is None else [self.reward]), *self.rewards.values()]
        for reward in all_rewards:
            try:
                finite(reward)
            except ValueError as error:
                raise ValueError(f"{error}, or None") from None


class Agent(Protocol):
    """Program that drives the model in one sample of one prompt."""

    timeout: float
    """Seconds for the whole episode; below verifier.episode_timeout."""

    async def run(self, model: ModelAccess) -> float | Outcome | None:
        """Play the episode; give its reward, or None if the task scores the answers.

        Errors: EnvironmentFailed or ConfigError; any other becomes one. Once the model was refused an answer, since
        there is no room for more, any other is taken for the episode's end instead, with the reward 0.
        """
        ...


@runtime_checkable
class HasKey(Protocol):
    """Agent with a key of its own, chosen before the episode."""

    api_key: str


def check_agent(agent: Any) -> Agent:
    """Validate an agent and return it. Errors: ConfigError for what is no agent, or has a misspelled attribute."""
    label = f"an agent {type(agent).__name__}"
    check_spelling(label, agent, object, ["run"], ["timeout", "api_key"])
    timeout = getattr(agent, "timeout", None)
    if isinstance(timeout, bool) or not isinstance(timeout, Real):
        raise ConfigError(f"{label} has no timeout: give it the seconds that its episode may take")
    check_signature(f"{label}: run", getattr(agent, "run", None), ["model"])
    return agent

"""Episodes of one prompt: turns from the generator, replies from environments."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from titan_rl.config.load import ConfigError
from titan_rl.config.plugins import check_spelling, what_happened
from titan_rl.data.seeds import named_seed
from titan_rl.data.text.tokenizer import Tokenizer, read_answer
from titan_rl.data.text.turns import encode_opening, encode_reply
from titan_rl.data.types import Completion, Prompt, Request, Sampling
from titan_rl.environments.conversation.episode import Episode
from titan_rl.environments.interfaces.environment import Environment, EnvironmentFailed, OneAnswer, Reply
from titan_rl.environments.interfaces.task import Task
from titan_rl.environments.rewards.functions import shown, source_file
from titan_rl.mesh.processes.deadlines import DeadlineError, within

Ask = Callable[[Request], Awaitable[list[Completion]]]


class PromptTooLong(Exception):
    """Opening messages of an environment that leave no room for an answer."""


@dataclass(frozen=True)
class Player:
    """Player of one prompt's episodes, with all settings."""

    prompt: Prompt
    task: Task
    tokenizer: Tokenizer
    ask: Ask
    sampling: Sampling
    seed: int
    step_timeout: float
    is_chat: bool

    async def first_turns(self, prompt_tokens: np.ndarray) -> list[Episode]:
        """Episodes of all samples with their first answers, or without, where environments speak first."""
        samples = range(self.sampling.num_samples)
        episodes = [Episode(prompt_tokens) for _ in samples]
        if self.task.speaks_first:
            return episodes
        completions = await self.ask(self.request(prompt_tokens, samples, 0))
        for episode, completion in zip(episodes, completions, strict=True):
            episode.add_completion(completion, self.read(completion))
        return episodes

    async def play(self, episode: Episode, sample: int) -> None:
        """Play an episode until it ends, is out of room, or fails."""
        try:
            async with self.task.sessions or nullcontext(), self._environment() as environment:
                self._open(episode, await self._call(environment, "reset"))
                if not episode.turns:
                    await self._answer(episode, sample)
                while await self._step(episode, environment):
                    await self._answer(episode, sample)
        except (ConfigError, EnvironmentFailed) as error:
            episode.failure = "infra_error", str(error)
        except DeadlineError as error:
            episode.failure = "timeout", str(error)

    @asynccontextmanager
    async def _environment(self) -> AsyncIterator[Environment]:
        """Errors: EnvironmentFailed, DeadlineError, ConfigError."""
        environment = self.task.environment(self.prompt)
        _check_hooks(type(environment))
        try:
            yield environment
        finally:
            await self._call(environment, "close")

    def _open(self, episode: Episode, opening: Reply | None) -> None:
        """Errors: EnvironmentFailed, PromptTooLong."""
        if opening is None:
            return
        if not self.task.speaks_first or not isinstance(opening, Reply):
            hint = "its task must say speaks_first = True" if isinstance(opening, Reply) else "give a Reply, or None"
            raise EnvironmentFailed(f"an environment's reset gave {shown(opening)}: {hint}")
        conversation = self.task.messages(self.prompt), self.task.tools_of(self.prompt)
        tokens, provenance = encode_opening(self.tokenizer, *conversation, opening.messages)
        if len(tokens) >= self.sampling.max_tokens:
            raise PromptTooLong
        episode.open(opening.messages, tokens, provenance)

    async def _answer(self, episode: Episode, sample: int) -> None:
        [completion] = await self.ask(self.request(episode.tokens, [sample], len(episode.turns)))
        episode.add_completion(completion, self.read(completion))

    async def _call(self, environment: Environment, name: str, *arguments: str) -> Any:
        label = f"{type(environment).__name__}.{name}"
        try:
            call = getattr(environment, name)(*arguments)
            return await within(self.step_timeout, f"{label} in an episode of {self.prompt.id}", call)
        except (ConfigError, EnvironmentFailed, DeadlineError):
            raise
        except Exception as error:  # user code: whatever it raises is reported by name
            raise EnvironmentFailed(f"{label}: {what_happened(error, source_file(environment))}") from error

    async def _step(self, episode: Episode, environment: Environment) -> bool:
        """Whether the environment replied and the model is to answer."""
        if episode.turns[-1].stop_reason == "length":  # what was cut in the middle is no answer to act upon
            return False
        reply = await self._call(environment, "step", episode.answers[-1])
        if not isinstance(reply, Reply):
            raise EnvironmentFailed(f"{type(environment).__name__}.step gave {shown(reply)}: give a Reply")
        episode.record_reply(reply)
        if not reply.messages:
            return False
        options = {"is_chat": self.is_chat, "tools": self.task.tools_of(self.prompt)}
        tokens, provenance = encode_reply(self.tokenizer, reply.messages, int(episode.tokens[-1]), **options)
        has_turns = len(episode.turns) < self.sampling.max_turns
        if not has_turns or len(episode.tokens) + len(tokens) >= self.sampling.max_tokens:
            episode.cut_short = True
            return False
        episode.add_reply(reply.messages, tokens, provenance)
        return True

    def request(self, tokens: np.ndarray, samples: range | list[int], turn: int, at_most: int | None = None) -> Request:
        """Generator request for a turn of these samples. ``at_most``: limit of new tokens, below the room left."""
        seeds = [named_seed(self.seed, self.prompt.id, sample, turn) for sample in samples]
        room = min(self.sampling.max_new_tokens, self.sampling.max_tokens - len(tokens))
        room = room if at_most is None else min(at_most, room)
        return Request(tokens, seeds, room, self.sampling.temperature, self.sampling.decoding)

    def read(self, completion: Completion) -> str:
        """Decode an answer, without its end token."""
        return read_answer(self.tokenizer, completion.tokens, ended=completion.stop_reason == "stop")


@cache
def _check_hooks(environment: type) -> None:
    """Errors: ConfigError for a misspelled method of a class of environments."""
    check_spelling(f"an environment {environment.__name__}", environment, OneAnswer, ("reset", "step", "close"))

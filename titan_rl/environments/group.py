"""A prompt becomes a group of rollouts: ask for tokens, get the environment's reply, ask again, be scored."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np

from titan_rl.config.load import ConfigError
from titan_rl.config.plugins import what_happened
from titan_rl.data.seeds import named_seed
from titan_rl.data.types import Completion, Group, Prompt, Request, Sampling
from titan_rl.environments.chat import encode_messages, encode_opening, encode_reply
from titan_rl.environments.environment import Environment, EnvironmentFailed, Reply
from titan_rl.environments.episode import Episode
from titan_rl.environments.rewards import shown, source_file
from titan_rl.environments.score import Score
from titan_rl.environments.task import Task, task_of, tools_of
from titan_rl.mesh.supervision.deadlines import DeadlineError, together, within

Ask = Callable[[Request], Awaitable[list[Completion]]]
ScoreAll = Callable[[Prompt, list[list[str]]], Awaitable[tuple[list[Score], float]]]
"""Scores of a prompt's rollouts, and the seconds that scoring took."""
Judge = Callable[[list[np.ndarray]], Awaitable[tuple[list[Score], float]]]
"""A reward model's, by the rollouts' tokens."""


def encode_prompt(task: Task, tokenizer, prompt: Prompt) -> np.ndarray:
    """The prompt's tokens, int32 [T]; besides an environment's replies the only text that is ever tokenized.

    Errors: ConfigError if the chat template refuses the messages.
    """
    return encode_messages(tokenizer, task.messages(prompt), tools_of(task, prompt))


class _TooLong(Exception):
    """What an environment says first leaves no room for an answer."""


async def run_group(
    prompt: Prompt,
    *,
    task: Task,
    tokenizer,
    ask: Ask,
    score: ScoreAll,
    sampling: Sampling,
    seed: int,
    step_timeout: float,
    judge: Judge | None = None,
) -> Group:
    """All samples of one prompt. The first turn is one request; later turns, if the environment replies, one a sample.
    Where environments speak first, each sample has a beginning of its own, and the first turn is one a sample too.

    ``step_timeout``: seconds that an environment has for a reply.

    An environment, a task or a chat template that fails is no error here: its rollouts say ``infra_error`` or
    ``timeout``, and why.
    """
    start, task = time.perf_counter(), task_of(task, prompt)
    try:
        prompt_tokens = encode_prompt(task, tokenizer, prompt)
        is_chat = not isinstance(task.messages(prompt), str)
    except ConfigError as error:
        return _failed_group(prompt, sampling.num_samples, str(error))
    if len(prompt_tokens) >= sampling.max_tokens:
        return Group(prompt.id, [], refused="prompt_too_long")
    player = Player(prompt, task, tokenizer, ask, sampling, seed, step_timeout, is_chat)
    try:
        episodes = await player.first_turns(prompt_tokens)
        await together(player.play(episode, sample) for sample, episode in enumerate(episodes))
    except _TooLong:
        return Group(prompt.id, [], refused="prompt_too_long")
    seconds_generate = time.perf_counter() - start
    scoring = score(prompt, [episode.answers for episode in episodes])
    if judge is None:
        scores, seconds_score = await scoring
        judged: list[Score | None] = [None] * len(episodes)
    else:
        judging = judge([episode.tokens for episode in episodes])
        (scores, seconds_score), (judged, seconds_judge) = await together([scoring, judging])
        seconds_score = max(seconds_score, seconds_judge)
    return Group(
        prompt_id=prompt.id,
        rollouts=[
            episode.finish(prompt, sample, *scored)
            for sample, (episode, *scored) in enumerate(zip(episodes, scores, judged, strict=True))
        ],
        seconds_generate=seconds_generate,
        seconds_score=seconds_score,
    )


@dataclass(frozen=True)
class Player:
    """Plays one prompt's episodes: asks the generator for turns, and their environments for replies."""

    prompt: Prompt
    task: Task
    tokenizer: Any
    ask: Ask
    sampling: Sampling
    seed: int
    step_timeout: float
    is_chat: bool

    async def first_turns(self, prompt_tokens: np.ndarray) -> list[Episode]:
        """The beginnings of all samples; without an answer yet where environments speak first."""
        samples = range(self.sampling.num_samples)
        episodes = [Episode(prompt_tokens) for _ in samples]
        if self._speaks_first:
            return episodes
        completions = await self.ask(self._request(prompt_tokens, samples, 0))
        for episode, completion in zip(episodes, completions, strict=True):
            episode.add_completion(completion, self._read(completion))
        return episodes

    async def play(self, episode: Episode, sample: int) -> None:
        """Until the episode is over, there is no room left, or something fails."""
        try:
            async with getattr(self.task, "sessions", None) or nullcontext(), self._environment() as environment:
                self._open(episode, await self._call(environment, "reset"))
                if not episode.turns:
                    await self._answer(episode, sample)
                while await self._goes_on(episode, environment):
                    await self._answer(episode, sample)
        except (ConfigError, EnvironmentFailed) as error:
            episode.failure = "infra_error", str(error)
        except DeadlineError as error:
            episode.failure = "timeout", str(error)

    @asynccontextmanager
    async def _environment(self) -> AsyncIterator[Environment]:
        """Errors: EnvironmentFailed, DeadlineError, ConfigError."""
        environment = self.task.environment(self.prompt)
        try:
            yield environment
        finally:
            await self._call(environment, "close")

    @property
    def _speaks_first(self) -> bool:
        return getattr(self.task, "speaks_first", False)

    def _open(self, episode: Episode, opening: Reply | None) -> None:
        """Errors: EnvironmentFailed, _TooLong."""
        if opening is None:
            return
        if not self._speaks_first or not isinstance(opening, Reply):
            said = "its task must say speaks_first = True" if isinstance(opening, Reply) else "give a Reply, or None"
            raise EnvironmentFailed(f"an environment's reset gave {shown(opening)}: {said}")
        asked = self.task.messages(self.prompt), tools_of(self.task, self.prompt)
        tokens, provenance = encode_opening(self.tokenizer, *asked, opening.messages)
        if len(tokens) >= self.sampling.max_tokens:
            raise _TooLong
        episode.open(opening.messages, tokens, provenance)

    async def _answer(self, episode: Episode, sample: int) -> None:
        [completion] = await self.ask(self._request(episode.tokens, [sample], len(episode.turns)))
        episode.add_completion(completion, self._read(completion))

    async def _call(self, environment: Environment, name: str, *arguments: str) -> Any:
        said = f"{type(environment).__name__}.{name}"
        try:
            doing = getattr(environment, name)(*arguments)
            return await within(self.step_timeout, f"{said} in an episode of {self.prompt.id}", doing)
        except (ConfigError, EnvironmentFailed, DeadlineError):
            raise
        except Exception as error:  # it may be anybody's code: whatever it raises is told by name
            raise EnvironmentFailed(f"{said}: {what_happened(error, source_file(environment))}") from error

    async def _goes_on(self, episode: Episode, environment: Environment) -> bool:
        """Whether the environment replied and the model is to answer."""
        if episode.turns[-1].stop_reason == "length":  # what was cut in the middle is no answer to act upon
            return False
        reply = await self._call(environment, "step", episode.answers[-1])
        if not isinstance(reply, Reply):
            raise EnvironmentFailed(f"{type(environment).__name__}.step gave {shown(reply)}: give a Reply")
        episode.hear(reply)
        if not reply.messages:
            return False
        tokens, provenance = encode_reply(self.tokenizer, reply.messages, episode.tokens[-1], is_chat=self.is_chat)
        has_turns = len(episode.turns) < self.sampling.max_turns
        if not has_turns or len(episode.tokens) + len(tokens) >= self.sampling.max_tokens:
            episode.cut_short = True
            return False
        episode.add_reply(reply.messages, tokens, provenance)
        return True

    def _request(self, tokens: np.ndarray, samples: range | list[int], turn: int) -> Request:
        seeds = [named_seed(self.seed, self.prompt.id, sample, turn) for sample in samples]
        room = self.sampling.max_tokens - len(tokens)
        return Request(tokens, seeds, min(self.sampling.max_new_tokens, room), self.sampling.temperature)

    def _read(self, completion: Completion) -> str:
        return self.tokenizer.decode(completion.tokens, skip_special_tokens=True)


def _failed_group(prompt: Prompt, num_samples: int, failure: str) -> Group:
    """Of a prompt that could not be written out."""
    episode = Episode(np.zeros(0, np.int32))
    return Group(prompt.id, [episode.finish(prompt, i, Score("infra_error", {}, failure)) for i in range(num_samples)])

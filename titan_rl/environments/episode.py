"""A prompt becomes a group of rollouts: ask for tokens, get the environment's reply, ask again, be scored.

Token in, token out: what the model wrote is kept as the tokens that it sampled, and is turned into text only to be
read by the environment and the scorer.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from titan_rl.config.load import ConfigError
from titan_rl.data.seeds import named_seed
from titan_rl.data.types import Completion, Group, Prompt, Provenance, Request, Rollout, Sampling, Turn
from titan_rl.environments.chat import encode_messages, encode_reply
from titan_rl.environments.scorer import Score
from titan_rl.environments.task import Task

Ask = Callable[[Request], Awaitable[list[Completion]]]
ScoreAll = Callable[[Prompt, list[list[str]]], Awaitable[tuple[list[Score], float]]]
"""Scores of a prompt's rollouts, and the seconds that scoring took."""
Judge = Callable[[list[np.ndarray]], Awaitable[tuple[list[Score], float]]]
"""A reward model's, by the rollouts' tokens."""


def encode_prompt(task: Task, tokenizer, prompt: Prompt) -> np.ndarray:
    """The prompt's tokens, int32 [T]; besides an environment's replies the only text that is ever tokenized.

    Errors: ConfigError if the chat template refuses the messages.
    """
    return encode_messages(tokenizer, task.messages(prompt))


class Episode:
    """One rollout as it grows."""

    def __init__(self, prompt_tokens: np.ndarray):
        self.tokens, self.provenance = prompt_tokens, np.full(len(prompt_tokens), Provenance.TEMPLATE, np.int8)
        self.logprobs = np.zeros(len(prompt_tokens), np.float32)
        self.versions = np.full(len(prompt_tokens), -1, np.int32)
        self.turns: list[Turn] = []
        self.answers: list[str] = []
        self.cut_short = False
        """Whether the conversation would have gone on, but there was no room left."""
        self.failure = ""
        """What the task or the chat template failed with, if one did: then there is no reward."""

    def _append(self, tokens, provenance, logprobs, versions) -> None:
        self.tokens = np.concatenate([self.tokens, tokens]).astype(np.int32)
        self.provenance = np.concatenate([self.provenance, provenance]).astype(np.int8)
        self.logprobs = np.concatenate([self.logprobs, logprobs]).astype(np.float32)
        self.versions = np.concatenate([self.versions, versions]).astype(np.int32)

    def add_completion(self, completion: Completion, text: str) -> None:
        start = len(self.tokens)
        wrote = np.full(len(completion.tokens), Provenance.MODEL)
        self._append(completion.tokens, wrote, completion.logprobs, completion.versions)
        self.turns.append(Turn(start, len(self.tokens), completion.stop_reason))
        self.answers.append(text)

    def add_reply(self, tokens: np.ndarray, provenance: np.ndarray) -> None:
        self._append(tokens, provenance, np.zeros(len(tokens)), np.full(len(tokens), -1))

    def finish(self, prompt: Prompt, sample: int, score: Score, judged: Score | None = None) -> Rollout:
        """``score``: the task's; ``judged``: a reward model's, which takes its place. Both must be there."""
        task_score = Score("infra_error", {}, self.failure) if self.failure else score
        is_judged = judged is not None and task_score.status == "ok"
        score = judged if is_judged else task_score
        truncated = score.status == "ok" and (self.cut_short or self.turns[-1].stop_reason == "length")
        return Rollout(
            prompt_id=prompt.id,
            sample=sample,
            tokens=self.tokens,
            provenance=self.provenance,
            logprobs=self.logprobs,
            versions=self.versions,
            turns=self.turns,
            status="truncated" if truncated else score.status,
            reward=score.reward,
            reward_parts=score.parts,
            turn_rewards=[] if is_judged else score.turn_rewards,
            task_reward=task_score.reward if is_judged else None,
            text="\n".join(self.answers),
            failure=score.message or task_score.message,
            grade=task_score.reward if is_judged and task_score.grade is None else task_score.grade,
        )


async def run_group(
    prompt: Prompt,
    *,
    task: Task,
    tokenizer,
    ask: Ask,
    score: ScoreAll,
    sampling: Sampling,
    seed: int,
    judge: Judge | None = None,
) -> Group:
    """All samples of one prompt. The first turn is one request; later turns, if the task replies, one a sample.

    A task or chat template that fails is no error here: its rollouts say ``infra_error`` and why.
    """
    start = time.perf_counter()
    try:
        messages = task.messages(prompt)
        prompt_tokens = encode_messages(tokenizer, messages)
    except ConfigError as error:
        return _failed_group(prompt, sampling.num_samples, str(error))
    if len(prompt_tokens) >= sampling.max_tokens:
        return Group(prompt.id, [], refused="prompt_too_long")
    is_chat = not isinstance(messages, str)
    sampler = GroupSampler(prompt, task, tokenizer, ask, sampling, seed, is_chat)
    episodes = await sampler.first_turns(prompt_tokens)
    await asyncio.gather(*(sampler.later_turns(episode, sample) for sample, episode in enumerate(episodes)))
    seconds_generate = time.perf_counter() - start
    scores, seconds_score = await score(prompt, [episode.answers for episode in episodes])
    judged: list[Score | None] = [None] * len(episodes)
    if judge is not None:
        judged, seconds_judge = await judge([episode.tokens for episode in episodes])
        seconds_score += seconds_judge
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
class GroupSampler:
    """Asks the generator for the turns of one prompt's episodes."""

    prompt: Prompt
    task: Task
    tokenizer: Any
    ask: Ask
    sampling: Sampling
    seed: int
    is_chat: bool

    async def first_turns(self, prompt_tokens: np.ndarray) -> list[Episode]:
        samples = range(self.sampling.num_samples)
        completions = await self.ask(self._request(prompt_tokens, samples, 0))
        episodes = [Episode(prompt_tokens) for _ in samples]
        for episode, completion in zip(episodes, completions, strict=True):
            episode.add_completion(completion, self._read(completion))
        return episodes

    async def later_turns(self, episode: Episode, sample: int) -> None:
        """Until the task has no reply, there is no room left, or the task or the template fails."""
        try:
            while self._reply(episode):
                [completion] = await self.ask(self._request(episode.tokens, [sample], len(episode.turns)))
                episode.add_completion(completion, self._read(completion))
        except ConfigError as error:
            episode.failure = str(error)

    def _reply(self, episode: Episode) -> bool:
        """Whether the task replied and the model is to answer. Errors: ConfigError."""
        reply = self.task.reply(self.prompt, episode.answers)
        if reply is None:
            return False
        tokens, provenance = encode_reply(self.tokenizer, reply, episode.tokens[-1], is_chat=self.is_chat)
        no_room = len(episode.tokens) + len(tokens) >= self.sampling.max_tokens
        if no_room or episode.turns[-1].stop_reason == "length":
            episode.cut_short = True
            return False
        episode.add_reply(tokens, provenance)
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


def demonstrate(prompt: Prompt, task: Task, tokenizer) -> Rollout:
    """A rollout that answers as the task would, for SFT. Errors: ConfigError if the task has no worked example."""
    episode = Episode(encode_prompt(task, tokenizer, prompt))
    answer = task.demonstration(prompt)
    tokens = np.asarray([*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id], np.int32)
    empty = np.zeros(len(tokens))
    episode.add_completion(Completion(tokens, empty, empty - 1, "stop"), answer)
    return episode.finish(prompt, 0, Score("ok", {"demonstration": 1.0}))

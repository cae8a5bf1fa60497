"""Episodes of one prompt: turns from the generator, replies from environments; each token with who wrote it.

Token in, token out: what the model wrote is kept as the tokens that it sampled, and is turned into text only to be
read by the environment and the scorer.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from titan_rl.config.load import ConfigError
from titan_rl.config.plugins import check_spelling, shown, source_file, what_happened
from titan_rl.data.images import PlacedImage
from titan_rl.data.seeds import named_seed
from titan_rl.data.storage.decoding import Penalties
from titan_rl.data.storage.routed_experts import filled, joined_experts
from titan_rl.data.storage.sampling_mask import SamplingMask, joined
from titan_rl.data.text.messages import Message, content_of
from titan_rl.data.text.tokenizer import Tokenizer, read_answer
from titan_rl.data.text.turns import encode_opening, encode_reply
from titan_rl.data.types import Completion, Cutoff, Prompt, Provenance, Request, Rollout, Sampling, Status, Turn
from titan_rl.environments.interfaces.environment import Environment, EnvironmentFailed, OneAnswer, Reply
from titan_rl.environments.interfaces.score import Score
from titan_rl.environments.interfaces.task import Task
from titan_rl.mesh.processes.deadlines import DeadlineError, within

Ask = Callable[[Request], Awaitable[list[Completion]]]


class Episode:
    """Tokens of one rollout with provenance, logprobs and policy versions (each [T]), and its turns."""

    def __init__(self, prompt_tokens: np.ndarray, images: Sequence[PlacedImage] = ()):
        self.images = tuple(images)
        self._begin(prompt_tokens, np.full(len(prompt_tokens), Provenance.TEMPLATE, np.int8))
        self.turns: list[Turn] = []
        self.answers: list[str] = []
        self.cutoff: Cutoff | None = None
        """Limit without which the conversation would have gone on."""
        self.failure: tuple[Status, str] | None = None
        """Status and message of a failed environment or chat template; such an episode has no reward."""
        self.branches: list[int] = []
        """Start of each branch, if the rollout has several conversations."""
        self.seat = ""
        """Name of the player, where several play."""
        self.penalties: Penalties | None = None
        """Of the logits that its answers were sampled from."""
        self.rewards: list[float | None] = []
        self.transcript: list[str] = []

    def _append(
        self,
        tokens: np.ndarray,
        provenance: np.ndarray,
        logprobs: np.ndarray,
        versions: np.ndarray,
        mask: SamplingMask | None = None,
        routed_experts: np.ndarray | None = None,
    ) -> None:
        counts = [len(self.tokens), len(tokens)]
        self.mask = joined([self.mask, mask], counts)
        self.routed_experts = joined_experts([self.routed_experts, routed_experts], counts)
        self.tokens = np.concatenate([self.tokens, tokens]).astype(np.int32)
        self.provenance = np.concatenate([self.provenance, provenance]).astype(np.int8)
        self.logprobs = np.concatenate([self.logprobs, logprobs]).astype(np.float32)
        self.versions = np.concatenate([self.versions, versions]).astype(np.int32)

    def _begin(self, tokens: np.ndarray, provenance: np.ndarray) -> None:
        self.tokens, self.provenance = tokens, provenance
        self.logprobs = np.zeros(len(tokens), np.float32)
        self.versions = np.full(len(tokens), -1, np.int32)
        self.mask: SamplingMask | None = None
        self.routed_experts: np.ndarray | None = None

    def open(self, messages: Sequence[Message], tokens: np.ndarray, provenance: np.ndarray) -> None:
        """Add the environment's opening messages. ``tokens``: [T] of the prompt with these messages."""
        self._begin(tokens, provenance)
        self._append_to_transcript(messages)

    def add_completion(self, completion: Completion, text: str) -> None:
        """Append one answer of the model; ``text``: its decoded tokens."""
        start = len(self.tokens)
        origin, logprobs, versions = (
            np.full(len(completion.tokens), Provenance.MODEL),
            completion.logprobs,
            completion.versions,
        )
        if completion.forced is not None:
            origin = np.where(completion.forced, Provenance.FORCED, origin)
            logprobs, versions = np.where(completion.forced, 0.0, logprobs), np.where(completion.forced, -1, versions)
        self._append(completion.tokens, origin, logprobs, versions, completion.mask)
        if completion.routed_experts is not None:
            self.routed_experts = filled(self.routed_experts, completion.routed_experts, len(self.tokens))
        self.penalties = completion.penalties
        self.turns.append(Turn(start, len(self.tokens), completion.stop_reason))
        self.answers.append(text)
        self.transcript.append(text)

    def record_reply(self, reply: Reply) -> None:
        """Record reward and tool calls of the reply to the latest answer; ``add_reply`` adds its messages."""
        self.rewards.append(reply.reward)
        self.turns[-1] = replace(self.turns[-1], calls=tuple(reply.calls))

    def _append_to_transcript(self, messages: Sequence[Message]) -> None:
        self.transcript += [f"> {content_of(message).strip()}" for message in messages]

    def fork(self, num_answers: int) -> "Episode":
        """New episode with the same first ``num_answers`` answers, marked as repeated so that they are trained once."""
        stop = self.turns[num_answers - 1].stop
        fork = Episode(self.tokens[:stop])
        origin = self.provenance[:stop]
        is_answer = np.isin(origin, (Provenance.MODEL, Provenance.FORCED))
        fork.provenance = np.where(is_answer, Provenance.REPEATED, origin).astype(np.int8)
        return fork

    @property
    def last_branch(self) -> np.ndarray:
        """Tokens [T] of the last branch; all, if there is one."""
        return self.tokens[self.branches[-1] if self.branches else 0 :]

    def join(self, other: "Episode") -> None:
        """Append another conversation of the same rollout as a branch."""
        start = len(self.tokens)
        self.branches = [*(self.branches or [0]), start]
        self._append(other.tokens, other.provenance, other.logprobs, other.versions, other.mask, other.routed_experts)
        self.penalties = self.penalties or other.penalties
        self.turns += [replace(turn, start=turn.start + start, stop=turn.stop + start) for turn in other.turns]
        self.rewards += [None] * (len(self.answers) - len(self.rewards)) + other.rewards
        self.answers += other.answers
        self.transcript += other.transcript

    def add_reply(self, messages: Sequence[Message], tokens: np.ndarray, provenance: np.ndarray) -> None:
        """Append the environment's messages, encoded as ``tokens`` [T]."""
        self._append_to_transcript(messages)
        self._append(tokens, provenance, np.zeros(len(tokens)), np.full(len(tokens), -1))

    def _with_rewards(self, score: Score) -> Score:
        """Task score plus the environment's reward of each answer."""
        if score.status != "ok" or all(reward is None for reward in self.rewards):
            return score
        answer_rewards = np.zeros(len(self.answers))
        answer_rewards[: len(self.rewards)] = [reward or 0.0 for reward in self.rewards]
        turn_rewards = (answer_rewards + (score.turn_rewards or 0.0)).tolist()
        return replace(
            score, parts=score.parts | {"environment": sum(answer_rewards.tolist())}, turn_rewards=turn_rewards
        )

    def finish(self, prompt: Prompt, sample: int, score: Score, judged: Score | None = None) -> Rollout:
        """Rollout of the finished episode. ``score``: the task's; ``judged``: a reward model's, which replaces it."""
        task_score = Score(self.failure[0], {}, self.failure[1]) if self.failure else self._with_rewards(score)
        is_judged = judged is not None and task_score.status == "ok"
        score = judged if judged is not None and is_judged else task_score
        status = score.status
        if status == "ok" and (self.cutoff or self.turns[-1].stop_reason == "length"):
            status = self.cutoff or "truncated"
        return Rollout(
            prompt_id=prompt.id,
            sample=sample,
            tokens=self.tokens,
            provenance=self.provenance,
            logprobs=self.logprobs,
            versions=self.versions,
            turns=self.turns,
            status=status,
            reward=score.reward,
            reward_parts=score.parts,
            turn_rewards=[] if is_judged else score.turn_rewards,
            task_reward=task_score.reward if is_judged else None,
            text="\n".join(self.transcript),
            failure=score.message or task_score.message,
            grade=task_score.reward if is_judged and task_score.grade is None else task_score.grade,
            branches=self.branches,
            seat=self.seat,
            mask=self.mask,
            penalties=self.penalties,
            routed_experts=self.routed_experts,
            images=self.images,
        )


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
    images: Sequence[PlacedImage] = ()
    """Of the prompt."""

    async def first_turns(self, prompt_tokens: np.ndarray) -> list[Episode]:
        """Episodes of all samples with their first answers, or without, where environments speak first."""
        samples = range(self.sampling.num_samples)
        episodes = [Episode(prompt_tokens, self.images) for _ in samples]
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
        if len(episode.turns) >= self.sampling.max_turns:
            episode.cutoff = "max_turns"
        elif len(episode.tokens) + len(tokens) >= self.sampling.max_tokens:
            episode.cutoff = "truncated"
        else:
            episode.add_reply(reply.messages, tokens, provenance)
        return episode.cutoff is None

    def request(self, tokens: np.ndarray, samples: range | list[int], turn: int, at_most: int | None = None) -> Request:
        """Generator request for a turn of these samples. ``at_most``: limit of new tokens, below the room left."""
        seeds = [named_seed(self.seed, self.prompt.id, sample, turn) for sample in samples]
        room = min(self.sampling.max_new_tokens, self.sampling.max_tokens - len(tokens))
        room = room if at_most is None else min(at_most, room)
        sampling = self.sampling
        settings = sampling.temperature, sampling.decoding
        return Request(
            *(tokens, seeds, room, *settings), routed_experts=sampling.routed_experts, images=tuple(self.images)
        )

    def read(self, completion: Completion) -> str:
        """Decode an answer, without its end token."""
        return read_answer(self.tokenizer, completion.tokens, ended=completion.stop_reason == "stop")


@cache
def _check_hooks(environment: type) -> None:
    """Errors: ConfigError for a misspelled method of a class of environments."""
    check_spelling(f"an environment {environment.__name__}", environment, OneAnswer, ("reset", "step", "close"))

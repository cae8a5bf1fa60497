"""One rollout as it grows, token by token, each with who wrote it.

Token in, token out: what the model wrote is kept as the tokens that it sampled, and is turned into text only to be
read by the environment and the scorer.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from titan_rl.data.storage.decoding import Penalties
from titan_rl.data.storage.sampling_mask import SamplingMask, joined
from titan_rl.data.types import Completion, Message, Prompt, Provenance, Rollout, Status, Turn, content_of
from titan_rl.environments.interfaces.environment import Reply
from titan_rl.environments.interfaces.score import Score


class Episode:
    """Tokens of one rollout with provenance, logprobs and policy versions (each [T]), and its turns."""

    def __init__(self, prompt_tokens: np.ndarray):
        self._begin(prompt_tokens, np.full(len(prompt_tokens), Provenance.TEMPLATE, np.int8))
        self.turns: list[Turn] = []
        self.answers: list[str] = []
        self.cut_short = False
        """Whether the conversation would have gone on, but there was no room left."""
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
    ) -> None:
        self.mask = joined([self.mask, mask], [len(self.tokens), len(tokens)])
        self.tokens = np.concatenate([self.tokens, tokens]).astype(np.int32)
        self.provenance = np.concatenate([self.provenance, provenance]).astype(np.int8)
        self.logprobs = np.concatenate([self.logprobs, logprobs]).astype(np.float32)
        self.versions = np.concatenate([self.versions, versions]).astype(np.int32)

    def _begin(self, tokens: np.ndarray, provenance: np.ndarray) -> None:
        self.tokens, self.provenance = tokens, provenance
        self.logprobs = np.zeros(len(tokens), np.float32)
        self.versions = np.full(len(tokens), -1, np.int32)
        self.mask: SamplingMask | None = None

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
        self._append(other.tokens, other.provenance, other.logprobs, other.versions, other.mask)
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
            text="\n".join(self.transcript),
            failure=score.message or task_score.message,
            grade=task_score.reward if is_judged and task_score.grade is None else task_score.grade,
            branches=self.branches,
            seat=self.seat,
            mask=self.mask,
            penalties=self.penalties,
        )

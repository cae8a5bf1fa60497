"""A one-token bandit: two prompts, a few answers of one token each, one of them right. Which way its probability goes
after an update is known, whatever the algorithm: up, and more than that of the others.

The right answers have other places in the two groups, and no token is in both: so an advantage that lands on a
neighbour, or in the other group, raises another answer.
"""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pandas as pd

from titan_rl.config.mixture import first_name
from titan_rl.config.sections.kinds import MOST_TEMPERATURE
from titan_rl.data.types import Batch, Group, Provenance, Request, Rollout, Row, Turn
from titan_rl.diagnostics.doctor import actor_queries as probes
from titan_rl.diagnostics.doctor.actors_under_test import ActorsUnderTest, Reading
from titan_rl.diagnostics.doctor.check_errors import CheckFailed, CheckSkipped

_ANSWERS, RIGHT = 4, (0, 2)
"""Of each prompt, and which of them is right."""
_SEEDS, _HEATS = 64, (1.0, MOST_TEMPERATURE)
"""Tokens are drawn hotter and hotter until there are enough different ones."""
_MOVES = 0.2
"""A gain of about so much in log-probability no rounding hides and no curvature bends."""
FAR = 4.0
"""One that a stale weight cannot hide behind, wherever it leads."""


@dataclass(frozen=True)
class Bandit:
    batch: Batch
    prompt: np.ndarray
    """Tokens of the first one."""

    async def move(self, actors: ActorsUnderTest, gain: float = _MOVES) -> Reading:
        """An update by the run's own loss and optimizer; the reading before it. ``gain``: what it is to take off the
        loss, of the sum of weights times advantages. Errors: CheckFailed; CheckSkipped.

        The first AdamW step of a rate takes the rate times the sum of the gradient's absolute values off the loss. That
        is the whole gradient's, of all ranks, and before it was clipped to ``training.max_norm``."""
        reading = await actors.read(self.batch)
        sizes: dict[str, float] = {}
        for rank in await actors.ask_trainer(probes.gradient_sizes):
            sizes |= rank
        max_norm = actors.checked.titan.training.max_norm
        clipped = max(reading.metrics.grad_norm / max_norm, 1.0) if max_norm > 0 else 1.0
        slope = sum(sizes.values()) * clipped
        if not slope and self.batch.has_signal:
            raise CheckFailed(
                "answers with other rewards than their group give no gradient", f"{self.batch.num_tokens} tokens"
            )
        if not slope:
            raise CheckSkipped("the loss of this algorithm has no gradient on answers to its own prompts")
        rows = [row for rows in self.batch.rows for row in rows]
        size = sum(float(np.abs(row.weight_S * row.advantage_S).sum()) for row in rows) or 1.0
        await actors.ask_trainer(partial(probes.take_rate, rate=gain * size / slope))
        await actors.update()
        return reading


async def make_bandit(actors: ActorsUnderTest, groups: list[Group]) -> Bandit:
    """Bandit batch with a known right answer.

    Errors: CheckSkipped if the model has not enough different things to say.
    """
    prompts = [rollout.tokens[: rollout.turns[0].start] for rollout in (group.rollouts[0] for group in groups[:2])]
    prompts = [prompts[0], prompts[-1] if len(prompts) > 1 else prompts[0]]
    tokens, bandit_groups = await _tokens(actors, prompts[0]), []
    for number, (prompt, right) in enumerate(zip(prompts, RIGHT, strict=True)):
        words = tokens[number * _ANSWERS : (number + 1) * _ANSWERS]
        name = f"doctor/bandit{number}"
        bandit_groups.append(Group(name, _rollouts(name, prompt, words, right), task=first_name(actors.config.task)))
    first = await actors.read(actors.batch(bandit_groups))
    batch = _with_ratio_of_one(actors.batch(bandit_groups), first)
    moves = not actors.checked.algorithm.is_still_without_advantage
    return Bandit(replace(batch, has_signal=batch.has_signal or moves), prompts[0])


async def _tokens(actors: ActorsUnderTest, prompt: np.ndarray) -> list[int]:
    distinct: dict[int, None] = {}
    for heat in _HEATS:
        seeds = list(range(1, _SEEDS + 1))
        answers = await actors.meshes.dispatcher.complete(Request(prompt, seeds, 1, heat))
        distinct |= dict.fromkeys(int(answer.tokens[0]) for answer in answers if len(answer.tokens))
        if len(distinct) >= 2 * _ANSWERS:
            return list(distinct)[: 2 * _ANSWERS]
    raise CheckSkipped(f"the model has only {len(distinct)} different tokens to begin an answer with")


def _rollouts(prompt_id: str, prompt: np.ndarray, words: list[int], right: int) -> list[Rollout]:
    return [_rollout(prompt_id, number, prompt, word, float(number == right)) for number, word in enumerate(words)]


def _rollout(prompt_id: str, number: int, prompt: np.ndarray, word: int, reward: float) -> Rollout:
    count = len(prompt)
    return Rollout(
        prompt_id=prompt_id,
        sample=number,
        tokens=np.append(prompt, word).astype(np.int32),
        provenance=np.repeat([Provenance.TEMPLATE, Provenance.MODEL], [count, 1]).astype(np.int8),
        logprobs=np.zeros(count + 1, np.float32),
        versions=np.append(np.full(count, -1), 0).astype(np.int32),
        turns=[Turn(count, count + 1, "stop")],
        status="ok",
        reward=reward,
        turn_rewards=[reward],
    )


def _with_ratio_of_one(batch: Batch, reading: Reading) -> Batch:
    """The same rows, sampled as the trainer has it, so that no ratio is clipped."""
    columns = (reading.tokens[name].tolist() for name in ("prompt_id", "sample", "trainer"))
    logprobs = {(prompt_id, sample): trainer for prompt_id, sample, trainer in zip(*columns, strict=True)}

    def sampled(row: Row) -> Row:
        owners = [logprobs[prompt_id, sample] for prompt_id, sample, count in row.owners for _ in range(count)]
        return replace(row, logprob_S=np.asarray(owners, np.float32)) if owners else row

    return replace(batch, rows=[[sampled(row) for row in rows] for rows in batch.rows])


def gains(before: pd.DataFrame, after: pd.DataFrame) -> dict[str, np.ndarray]:
    """Gain in log-probability of each answer, by prompt."""
    both = before.merge(after, on=["prompt_id", "sample"], suffixes=("", "_after")).sort_values("sample")
    return {str(name): (its.trainer_after - its.trainer).to_numpy() for name, its in both.groupby("prompt_id")}

"""Handle of an interactive run's trainer: calls a function on every rank's learner."""

import pickle
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import cloudpickle
import numpy as np
import pandas as pd

from titan_rl.controller.interactive.custom_step import CustomStep
from titan_rl.data.nonfinite import NonfiniteBatch
from titan_rl.data.types import Batch, StepMetrics
from titan_rl.mesh.members.endpoints import TrainerEndpoints
from titan_rl.mesh.meshes import Meshes

T = TypeVar("T")
InTurn = Callable[[Callable[[], Coroutine[Any, Any, Any]]], Coroutine[Any, Any, Any]]


class RankError(RuntimeError):
    """A function failed on a rank; says on which, and how."""


def token_table(batch: Batch, logprobs: dict[tuple[int, int], np.ndarray]) -> pd.DataFrame:
    """The trained tokens of a batch, a row each, with logprobs of generator and trainer.

    ``logprobs``: the trainer's, of a row's trained tokens, by its group and number.
    Errors: ValueError for another batch."""
    tables = []
    for group, rows in enumerate(batch.rows):
        for number, row in enumerate(rows):
            owners = [(prompt, sample, place) for prompt, sample, count in row.owners for place in range(count)]
            logprob_S, num_tokens = logprobs.get((group, number), ()), len(owners)
            if len(logprob_S) < num_tokens:
                raise ValueError("this is not the batch of the last forward_backward")
            table = pd.DataFrame(owners, columns=["prompt_id", "sample", "place"])
            tables.append(
                table.assign(
                    token=row.target_S[:num_tokens],
                    generator=row.logprob_S[:num_tokens],
                    trainer=logprob_S[:num_tokens],
                )
            )
    return pd.concat(tables, ignore_index=True)


class TrainerHandle:
    """Calls to the trainer's ranks between two steps."""

    def __init__(self, meshes: Callable[[], Meshes], in_turn: InTurn, custom_step: Callable[[], CustomStep]):
        """``in_turn``: runs a coroutine when no other runs. ``custom_step``: the current one, or an error."""
        self._meshes, self._in_turn, self._custom_step = meshes, in_turn, custom_step

    async def forward_backward(self, batch: Batch) -> StepMetrics | NonfiniteBatch:
        """Gradients of the current step; loss and gradient norm, or the samples with NaN or Inf."""
        own = self._custom_step()
        return await self._in_turn(lambda: own.forward_backward(batch))

    async def optim_step(self) -> StepMetrics | None:
        """Update of the weights, which completes the step in records and ledger; None if it was skipped as
        non-finite."""
        return await self._in_turn(self._custom_step().optim_step)

    async def logprobs(self, batch: Batch) -> pd.DataFrame:
        """Logprobs of trainer and generator after ``forward_backward(batch)``: a row for each trained token, with its
        sample and its ``place`` among the sample's trained tokens.

        Errors: ValueError if another pass was the last one."""
        groups = list(range(len(batch.rows)))
        replies = await self.call(lambda learner: (learner.share(groups), learner.logprobs()))
        logprobs_of_row = {}
        for share, logprobs in replies.values():
            rows = [(group, number) for group in share for number in range(len(batch.rows[group]))]
            logprobs_of_row |= {rows[index]: logprob_S for index, logprob_S in logprobs.items() if index < len(rows)}
        return token_table(batch, logprobs_of_row)

    async def call(self, function: Callable[[Any], T]) -> dict[str, T]:
        """Results of ``function(learner)`` on each rank, by the rank's name; they must pickle.

        The learner is trainer/step/learner.py's, or trainer/roles/learned/worker.py's on the ranks of a role.

        Errors: RankError if it raises on one, whose ranks go on; whatever keeps it from being pickled."""
        code = cloudpickle.dumps(function)
        replies = await self._in_turn(lambda: self._meshes().trainer.call(TrainerEndpoints.examine(code)))
        ranks = [rank.name for rank in self._meshes().trainers.ranks]
        failed = [f"{name}: {failure}" for name, (_, failure) in zip(ranks, replies, strict=True) if failure]
        if failed:
            raise RankError("; ".join(failed))
        return {name: pickle.loads(value) for name, (value, _) in zip(ranks, replies, strict=True)}

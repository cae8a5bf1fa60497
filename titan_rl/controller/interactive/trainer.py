"""The trainer of a run that is in hand: its ranks can be asked what a function of yours finds out of their learners."""

import pickle
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import cloudpickle

from titan_rl.mesh.meshes import Meshes

T = TypeVar("T")
InTurn = Callable[[Callable[[], Coroutine[Any, Any, Any]]], Coroutine[Any, Any, Any]]


class RankError(RuntimeError):
    """A function failed on a rank; says on which, and how."""


class TrainerHandle:
    """What a person asks of the trainer's ranks, between two steps."""

    def __init__(self, meshes: Callable[[], Meshes], in_turn: InTurn):
        """``in_turn``: does a thing when nothing else is done."""
        self._meshes, self._in_turn = meshes, in_turn

    async def call(self, function: Callable[[Any], T]) -> dict[str, T]:
        """What ``function(learner)`` gives on each rank, by the rank's name. The learner is trainer/learner.py's, or
        trainer/lone_learned.py's on the ranks of a role of its own. What it gives must pickle.

        Errors: RankError if it raises on one, whose ranks go on; whatever keeps it from being pickled."""
        code = cloudpickle.dumps(function)
        answers = await self._in_turn(lambda: self._meshes().trainer.call("examine", code))
        ranks = [rank.name for rank in self._meshes().trainers.ranks]
        failed = [f"{name}: {failure}" for name, (_, failure) in zip(ranks, answers, strict=True) if failure]
        if failed:
            raise RankError("; ".join(failed))
        return {name: pickle.loads(value) for name, (value, _) in zip(ranks, answers, strict=True)}

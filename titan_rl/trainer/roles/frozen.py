"""Frozen models that the policy is compared with: reference, teacher.

A frozen role is in no optimizer, and its parameters take no gradient; its digest proves that it is unchanged. It lives
in the trainer's processes, or in processes of its own (actors/role.py): here is what both do.

Dimensions: S trained tokens of a row.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from titan_rl.algorithms.base import Needs
from titan_rl.config.mixture import teachers_of
from titan_rl.config.sections.schema import Config
from titan_rl.data.types import TASK_COLUMN, Row
from titan_rl.trainer.distributed.ranks import anywhere
from titan_rl.trainer.model.sharded_model import ShardedModel
from titan_rl.trainer.objective.preparation import as_array
from titan_rl.trainer.roles.names import FROZEN, WORDS, needed_roles, num_words


class FrozenRole:
    """Log-probabilities of sampled tokens under a frozen model, and its most likely words."""

    def __init__(self, gives: str, model: ShardedModel, num_words: int = 0):
        """``gives``: the name of the column. ``num_words``: so many of the likeliest words at each token."""
        self.gives, self.model, self.num_words = gives, model.freeze(), num_words

    def find(self, rows: list[Row]) -> list[dict[str, np.ndarray]]:
        """Columns of fitted rows, float32 [S], and words as in ``found_columns``.

        Empty on pipeline stages but the last."""
        found = self.measure(rows, self.num_words)
        return [{} if s is None else teacher_columns(self.gives, s, self.num_words) for s in found]

    def measure(self, rows: list[Row], num_words: int = 0) -> list[torch.Tensor | None]:
        """Statistics of fitted rows: log-probabilities, entropies, words and their log-probabilities [2 + 2K, S]."""
        return measured(self.model, rows, num_words)


def measured(model: ShardedModel, rows: list[Row], num_words: int) -> list[torch.Tensor | None]:
    """Statistics of fitted rows under a model, with its ``num_words`` likeliest words."""
    keywords: dict[str, Any] = {"num_likeliest": num_words} if num_words else {}
    return model.measure(rows, **keywords)


def teacher_columns(gives: str, statistics: torch.Tensor, num_words: int) -> dict[str, np.ndarray]:
    """Columns of a row by its statistics: log-probabilities, entropies, words and their log-probabilities [2 + 2K, S].

    ``gives``: the name of the log-probabilities' column."""
    columns = {gives: as_array(statistics[0])}
    if not num_words:
        return columns
    words_KS, logprob_KS = statistics[2:].split(num_words)
    return columns | {WORDS: words_KS.T.long().cpu().numpy(), "teacher_word_logprob_SK": as_array(logprob_KS.T)}


class PolicyWithoutAdapters(FrozenRole):
    """Reference that is the policy with its adapters off, without a second model in memory."""

    def __init__(self, gives: str, model: ShardedModel):
        assert model.adapters is not None, "a model without adapters"
        self.gives, self.model, self.num_words, self._adapters = gives, model, 0, model.adapters

    def measure(self, rows: list[Row], num_words: int = 0) -> list[torch.Tensor | None]:
        with self._adapters.disabled():  # its routers choose for themselves
            return super().measure([replace(row, routed_experts=None) for row in rows], num_words)


class TaskTeacher(FrozenRole):
    """Teacher of some tasks of a mixture, which finds columns of their tokens and leaves all others as they are."""

    def __init__(self, model: ShardedModel, num_words: int, tasks: Collection[int]):
        """``tasks``: their numbers."""
        super().__init__(FROZEN["teacher"], model, num_words)
        self.tasks = list(tasks)

    def find(self, rows: list[Row]) -> list[dict[str, np.ndarray]]:
        """Columns of fitted rows, as ``FrozenRole.find``; of rows without a token of these tasks, none.

        All ranks pass the same rows by number, those that have such a token on any rank: sharded weights are gathered
        together."""
        mine = [self._are_mine(row) for row in rows]
        asked = anywhere([bool(mine_S.any()) for mine_S in mine], self.model.device)
        found = iter(super().find([row for row, is_asked in zip(rows, asked, strict=True) if is_asked]))
        columns = [next(found) if is_asked else {} for is_asked in asked]
        return [_merged(*each) for each in zip(rows, mine, columns, strict=True)]

    def _are_mine(self, row: Row) -> np.ndarray:
        """Bool [S]: whether the tokens are of these tasks."""
        task_S = row.role_columns.get(TASK_COLUMN)
        assert not row.owners or (task_S is not None and (task_S >= 0).all()), "a row of no task, and several teachers"
        return np.zeros(len(row.target_S), bool) if task_S is None else np.isin(task_S, self.tasks)


def _merged(row: Row, mine_S: np.ndarray, columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Columns with the row's own where tokens are another teacher's."""
    if not mine_S.any():
        return {}
    merged = {name: row.role_columns.get(name, np.zeros_like(values)).copy() for name, values in columns.items()}
    for name, values in columns.items():
        merged[name][mine_S] = values[mine_S]
    return merged


def make_roles(
    config: Config, needs: Needs, role: str, paths: list[str | Path], sharded: Callable[[str | Path], ShardedModel]
) -> dict[str, FrozenRole]:
    """Models of a frozen role, one for each of ``paths``, by names: several teachers are named by their tasks."""
    if len(paths) == 1:
        return {role: FrozenRole(FROZEN[role], sharded(paths[0]), num_words(role, needs))}
    numbers = {task: number for number, task in enumerate(teachers_of(config).of_task)}
    return {
        f"{role} of {', '.join(tasks)}": TaskTeacher(
            sharded(path), num_words(role, needs), [numbers[task] for task in tasks]
        )
        for path, tasks in zip(paths, teachers_of(config).tasks, strict=True)
    }


def roles_with_trainer(
    config: Config,
    needs: Needs,
    paths_of: Callable[[str], list[str | Path]],
    sharded: Callable[[str | Path], ShardedModel],
    adapted: ShardedModel | None = None,
) -> dict[str, FrozenRole]:
    """Frozen roles that share the trainer's processes, by name.

    ``paths_of(role)``: directories of its models;
    ``sharded(path)``: makes the model; ``adapted``: a model that is the reference if its adapters are off."""

    def models_of(role: str) -> dict[str, FrozenRole]:
        if role == "reference" and adapted is not None:
            return {role: PolicyWithoutAdapters(FROZEN[role], adapted)}
        return make_roles(config, needs, role, paths_of(role), sharded)

    here = [role for role in needed_roles(needs) if getattr(config, role).placement == "with_trainer"]
    return {name: model for role in here for name, model in models_of(role).items()}

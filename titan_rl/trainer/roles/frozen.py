"""Frozen models that the policy is compared with: reference, teacher.

A frozen role is in no optimizer, and its parameters take no gradient; its digest proves that it is unchanged. It lives
in the trainer's processes, or in processes of its own (actors/role.py): here is what both do.

Dimensions: S trained tokens of a row.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from titan_rl.algorithms.base import Needs
from titan_rl.config.sections.schema import Config
from titan_rl.data.types import Row
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


def roles_with_trainer(
    config: Config,
    needs: Needs,
    path_of: Callable[[str], str | Path],
    sharded: Callable[[str | Path], ShardedModel],
    adapted: ShardedModel | None = None,
) -> dict[str, FrozenRole]:
    """Frozen roles that share the trainer's processes, by name.

    ``path_of(role)``: its directory;
    ``sharded(path)``: makes the model; ``adapted``: a model that is the reference if its adapters are off."""

    def role_of(name: str) -> FrozenRole:
        if name == "reference" and adapted is not None:
            return PolicyWithoutAdapters(FROZEN[name], adapted)
        return FrozenRole(FROZEN[name], sharded(path_of(name)), num_words(name, needs))

    here = [role for role in needed_roles(needs) if getattr(config, role).placement == "with_trainer"]
    return {role: role_of(role) for role in here}

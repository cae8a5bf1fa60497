"""The models beside the policy, by name; and those that never learn and that it is compared with: reference, teacher.

A frozen role is in no optimizer, and its parameters take no gradient; its digest tells that it is what it was. It lives
in the trainer's processes, or in processes of its own (actors/role.py): here is what both do.

Dimensions: S trained tokens of a row.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from titan_rl.algorithms.base import Needs
from titan_rl.config.schema import Config
from titan_rl.data.types import Row
from titan_rl.trainer.preparation import as_array
from titan_rl.trainer.sharded_model import ShardedModel

FROZEN = {"reference": "reference_logprob_S", "teacher": "teacher_logprob_S"}
"""Role, which is also its section of the TOML, to the column that it gives."""
WORDS = "teacher_words_SK"
"""The column, int64 [S, K], of the teacher's likeliest words."""

LEARNED = ("critic", "implicit_reward")
"""Roles that learn beside the policy (trainer/learned_role.py), which are sections of the TOML, too."""

BASE = "base model"
"""What a policy with adapters never changes, beside the names of roles."""


class FrozenRole:
    """Gives the log-probabilities of what was written under a model that stays as it is, and its likeliest words."""

    def __init__(self, gives: str, model: ShardedModel, num_words: int = 0):
        """``gives``: the name of the column. ``num_words``: so many of the likeliest words at each token."""
        self.gives, self.model, self.num_words = gives, model.freeze(), num_words

    def find(self, rows: list[Row]) -> list[dict[str, np.ndarray]]:
        """Of fitted rows, float32 [S] each, and the words as in ``found_columns``; nothing on the stages of a pipeline
        that are not the last."""
        asked = {"num_likeliest": self.num_words} if self.num_words else {}
        return [{} if s is None else self._columns(s) for s in self.model.measure(rows, **asked)]

    def _columns(self, statistics: torch.Tensor) -> dict[str, np.ndarray]:
        """``statistics``: log-probabilities, entropies, words and their log-probabilities [2 + 2K, S]."""
        found = {self.gives: as_array(statistics[0])}
        if not self.num_words:
            return found
        words_KS, logprob_KS = statistics[2:].split(self.num_words)
        return found | {WORDS: words_KS.T.long().cpu().numpy(), "teacher_word_logprob_SK": as_array(logprob_KS.T)}


def num_words(role: str, needs: Needs) -> int:
    """Of its likeliest words at each token, how many a role is to give."""
    return needs.teacher_words if role == "teacher" else 0


def found_columns(needs: Needs, num_tokens: int) -> dict[str, np.ndarray]:
    """All that frozen roles find, zeros for each of so many tokens."""
    columns = {FROZEN[role]: np.zeros(num_tokens, np.float32) for role in needed_roles(needs)}
    if needs.teacher_words:
        shape = num_tokens, needs.teacher_words
        columns |= {WORDS: np.zeros(shape, np.int64), "teacher_word_logprob_SK": np.zeros(shape, np.float32)}
    return columns


class PolicyWithoutAdapters(FrozenRole):
    """The policy's own model with its adapters off: no second one is held, and its weights are in no optimizer."""

    def __init__(self, gives: str, model: ShardedModel):
        self.gives, self.model, self.num_words = gives, model, 0

    def find(self, rows: list[Row]) -> list[dict[str, np.ndarray]]:
        with self.model.adapters.disabled():
            return super().find(rows)


def needed_roles(needs: Needs) -> list[str]:
    """The frozen roles among them."""
    return [role for role in FROZEN if getattr(needs, role)]


def learned_role(needs: Needs) -> str | None:
    """The one that learns beside the policy, if one does."""
    return next((role for role in LEARNED if getattr(needs, role)), None)


def role_path(config: Config, role: str, model_path: str | Path, kept: str) -> str | Path:
    """The directory of a role's weights.

    ``kept``: where the run keeps the policy as it was when reinforcement learning began (controller/kept_policy.py);
    until then, and where that is what the run starts from, the model that it starts from is the same.
    """
    own = getattr(config, role).path
    return own or (kept if kept and Path(kept).exists() else model_path)


def roles_with_trainer(
    config: Config,
    needs: Needs,
    path_of: Callable[[str], str | Path],
    sharded: Callable[[str | Path], ShardedModel],
    adapted: ShardedModel | None = None,
) -> dict[str, FrozenRole]:
    """Those that the algorithm needs and that share the trainer's processes. ``path_of(role)``: its directory;
    ``sharded(path)``: makes the model; ``adapted``: a model that is the reference if its adapters are off."""

    def role_of(name: str) -> FrozenRole:
        if name == "reference" and adapted is not None:
            return PolicyWithoutAdapters(FROZEN[name], adapted)
        return FrozenRole(FROZEN[name], sharded(path_of(name)), num_words(name, needs))

    here = [role for role in needed_roles(needs) if getattr(config, role).placement == "with_trainer"]
    return {role: role_of(role) for role in here}

"""Models that never learn and that the policy is compared with: the reference, the teacher.

A frozen role is in no optimizer, and its parameters take no gradient; its digest tells that it is what it was. It lives
in the trainer's processes, or in processes of its own (actors/role.py): here is what both do.

Dimensions: S trained tokens of a row.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from titan_rl.algorithms.base import Needs
from titan_rl.config.schema import Config
from titan_rl.data.types import Row
from titan_rl.trainer.preparation import as_array
from titan_rl.trainer.sharded_model import ShardedModel

FROZEN = {"reference": "reference_logprob_S", "teacher": "teacher_logprob_S"}
"""Role, which is also its section of the TOML, to the column that it gives."""

BASE = "base model"
"""What a policy with adapters never changes, beside the names of roles."""


class FrozenRole:
    """Gives the log-probabilities of what was written under a model that stays as it is."""

    def __init__(self, gives: str, model: ShardedModel):
        """``gives``: the name of the column."""
        self.gives, self.model = gives, model.freeze()

    def find(self, rows: list[Row]) -> list[dict[str, np.ndarray]]:
        """Of fitted rows, float32 [S] each; nothing on the stages of a pipeline that are not the last."""
        return [{} if s is None else {self.gives: as_array(s[0])} for s in self.model.measure(rows)]


class PolicyWithoutAdapters(FrozenRole):
    """The policy's own model with its adapters off: no second one is held, and its weights are in no optimizer."""

    def __init__(self, gives: str, model: ShardedModel):
        self.gives, self.model = gives, model

    def find(self, rows: list[Row]) -> list[dict[str, np.ndarray]]:
        with self.model.adapters.disabled():
            return super().find(rows)


def needed_roles(needs: Needs) -> list[str]:
    """The frozen roles among them."""
    return [role for role in FROZEN if getattr(needs, role)]


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
        return FrozenRole(FROZEN[name], sharded(path_of(name)))

    here = [role for role in needed_roles(needs) if getattr(config, role).placement == "with_trainer"]
    return {role: role_of(role) for role in here}

"""Models beside the policy that never learn: the reference, the teacher. What they say of rows is found before updates.

A frozen role is in no optimizer, and its parameters take no gradient; its digest tells that it is what it was.

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


class FrozenRole:
    """Gives the log-probabilities of what was written under a model that stays as it is."""

    def __init__(self, gives: str, model: ShardedModel):
        """``gives``: the name of the column."""
        self.gives, self.model = gives, model.freeze()

    def find(self, rows: list[Row]) -> list[dict[str, np.ndarray]]:
        """Of fitted rows, float32 [S] each; nothing on the stages of a pipeline that are not the last."""
        return [{} if s is None else {self.gives: as_array(s[0])} for s in self.model.measure(rows)]


def frozen_roles(
    config: Config, needs: Needs, model_path: Path, sharded: Callable[[str | Path], ShardedModel]
) -> dict[str, FrozenRole]:
    """Those that the algorithm needs. ``sharded``: makes the model of a directory."""
    roles = {}
    if needs.reference:
        roles["reference"] = FrozenRole("reference_logprob_S", sharded(config.reference.path or model_path))
    if needs.teacher:
        roles["teacher"] = FrozenRole("teacher_logprob_S", sharded(config.teacher.path))
    return roles

"""Critic: a model with a value head that predicts returns, clipped around the values before the step.

Dimensions: S trained tokens of a row.
"""

import numpy as np
import torch

from titan_rl.algorithms.arithmetic.values import VALUE_SUMS, explained_variance, value_loss
from titan_rl.data.types import Row
from titan_rl.trainer.model.sharded_model import Columns
from titan_rl.trainer.objective.preparation import as_array
from titan_rl.trainer.roles.learned.role import LearnedRole


class Critic(LearnedRole):
    """Value model, trained on the policy's returns."""

    name, gives, head = "critic", "value", "value"
    columns = ("value_S", "return_S")
    """Predicted value and target of each token."""
    sums = VALUE_SUMS

    def find(self, rows: list[Row]) -> list[dict[str, np.ndarray]]:
        return [{} if s is None else {"value_S": as_array(s)} for s in self.model.measure(rows)]

    def _loss(self, value_S: torch.Tensor, columns: Columns) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        clip = self.settings.value_clip or None
        return value_loss(value_S, columns["value_S"], columns["return_S"], columns["weight_S"], clip)

    def _metrics(self, first: dict[str, float], last: dict[str, float]) -> dict[str, float]:
        """Means over trained tokens, on the values of before; what is clipped is that of the last update, as in the
        first of a step nothing is."""
        count = max(first["count"], 1)
        return {
            "critic_value": first["value"] / count,
            "critic_return": first["return"] / count,
            "critic_clip_fraction": last["clipped"] / count,
            "critic_explained_variance": explained_variance(first, first["count"]),
        }

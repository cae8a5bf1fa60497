"""The implicit reward model: a language model that learns outcomes of whole answers, and so rewards each token.

Its head is the policy's, its reward of a token how much likelier it finds it than the reference does, times beta.

Dimensions: S trained tokens of a row.
"""

from typing import TypeVar

import numpy as np
import torch

from titan_rl.algorithms.arithmetic.implicit_rewards import OUTCOME_SUMS, outcome_loss
from titan_rl.data.types import OUTCOME_COLUMNS, Row
from titan_rl.trainer.model.sharded_model import Columns
from titan_rl.trainer.objective.preparation import as_array
from titan_rl.trainer.roles.learned.role import LearnedRole

Numbers = TypeVar("Numbers", np.ndarray, torch.Tensor)


class ImplicitReward(LearnedRole):
    """Implicit reward model; rows must have reference log-probabilities and outcomes."""

    name, gives, head = "implicit_reward", "logprob", "vocabulary"
    columns = ("reference_logprob_S", "process_reward_S", *OUTCOME_COLUMNS)
    sums = OUTCOME_SUMS
    asks_of_whole_rollouts = True  # one outcome is of all that was written

    @property
    def learns_first(self) -> bool:
        return self.settings.update == "before"

    def find(self, rows: list[Row]) -> list[dict[str, np.ndarray]]:
        return [
            {}
            if s is None
            else {"process_reward_S": self._rewards(as_array(s[0]), row.role_columns["reference_logprob_S"])}
            for s, row in zip(self.model.measure(rows), rows, strict=True)
        ]

    def _rewards(self, logprob_S: Numbers, reference_logprob_S: Numbers) -> Numbers:
        return self.settings.beta * (logprob_S - reference_logprob_S)

    def _loss(self, logprob_S: torch.Tensor, columns: Columns) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        rewards_S = self._rewards(logprob_S, columns["reference_logprob_S"])
        outcome_S, outcome_weight_S = (columns[name] for name in OUTCOME_COLUMNS)
        return outcome_loss(rewards_S, outcome_S, outcome_weight_S, columns["offsets_N"])

    def _metrics(self, first: dict[str, float], last: dict[str, float]) -> dict[str, float]:
        """On the weights of before the first update: the mean reward of a token, and the share of samples whose outcome
        is predicted right."""
        return {
            "implicit_reward_mean": first["process_reward"] / max(first["count"], 1),
            "implicit_reward_accuracy": first["accurate"] / max(first["samples"], 1),
        }

"""Drafter: the draft model of speculative decoding, which learns what the policy writes.

Its loss is the negative log-likelihood of the policy's own samples (arXiv:2310.07177): up to a constant, the divergence
of the policy's distribution from the draft's, which bounds the share of drafts that is rejected. Its weights are part
of the policy's versions, so that engines always draft by those that learned beside what they check with.

Dimensions: S trained tokens of a row.
"""

import numpy as np
import torch

from titan_rl.data.types import Row
from titan_rl.trainer.model.sharded_model import Columns
from titan_rl.trainer.roles.learned.role import LearnedRole


class Drafter(LearnedRole):
    """Draft model, trained on the tokens that the policy sampled."""

    name, gives, head = "drafter", "logprob", "vocabulary"
    columns = ()
    sums = ("logprob",)

    def find(self, rows: list[Row]) -> list[dict[str, np.ndarray]]:
        """Nothing: no advantage depends on it."""
        return [{} for _ in rows]

    def _loss(self, logprob_S: torch.Tensor, columns: Columns) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        weight_S = columns["weight_S"]
        is_sampled_S = weight_S > 0
        logprob = torch.where(is_sampled_S, logprob_S.detach(), 0.0).sum()
        return -torch.where(is_sampled_S, weight_S * logprob_S, 0.0).sum(), {"logprob": logprob}

    def _metrics(self, first: dict[str, float], last: dict[str, float]) -> dict[str, float]:
        """On the weights of before the first update: a sampled token's mean log-probability."""
        return {"drafter_logprob": first["logprob"] / max(first["count"], 1)}

"""Direct preference optimization and its kin, which learn from pairs how much an answer is worth against a reference.

The reward of an answer is beta times the logarithm of its probability over the reference's. Source: arXiv 2305.18290.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field

from titan_rl.algorithms.arithmetic.preferences import (
    Pairs,
    answers,
    hinge_loss,
    ipo_loss,
    pair_metrics,
    robust_loss,
    sigmoid_loss,
    weighted,
)
from titan_rl.algorithms.base import LossInputs, Needs
from titan_rl.algorithms.offline.base import OfflineAlgorithm


class DPO(OfflineAlgorithm):
    @dataclass(kw_only=True)
    class Settings:
        loss: Literal["sigmoid", "robust", "ipo", "hinge"] = "sigmoid"
        """With label_smoothing, ``sigmoid`` is cDPO's."""
        beta: Annotated[float, Field(gt=0, le=1e6)] = 0.1
        """How dear it is to leave the reference; of ``ipo``, its tau."""
        label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
        """How likely it is that a pair's answers are the wrong way round; of ``sigmoid`` and ``robust``."""
        length_normalize: bool = False
        """Take the mean of an answer's log-probabilities, not their sum (as TRL's ipo does)."""

        def __post_init__(self) -> None:
            if self.label_smoothing and self.loss in ("ipo", "hinge"):
                raise ValueError(f"label_smoothing has no meaning with loss = {self.loss!r}: leave it out")
            if not self.label_smoothing and self.loss == "robust":
                raise ValueError("loss = 'robust' is 'sigmoid' with label_smoothing = 0: set label_smoothing")

    trains_on = "pairs"
    needs = Needs(reference=True)

    def loss(self, inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        answer_terms = answers(inputs, mean=self.settings.length_normalize)
        ratios, beta = answer_terms.log_ratios, self.settings.beta
        losses_P = self._losses(ratios.difference_P)
        rewards = Pairs(beta * ratios.chosen_P, beta * ratios.rejected_P)
        return weighted(losses_P, answer_terms.weights_P), pair_metrics(rewards, answer_terms.weights_P)

    def _losses(self, log_ratio_P: torch.Tensor) -> torch.Tensor:
        beta, smoothing = self.settings.beta, self.settings.label_smoothing
        match self.settings.loss:
            case "sigmoid":
                return sigmoid_loss(beta * log_ratio_P, smoothing)
            case "robust":
                return robust_loss(beta * log_ratio_P, smoothing)
            case "ipo":
                return ipo_loss(log_ratio_P, beta)
            case "hinge":
                return hinge_loss(beta * log_ratio_P)
        raise AssertionError(self.settings.loss)

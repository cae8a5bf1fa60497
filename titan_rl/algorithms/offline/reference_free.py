"""Preference optimization without a reference model: SimPO and ORPO. Both take the mean of an answer's
log-probabilities, so that long answers are not worth less."""

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field

from titan_rl.algorithms.arithmetic.preferences import Pairs, answers, log_odds, pair_metrics, sigmoid_loss, weighted
from titan_rl.algorithms.base import LossInputs
from titan_rl.algorithms.offline.base import OfflineAlgorithm


class SimPO(OfflineAlgorithm):
    """-log s(beta (mean logprob of the chosen - of the rejected) - gamma). Source: arXiv 2405.14734, equation 6."""

    @dataclass(kw_only=True)
    class Settings:
        beta: Annotated[float, Field(gt=0, le=1e6)] = 2.0
        """Scale of the rewards."""
        gamma: Annotated[float, Field(ge=0, le=1e6)] = 1.0
        """By how much the chosen one's reward should be the larger."""
        label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
        """How likely it is that a pair's answers are the wrong way round."""

    trains_on = "pairs"

    def loss(self, inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        answer_terms, settings = answers(inputs, mean=True), self.settings
        rewards = Pairs.of(settings.beta * answer_terms.logprob_N)
        losses_P = sigmoid_loss(rewards.difference_P - settings.gamma, settings.label_smoothing)
        return weighted(losses_P, answer_terms.weights_P), pair_metrics(rewards, answer_terms.weights_P)


class ORPO(OfflineAlgorithm):
    """Supervised loss of the chosen answer, and -beta log s(log odds of the chosen - of the rejected).

    Source: arXiv 2403.07691, equations 2, 6 and 7 (its lambda is beta).
    """

    @dataclass(kw_only=True)
    class Settings:
        beta: Annotated[float, Field(gt=0, le=1e6)] = 0.1
        """Weight of the preference beside the supervised loss."""

    trains_on = "pairs"

    def loss(self, inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        answer_terms, beta = answers(inputs, mean=True), self.settings.beta
        means = Pairs.of(answer_terms.logprob_N)
        preference_P = sigmoid_loss(Pairs.of(log_odds(answer_terms.logprob_N)).difference_P)
        losses_P = -means.chosen_P + beta * preference_P
        rewards = Pairs(beta * means.chosen_P, beta * means.rejected_P)
        return weighted(losses_P, answer_terms.weights_P), pair_metrics(rewards, answer_terms.weights_P)

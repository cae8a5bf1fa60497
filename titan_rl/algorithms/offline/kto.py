"""KTO: learns from answers that are each labelled desirable or not, without pairs.

With r an answer's log-ratio to the reference, and z >= 0 the policy's divergence from it,

    loss = w_D (1 - s(beta (r - z)))  of a desirable answer,   w_U (1 - s(beta (z - r)))  of an undesirable one.

z is one number for a whole step, without a gradient: the mean log-ratio of the step's questions, each with the answer
to another question, under the weights before the step's update. The answers are the step's own, or where all of it asks
the same, of other rows (data.examples.mismatched). So a step takes two rows or more, and the data two questions. It is
measured by a pass of its own, over all ranks, so no layout can change it, and reaches the loss in the advantage of each
sample: ``1 + z`` of a desirable one, ``-(1 + z)`` of another (``with_zero``).

Source: arXiv 2402.01306, equations 7 and 8, section 4.2.
"""

from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field

from titan_rl.algorithms.arithmetic.preferences import members, sums, weighted
from titan_rl.algorithms.base import LossInputs, Needs, provided
from titan_rl.algorithms.offline.base import OfflineAlgorithm


def with_zero(label: float, zero: float) -> float:
    """Advantage of a sample from its label (1 or -1) and the step's z."""
    return label * (1 + zero)


class KTO(OfflineAlgorithm):
    @dataclass(kw_only=True)
    class Settings:
        beta: Annotated[float, Field(gt=0, le=1e6)] = 0.1
        """How dear it is to leave the reference."""
        desirable_weight: Annotated[float, Field(gt=0, le=1e6)] = 1.0
        """Of desirable answers; weight times number should be about the same for both labels."""
        undesirable_weight: Annotated[float, Field(gt=0, le=1e6)] = 1.0
        """Of undesirable ones."""

    trains_on = "labels"
    needs = Needs(reference=True)

    def loss(self, inputs: LossInputs) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        settings, member_NS = self.settings, members(inputs.weight_S, provided(inputs.offsets_N))
        weights_N, advantage_N = sums(inputs.weight_S, member_NS), _first(inputs.advantage_S, member_NS)
        desirable_N, zero_N = advantage_N > 0, advantage_N.abs() - 1
        ratio_N = sums(inputs.logprob_S, member_NS) - sums(provided(inputs.reference_logprob_S), member_NS)
        gain_N = torch.where(desirable_N, ratio_N - zero_N, zero_N - ratio_N)
        losses_N = torch.sigmoid(-settings.beta * gain_N)
        scale_N = torch.where(desirable_N, settings.desirable_weight, settings.undesirable_weight)
        metrics = _metrics(ratio_N.detach(), settings.beta, gain_N.detach(), desirable_N, weights_N > 0)
        return weighted(scale_N * losses_N, weights_N), metrics


def _first(values_S: torch.Tensor, member_NS: torch.Tensor) -> torch.Tensor:
    """At each sample's first token that counts, [N]; all its tokens have the same."""
    return values_S[member_NS.to(torch.uint8).argmax(-1)]


def _metrics(
    ratio_N: torch.Tensor, beta: float, gain_N: torch.Tensor, desirable_N: torch.Tensor, counted_N: torch.Tensor
) -> dict[str, torch.Tensor]:
    """By the field's names; sums over samples. z is measured by ``log_ratio``."""
    reward_N = beta * ratio_N
    metrics = {
        "rewards/chosen": torch.where(desirable_N, reward_N, 0.0),
        "rewards/rejected": torch.where(desirable_N, 0.0, reward_N),
        "rewards/accuracies": (gain_N > 0).to(reward_N.dtype),
        "log_ratio": ratio_N,
    }
    return {name: torch.where(counted_N, values_N, 0.0).sum() for name, values_N in metrics.items()}

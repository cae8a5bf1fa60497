"""An algorithm is a name for an advantage and a loss; the trainer and the controller know neither."""

from collections.abc import Callable
from dataclasses import dataclass

from titan_rl.algorithms import advantages, losses


@dataclass(frozen=True)
class Algorithm:
    advantages: Callable
    """(rewards_G, normalize_std) -> advantages_G"""
    loss: Callable
    """(LossInputs, AlgorithmConfig) -> (loss, sums)"""


ALGORITHMS = {
    "grpo": Algorithm(advantages.group_relative, losses.clipped_policy_loss),
    "supervised": Algorithm(advantages.demonstration, losses.negative_log_likelihood),
}

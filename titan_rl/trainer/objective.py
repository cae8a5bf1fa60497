"""A row's loss and what is counted beside it: what the learner differentiates and adds up.

Dimensions: S trained tokens of a row.
"""

from collections.abc import Callable

import torch

from titan_rl.algorithms.base import ALGORITHMS
from titan_rl.algorithms.losses import LossInputs
from titan_rl.config.schema import AlgorithmConfig


def agreement_sums(
    logprob_S: torch.Tensor, sampling_logprob_S: torch.Tensor, counted_S: torch.Tensor
) -> dict[str, torch.Tensor]:
    """How far trainer and sampler differ, summed over the counted tokens; ``agreement_max`` is a maximum."""
    difference_S = torch.where(counted_S, logprob_S.detach() - sampling_logprob_S, 0.0)
    ratio_S = difference_S.abs().exp()
    return {
        "agreement_mean": (ratio_S * counted_S).sum(),
        "agreement_max": ratio_S.max(),
        "kl_k3": (difference_S.exp() - 1 - difference_S).sum(),
    }


def loss_and_sums(
    logprob_S: torch.Tensor, entropy_S: torch.Tensor, columns: dict[str, torch.Tensor], settings: AlgorithmConfig
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A row's loss, and what adds up over rows and ranks."""
    inputs = LossInputs(logprob_S, columns["logprob_S"], columns["advantage_S"], columns["weight_S"])
    loss, sums = ALGORITHMS[settings.name].loss(inputs, settings)
    counted_S = columns["weight_S"] > 0
    sums |= agreement_sums(logprob_S, columns["logprob_S"], counted_S)
    sums |= {"loss": loss.detach(), "entropy": (entropy_S * counted_S).sum(), "count": counted_S.sum()}
    return loss, sums


def expected_gradient(
    columns: dict[str, torch.Tensor], settings: AlgorithmConfig
) -> Callable[[torch.Tensor, slice], torch.Tensor]:
    """What the loss will ask of some of a row's log-probabilities, told before the others are known.

    A loss that is a sum over tokens can be differentiated part by part; of any other this comes out wrong, and the
    head, which compares, does its backward again.
    """
    names = ("logprob_S", "advantage_S", "weight_S")

    def gradient(logprob_S: torch.Tensor, tokens: slice) -> torch.Tensor:
        part = {name: columns[name][tokens] for name in names}
        with torch.enable_grad():
            leaf_S = logprob_S.detach().requires_grad_()
            loss, _ = loss_and_sums(leaf_S, torch.zeros_like(leaf_S), part, settings)
        return torch.autograd.grad(loss, leaf_S)[0]

    return gradient


def zero_totals(settings: AlgorithmConfig, device: torch.device) -> dict[str, torch.Tensor]:
    """Every name that ``loss_and_sums`` gives, on ranks that see no log-probabilities too, in one order."""
    zero_S = torch.zeros(1, device=device)
    columns = dict.fromkeys(("logprob_S", "advantage_S", "weight_S"), zero_S)
    _, sums = loss_and_sums(zero_S, zero_S, columns, settings)
    return {name: torch.zeros((), dtype=torch.float64, device=device) for name in sorted(sums)}

"""A row's loss and what is counted beside it: what the learner differentiates and adds up.

Whatever the algorithm is, the numbers here are sums over tokens: rows, ranks and microbatches add up. Columns are a
row's tensors, by the names of ``data.types.Row``.

Dimensions: S trained tokens of a row.
"""

from collections.abc import Callable

import torch

from titan_rl.algorithms.base import Algorithm, LossInputs
from titan_rl.data.types import StepMetrics
from titan_rl.kernels.policy_loss import bounded_log_ratio

OUR_SUMS = ("loss", "entropy", "count", "agreement_mean", "agreement_max", "kl_k3")
"""Besides the algorithm's own."""
_LOSS_COLUMNS = ("logprob_S", "advantage_S", "weight_S")


def agreement_sums(
    logprob_S: torch.Tensor, sampling_logprob_S: torch.Tensor, counted_S: torch.Tensor
) -> dict[str, torch.Tensor]:
    """How far trainer and sampler differ, summed over the counted tokens; ``agreement_max`` is a maximum.

    Differences are cut as the loss cuts them, so that no finite one makes a metric infinite.
    """
    difference_S = bounded_log_ratio(torch.where(counted_S, logprob_S.detach() - sampling_logprob_S, 0.0))
    ratio_S = difference_S.abs().exp()
    return {
        "agreement_mean": (ratio_S * counted_S).sum(),
        "agreement_max": ratio_S.max(),
        "kl_k3": (difference_S.exp() - 1 - difference_S).sum(),
    }


def row_loss(
    algorithm: Algorithm, logprob_S: torch.Tensor, entropy_S: torch.Tensor, columns: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A row's loss, and the algorithm's own sums."""
    sampling_logprob_S, advantage_S, weight_S = (columns[name] for name in _LOSS_COLUMNS)
    return algorithm.loss(LossInputs(logprob_S, sampling_logprob_S, advantage_S, weight_S, entropy_S))


def loss_and_sums(
    algorithm: Algorithm, logprob_S: torch.Tensor, entropy_S: torch.Tensor, columns: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A row's loss, and what adds up over rows and ranks."""
    loss, metrics = row_loss(algorithm, logprob_S, entropy_S, columns)
    counted_S = columns["weight_S"] > 0
    sums = {name: value.detach() for name, value in metrics.items()}
    sums |= agreement_sums(logprob_S, columns["logprob_S"], counted_S)
    sums |= {"loss": loss.detach(), "entropy": (entropy_S * counted_S).sum(), "count": counted_S.sum()}
    return loss, sums


def expected_gradient(
    algorithm: Algorithm, columns: dict[str, torch.Tensor]
) -> Callable[[torch.Tensor, slice], torch.Tensor] | None:
    """What the loss will ask of some of a row's log-probabilities, told before the others are known.

    Only a loss that is a sum over tokens can be differentiated part by part: None for any other.
    """
    if not algorithm.is_token_sum:
        return None

    def gradient(logprob_S: torch.Tensor, tokens: slice) -> torch.Tensor:
        part = {name: columns[name][tokens] for name in _LOSS_COLUMNS}
        with torch.enable_grad():
            leaf_S = logprob_S.detach().requires_grad_()
            loss, _ = row_loss(algorithm, leaf_S, torch.zeros_like(leaf_S), part)
        return torch.autograd.grad(loss, leaf_S)[0]

    return gradient


def zero_totals(algorithm: Algorithm, device: torch.device) -> dict[str, torch.Tensor]:
    """Every name that ``loss_and_sums`` gives, on ranks that see no log-probabilities too, in one order."""
    zero_S = torch.zeros(1, device=device)
    _, sums = loss_and_sums(algorithm, zero_S, zero_S, dict.fromkeys(_LOSS_COLUMNS, zero_S))
    return {name: torch.zeros((), dtype=torch.float64, device=device) for name in sorted(sums)}


def add_sums(totals: dict[str, torch.Tensor], sums: dict[str, torch.Tensor]) -> None:
    """A row's sums onto the totals of all rows."""
    for name, value in sums.items():
        add = torch.maximum if name == "agreement_max" else torch.add
        totals[name] = add(totals[name], value.double())


def step_metrics(totals: dict[str, float]) -> StepMetrics:
    """Totals of all rows of all ranks, as means over trained tokens."""
    count = max(int(totals["count"]), 1)
    return StepMetrics(
        loss=totals["loss"],
        entropy=totals["entropy"] / count,
        agreement_mean=totals["agreement_mean"] / count,
        agreement_max=totals["agreement_max"],
        kl_k3=totals["kl_k3"] / count,
        loss_metrics={name: total / count for name, total in totals.items() if name not in OUR_SUMS},
        num_trained_tokens=int(totals["count"]),
    )

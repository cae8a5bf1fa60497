"""Loss and metric sums of a row, as the learner differentiates and accumulates them.

Whatever the algorithm is, the numbers here are sums over tokens: rows, ranks and microbatches add up. Columns are a
row's tensors, by the names of ``data.types.Row``.

Dimensions: S trained tokens of a row.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from titan_rl.algorithms.base import Algorithm, LossInputs, provided
from titan_rl.data.nonfinite import NonfiniteBatch
from titan_rl.data.numbers import all_zero
from titan_rl.data.types import Row, StepMetrics
from titan_rl.kernels.policy_loss import bounded_log_ratio
from titan_rl.trainer.distributed.ranks import anywhere

OUR_SUMS = ("loss", "entropy", "count", "agreement_mean", "agreement_max", "kl_k3")
"""Besides the algorithm's own."""
_LOSS_COLUMNS = ("logprob_S", "advantage_S", "weight_S")
_ROLE_COLUMNS = (
    *("reference_logprob_S", "proximal_logprob_S", "value_S", "teacher_logprob_S"),
    *("teacher_word_logprob_SK", "process_reward_S", "teacher_mask_S", "task_S"),
)
"""Columns of a row beside its own, most of which roles compute."""


def agreement_sums(
    logprob_S: torch.Tensor, sampling_logprob_S: torch.Tensor, counted_S: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Trainer-sampler logprob agreement, summed over counted tokens; ``agreement_max`` is a maximum.

    Differences are cut as the loss cuts them, so that no finite one makes a metric infinite.
    """
    difference_S = bounded_log_ratio(torch.where(counted_S, logprob_S.detach() - sampling_logprob_S, 0.0))
    ratio_S = difference_S.abs().exp()
    return {
        "agreement_mean": (ratio_S * counted_S).sum(),
        "agreement_max": ratio_S.max(),
        "kl_k3": (difference_S.exp() - 1 - difference_S).sum(),
    }


def loss_inputs(
    algorithm: Algorithm, statistics: torch.Tensor, columns: dict[str, torch.Tensor], offsets_N: torch.Tensor | None
) -> LossInputs:
    """Inputs of an algorithm's loss for one row.

    ``statistics``: head outputs of the trained tokens: [2, S] log-probabilities and entropies (and
    below them those of the teacher's words [K, S]), or [S] values. Of the log-probabilities' row, ``offsets_N`` gives
    the samples."""
    sampling_logprob_S, advantage_S, weight_S = (columns[name] for name in _LOSS_COLUMNS)
    role_columns = {name: columns[name] for name in _ROLE_COLUMNS if name in columns}
    if algorithm.head == "value":
        nothing_S = torch.zeros_like(sampling_logprob_S)
        logprob_S, entropy_S, role_columns = nothing_S, nothing_S, role_columns | {"value_S": statistics}
    else:
        logprob_S, entropy_S, *words = statistics
        role_columns |= {"word_logprob_SK": torch.stack(words, dim=1)} if words else {}
        entropy_S = entropy_S if algorithm.needs.entropy_gradient else entropy_S.detach()
    return LossInputs(logprob_S, sampling_logprob_S, advantage_S, weight_S, entropy_S, offsets_N, **role_columns)


def loss_and_sums(
    algorithm: Algorithm, statistics: torch.Tensor, columns: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss of a row, and metric sums that add up over rows and ranks.

    The agreement is of the proximal log-probabilities, where an algorithm has them: the weights at hand may have moved
    since the step began."""
    inputs = loss_inputs(algorithm, statistics, columns, columns["offsets_N"])
    loss, metrics = algorithm.loss(inputs)
    counted_S = inputs.weight_S > 0
    sums = {name: value.detach() for name, value in metrics.items()}
    sums |= agreement_sums(inputs.logprob_S, inputs.sampling_logprob_S, counted_S)
    if inputs.proximal_logprob_S is not None:
        before = agreement_sums(inputs.proximal_logprob_S, inputs.sampling_logprob_S, counted_S)
        sums |= {name: before[name] for name in ("agreement_mean", "agreement_max")}
    entropy_S = torch.where(counted_S, inputs.entropy_S.detach(), 0)
    sums |= {"loss": loss.detach(), "entropy": entropy_S.sum(), "count": counted_S.sum()}
    for number, task in enumerate(algorithm.tasks):
        sums[f"count/{task}"] = (counted_S & (provided(inputs.task_S) == number)).sum()
    return loss, sums


def expected_gradient(
    algorithm: Algorithm, columns: dict[str, torch.Tensor]
) -> Callable[[torch.Tensor, slice], torch.Tensor] | None:
    """Gradient of a token-sum loss for a slice of a row's log-probabilities.

    Only a loss that is a sum over tokens can be differentiated part by part: None for any other.
    """
    if not algorithm.is_token_sum:
        return None

    names = [name for name in (*_LOSS_COLUMNS, *_ROLE_COLUMNS) if name in columns]

    def gradient(logprob_S: torch.Tensor, tokens: slice) -> torch.Tensor:
        part = {name: columns[name][tokens] for name in names}
        with torch.enable_grad():
            leaf_S = logprob_S.detach().requires_grad_()
            inputs = loss_inputs(algorithm, torch.stack((leaf_S, torch.zeros_like(leaf_S))), part, None)
            loss, _ = algorithm.loss(inputs)
        return torch.autograd.grad(loss, leaf_S)[0]

    return gradient


def rows_without_gradient(algorithm: Algorithm, rows: list[Row], device: torch.device) -> set[int]:
    """Numbers of rows whose advantages, and thus gradients, are 0 on every rank.

    A row with branches of a rollout that has others elsewhere is none: what those earn may be asked of these."""
    if not algorithm.is_still_without_advantage:
        return set()
    moves = anywhere([not all_zero(row.advantage_S) or bool(row.split) for row in rows], device)
    return {index for index, does in enumerate(moves) if not does}


def no_statistics(algorithm: Algorithm, num_tokens: int, device: torch.device) -> torch.Tensor:
    """Zeros in the shape of the head's outputs."""
    if algorithm.head == "value":
        return torch.zeros(num_tokens, device=device)
    return torch.zeros(2 + algorithm.needs.teacher_words, num_tokens, device=device)


def zero_totals(
    algorithm: Algorithm, role_columns: Mapping[str, np.ndarray], device: torch.device
) -> dict[str, torch.Tensor]:
    """Zero sums for every metric of ``loss_and_sums``, sorted by name, on all ranks.

    ``role_columns``: the columns of roles, zeros for one token."""
    columns = dict.fromkeys(_LOSS_COLUMNS, torch.zeros(1, device=device))
    columns |= {name: torch.from_numpy(zeros).to(device) for name, zeros in role_columns.items()}
    columns |= {"offsets_N": torch.tensor([0, 1], device=device)}
    _, sums = loss_and_sums(algorithm, no_statistics(algorithm, 1, device), columns)
    return {name: torch.zeros((), dtype=torch.float64, device=device) for name in sorted(sums)}


def add_sums(totals: dict[str, torch.Tensor], sums: dict[str, torch.Tensor]) -> None:
    """Add the sums of a row to the totals of all rows."""
    for name, value in sums.items():
        add = torch.maximum if name == "agreement_max" else torch.add
        totals[name] = add(totals[name], value.double())


def step_metrics(totals: dict[str, float]) -> StepMetrics:
    """Means over trained tokens, from totals of all rows and ranks; of a task without any, none."""
    count = max(int(totals["count"]), 1)
    counts = {name: totals.get(f"count/{name.partition('/')[2]}", count) for name in totals if _is_metric(name)}
    return StepMetrics(
        loss=totals["loss"],
        entropy=totals["entropy"] / count,
        agreement_mean=totals["agreement_mean"] / count,
        agreement_max=totals["agreement_max"],
        kl_k3=totals["kl_k3"] / count,
        loss_metrics={name: totals[name] / number for name, number in counts.items() if number},
        num_trained_tokens=int(totals["count"]),
    )


def with_agreement_before(
    answers: Sequence[StepMetrics | NonfiniteBatch], moves: Sequence[bool]
) -> list[StepMetrics | NonfiniteBatch]:
    """A step's updates, each with the agreement of those up to the first that moved the policy.

    Later ones differ from the generator by the policy's own movement. ``moves``: whether an update moves the policy if
    it is applied."""
    applied = [(n, answer) for n, answer in enumerate(answers) if isinstance(answer, StepMetrics)]
    first = next((n for n, _ in applied if moves[n]), len(answers))
    before = [answer for n, answer in applied if n <= first and answer.num_trained_tokens]
    if not before:
        return list(answers)
    agreement_mean = sum(answer.agreement_mean for answer in before) / len(before)
    agreement_max = max(answer.agreement_max for answer in before)
    return [
        replace(answer, agreement_mean=agreement_mean, agreement_max=agreement_max)
        if isinstance(answer, StepMetrics)
        else answer
        for answer in answers
    ]


def _is_metric(name: str) -> bool:
    """Whether a sum is the algorithm's own."""
    return name not in OUR_SUMS and not name.startswith("count/")

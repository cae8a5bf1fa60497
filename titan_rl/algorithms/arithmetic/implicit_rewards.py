"""An implicit process reward model, as pure functions: its loss, and advantages by what it says of each token.

A language model phi that was trained to tell right answers from wrong ones by beta sum_t log(phi(y_t) / ref(y_t)) says
by each term how much the token adds to that.

Source: arXiv 2412.01981 (the reward); PRIME, arXiv 2502.01456.

Dimensions: S trained tokens of a row, N samples.
"""

import torch
import torch.nn.functional as F

OUTCOME_SUMS = ("process_reward", "accurate", "samples")
"""What ``outcome_loss`` counts: rewards, summed over trained tokens; samples told right, and all samples."""


def sums_of_samples(values_S: torch.Tensor, weight_S: torch.Tensor, offsets_N: torch.Tensor) -> torch.Tensor:
    """Sums [N] over each sample's tokens of nonzero weight."""
    sample_S = torch.repeat_interleave(offsets_N.diff(), output_size=len(values_S))
    return values_S.new_zeros(len(offsets_N) - 1).index_add(0, sample_S, torch.where(weight_S > 0, values_S, 0))


def means_of_samples(values_S: torch.Tensor, weight_S: torch.Tensor, offsets_N: torch.Tensor) -> torch.Tensor:
    """Means over each sample's trained tokens, [N, 2]: (1, mean), or (0, 0) without trained tokens."""
    count_N = sums_of_samples(torch.ones_like(values_S), weight_S, offsets_N)
    mean_N = sums_of_samples(values_S, weight_S, offsets_N) / count_N.clamp(min=1)
    return torch.stack(((count_N > 0).to(mean_N.dtype), mean_N), dim=1)


def outcome_loss(
    process_reward_S: torch.Tensor,
    outcome_S: torch.Tensor,
    outcome_weight_S: torch.Tensor,
    offsets_N: torch.Tensor,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Outcome loss sum_n w_n CE(sigmoid(sum_t r_t), o_n), and ``OUTCOME_SUMS``.

    A sample is accurate where the sum is above 0 and its outcome above 1/2, or neither.

    ``outcome_S``, ``outcome_weight_S``: data.types.OUTCOME_COLUMNS; w_n is the sum of its sample's. A reward that
    counts and is not finite makes the loss so, too.

    Source: arXiv 2502.01456, equation 4, the mean over all samples; CE(sigmoid(x), o) = softplus(x) - o x.
    """
    of_samples = outcome_weight_S, offsets_N
    reward_N, weight_N = sums_of_samples(process_reward_S, *of_samples), sums_of_samples(outcome_weight_S, *of_samples)
    counted_N = weight_N > 0
    outcome_N = sums_of_samples(outcome_S * outcome_weight_S, *of_samples) / torch.where(counted_N, weight_N, 1)
    loss = (weight_N * (F.softplus(reward_N) - outcome_N * reward_N)).sum()
    told_N = reward_N.detach()
    return loss, {
        "process_reward": told_N.double().sum(),
        "accurate": (((told_N > 0) == (outcome_N > 0.5)) & counted_N).sum(),
        "samples": counted_N.sum(),
    }


def leave_one_out_rewards(
    process_reward_S: torch.Tensor, term_N2: torch.Tensor, group_sum_N2: torch.Tensor, offsets_N: torch.Tensor
) -> torch.Tensor:
    """Token rewards minus the mean of the other samples' mean rewards, [S]; zeros for a sample alone.

    ``term_N2``: ``means_of_samples``; ``group_sum_N2``: its sums over the sample's group.

    Source: arXiv 2502.01456, equation 5, first line, without the sum over later tokens.
    """
    num_others_N, others_N = (group_sum_N2 - term_N2).unbind(1)
    baseline_N = others_N / num_others_N.clamp(min=1)
    sample_S = torch.repeat_interleave(offsets_N.diff(), output_size=len(process_reward_S))
    is_alone_S = (num_others_N <= 0)[sample_S]
    relative_S = process_reward_S - baseline_N[sample_S].to(process_reward_S.dtype)
    return torch.where(is_alone_S, 0 * process_reward_S, relative_S)  # what is not finite stays so

"""Log-probabilities and entropies of tokens, from logits whose vocabulary is spread over tensor-parallel ranks.

Three numbers a token cross the ranks, never a logit. Everything is in fp32.

Dimensions: S tokens, V words of the vocabulary that this rank holds.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class TokenStatistics:
    logprob_S: torch.Tensor
    entropy_S: torch.Tensor


class _VocabularyParallelSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_SV, target_S, temperature, first_word, group):
        scaled_SV = logits_SV.float() / temperature
        max_S = scaled_SV.amax(-1)
        if group is not None:
            dist.all_reduce(max_S, op=dist.ReduceOp.MAX, group=group)
        shifted_SV = scaled_SV.sub_(max_S[:, None])
        exp_SV = shifted_SV.exp()
        local_S = target_S - first_word
        here_S = (local_S >= 0) & (local_S < logits_SV.shape[1])
        local_S = torch.where(here_S, local_S, 0)
        target_logit_S = torch.where(here_S, shifted_SV.gather(1, local_S[:, None])[:, 0], 0.0)
        sums_3S = torch.stack([exp_SV.sum(-1), (exp_SV * shifted_SV).sum(-1), target_logit_S])
        if group is not None:
            dist.all_reduce(sums_3S, group=group)
        total_S, expected_S, target_logit_S = sums_3S
        # the buffer of the logits becomes the probabilities that the backward needs
        ctx.save_for_backward(torch.div(exp_SV, total_S[:, None], out=exp_SV), local_S, here_S)
        ctx.temperature, ctx.dtype = temperature, logits_SV.dtype
        log_total_S = total_S.log()
        logprob_S, entropy_S = target_logit_S - log_total_S, log_total_S - expected_S / total_S
        ctx.mark_non_differentiable(entropy_S)
        return logprob_S, entropy_S

    @staticmethod
    def backward(ctx, grad_logprob_S, _):
        """d logprob / d logits = (onehot(target) - probability) / temperature, each rank for its own words."""
        probability_SV, local_S, here_S = ctx.saved_tensors
        scale_S = grad_logprob_S / ctx.temperature
        grad_SV = probability_SV * -scale_S[:, None]
        grad_SV.scatter_add_(1, local_S[:, None], torch.where(here_S, scale_S, 0.0)[:, None])
        return grad_SV.to(ctx.dtype), None, None, None, None


def token_statistics(
    logits_SV: torch.Tensor,
    target_S: torch.Tensor,
    temperature: float,
    *,
    first_word: int = 0,
    group: dist.ProcessGroup | None = None,
) -> TokenStatistics:
    """Log-probability of each target, with its gradient, and the entropy of its distribution, without.

    With a group, ``logits_SV`` are this rank's words from ``first_word`` on, and every rank gets the same result. The
    gradient of each rank's logits is that of one loss, which all ranks of the group must compute alike.
    """
    return TokenStatistics(*_VocabularyParallelSoftmax.apply(logits_SV, target_S, temperature, first_word, group))

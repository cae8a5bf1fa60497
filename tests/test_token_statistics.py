"""Log-probabilities and entropies of tokens against torch's own, on a whole vocabulary and on a spread one."""

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from titan_rl.token_statistics import token_statistics


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_token_statistics_against_torch(temperature):
    torch.manual_seed(0)
    logits_SV, target_S = 5 * torch.randn(7, 11, requires_grad=True), torch.randint(11, (7,))
    statistics = token_statistics(logits_SV, target_S, temperature)
    reference = torch.distributions.Categorical(logits=logits_SV / temperature)
    torch.testing.assert_close(statistics.logprob_S, reference.log_prob(target_S))
    torch.testing.assert_close(statistics.entropy_S, reference.entropy().detach())
    assert statistics.logprob_S.requires_grad and not statistics.entropy_S.requires_grad


def test_token_statistics_are_float32_whatever_the_logits():
    statistics = token_statistics(torch.randn(3, 5).bfloat16(), torch.tensor([0, 1, 2]), 1.0)
    assert statistics.logprob_S.dtype == statistics.entropy_S.dtype == torch.float32


def reference(logits_SV: torch.Tensor, target_S: torch.Tensor, temperature: float, weight_S: torch.Tensor):
    """Dense, by torch: logprobs, entropies, and the gradient of the weighted sum of the logprobs."""
    logits_SV = logits_SV.clone().requires_grad_()
    distribution = torch.distributions.Categorical(logits=logits_SV / temperature)
    logprob_S = distribution.log_prob(target_S)
    (logprob_S * weight_S).sum().backward()
    return logprob_S.detach(), distribution.entropy().detach(), logits_SV.grad


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("vocabulary", [12, 13])
def test_spread_vocabulary_agrees_with_the_whole_one(vocabulary, temperature):
    """Ranks are threads; the last of three holds fewer words when they do not divide."""
    torch.manual_seed(0)
    logits_SV, weight_S = 5 * torch.randn(9, vocabulary), torch.randn(9)
    target_S = torch.randint(vocabulary, (9,))
    target_S[:3] = torch.tensor([0, vocabulary // 2, vocabulary - 1])
    store, parts, results = dist.HashStore(), list(logits_SV.chunk(3, dim=1)), [None] * 3

    def rank(index: int) -> None:
        group = dist.ProcessGroupGloo(store, index, 3, timeout=timedelta(seconds=20))
        mine = parts[index].clone().requires_grad_()
        first_word = sum(part.shape[1] for part in parts[:index])
        statistics = token_statistics(mine, target_S, temperature, first_word=first_word, group=group)
        (statistics.logprob_S * weight_S).sum().backward()
        results[index] = statistics.logprob_S.detach(), statistics.entropy_S, mine.grad

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    logprob_S, entropy_S, grad_SV = reference(logits_SV, target_S, temperature, weight_S)
    for result in results:
        torch.testing.assert_close(result[0], logprob_S)
        torch.testing.assert_close(result[1], entropy_S)
    torch.testing.assert_close(torch.cat([result[2] for result in results], dim=1), grad_SV)

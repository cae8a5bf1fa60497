"""Log-probabilities of a few words at each token besides the targets, and the most likely words.

Given the target's log-probability, any other word's is that plus the difference of their two logits; so nothing has to
be summed over the vocabulary again, and gradients are exact. Under tensor parallelism the rank holds the words from
``first_word`` on, and all ranks get the same; the hidden states' gradient is then this rank's part of a sum.

Dimensions: S tokens, K words at each, D hidden size, V words of the vocabulary (that this rank holds).
"""

from typing import Any

import torch
import torch.distributed as dist

_CHUNK_SIZE = 2**24
"""Of numbers that are at hand at once: 64 MiB."""


def word_logprobs(
    hidden_SD: torch.Tensor,
    weight_VD: torch.Tensor,
    target_S: torch.Tensor,
    target_logprob_S: torch.Tensor,
    words_SK: torch.Tensor,
    *,
    temperature: float = 1.0,
    first_word: int = 0,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Log-probabilities [S, K] in fp32, with gradients for hidden states and weight, and through the targets' own."""
    all_SK = torch.cat((words_SK, target_S[:, None]), dim=1)
    logits_SK = _ChosenLogits.apply(hidden_SD, weight_VD, all_SK - first_word, group) / temperature
    return logits_SK[:, :-1] - logits_SK[:, -1:] + target_logprob_S[:, None]


@torch.no_grad()
def likeliest_words(
    hidden_SD: torch.Tensor,
    weight_VD: torch.Tensor,
    target_S: torch.Tensor,
    target_logprob_S: torch.Tensor,
    num_words: int,
    *,
    temperature: float = 1.0,
    first_word: int = 0,
    group: dist.ProcessGroup | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Most likely words, int64 [S, K], and their log-probabilities [S, K] in fp32, in descending order."""
    dtype = torch.promote_types(hidden_SD.dtype, torch.float32)
    weight_VD = weight_VD.to(dtype)
    top_of_blocks = [
        (chunk_SD.to(dtype) @ weight_VD.T).topk(min(num_words, len(weight_VD)), dim=-1)
        for chunk_SD in hidden_SD.split(max(_CHUNK_SIZE // max(len(weight_VD), 1), 1))
    ]
    logits_SK, words_SK = (torch.cat(column) for column in zip(*top_of_blocks, strict=True))
    words_SK = words_SK + first_word
    if group is not None:
        logits_SK, words_SK = _likeliest_of_all(logits_SK, words_SK, num_words, group)
    target_logit_S = _chosen_logits(hidden_SD, weight_VD, target_S[:, None] - first_word, group)[:, 0]
    return words_SK, (logits_SK - target_logit_S[:, None]) / temperature + target_logprob_S[:, None]


def _likeliest_of_all(
    logits_SK: torch.Tensor, words_SK: torch.Tensor, num_words: int, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of all ranks' words, each of which may hold fewer than are wanted."""
    missing = (0, num_words - logits_SK.shape[1])
    logits_SK = torch.nn.functional.pad(logits_SK, missing, value=-torch.inf)
    words_SK = torch.nn.functional.pad(words_SK, missing)
    everyones = [[torch.empty_like(mine) for _ in range(group.size())] for mine in (logits_SK, words_SK)]
    for others, mine in zip(everyones, (logits_SK, words_SK), strict=True):
        dist.all_gather(others, mine.contiguous(), group=group)
    logits_SK, place_SK = torch.cat(everyones[0], dim=1).topk(num_words, dim=-1)
    return logits_SK, torch.cat(everyones[1], dim=1).gather(1, place_SK)


def _chosen_logits(
    hidden_SD: torch.Tensor, weight_VD: torch.Tensor, local_SK: torch.Tensor, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Products [S, K] of each token with its own words, ``local_SK`` counted from this rank's first one."""
    dtype = torch.promote_types(hidden_SD.dtype, torch.float32)
    here_SK, index_SK = _here(local_SK, len(weight_VD))
    logits_SK = hidden_SD.new_empty(local_SK.shape, dtype=dtype)
    for rows in _chunks(local_SK, weight_VD):
        words_SKD = weight_VD[index_SK[rows]].to(dtype)
        logits_SK[rows] = (words_SKD * hidden_SD[rows, None].to(dtype)).sum(-1)
    logits_SK.masked_fill_(~here_SK, 0)
    if group is not None:
        dist.all_reduce(logits_SK, group=group)
    return logits_SK


def _here(local_SK: torch.Tensor, num_words: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether this rank holds a word, and where (0 if it does not)."""
    here_SK = (local_SK >= 0) & (local_SK < num_words)
    return here_SK, torch.where(here_SK, local_SK, 0)


def _chunks(words_SK: torch.Tensor, weight_VD: torch.Tensor) -> list[slice]:
    step = max(_CHUNK_SIZE // max(words_SK.shape[1] * weight_VD.shape[1], 1), 1)
    return [slice(start, start + step) for start in range(0, len(words_SK), step)]


class _ChosenLogits(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_SD: torch.Tensor,
        weight_VD: torch.Tensor,
        local_SK: torch.Tensor,
        group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(hidden_SD, weight_VD, local_SK)
        return _chosen_logits(hidden_SD.detach(), weight_VD.detach(), local_SK, group)

    @staticmethod
    def backward(ctx: Any, grad_SK: torch.Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]  (torch's annotation wants *args)
        hidden_SD, weight_VD, local_SK = ctx.saved_tensors
        here_SK, index_SK = _here(local_SK, len(weight_VD))
        grad_SK = grad_SK.masked_fill(~here_SK, 0)
        hidden_grad_SD = torch.zeros_like(hidden_SD, dtype=grad_SK.dtype)
        weight_grad_VD = torch.zeros_like(weight_VD, dtype=grad_SK.dtype)
        for rows in _chunks(local_SK, weight_VD):
            words_SKD = weight_VD[index_SK[rows]].to(grad_SK.dtype)
            hidden_grad_SD[rows] = (grad_SK[rows, :, None] * words_SKD).sum(1)
            of_words_SKD = grad_SK[rows, :, None] * hidden_SD[rows, None].to(grad_SK.dtype)
            # an embedding's backward adds up in a fixed order on every device, which index_add_ does not
            weight_grad_VD += torch.ops.aten.embedding_dense_backward(
                of_words_SKD, index_SK[rows], len(weight_VD), -1, False
            )
        return hidden_grad_SD.to(hidden_SD.dtype), weight_grad_VD.to(weight_VD.dtype), None, None

"""torch's flash-attention operators for lengths that vary, on a CPU: a loop over segments, told what they are told."""

from contextlib import contextmanager

import torch


@contextmanager
def flash_on_cpu():
    """torch's operators of the kernel, on a CPU."""

    def forward(q, k, v, query_ends, key_ends, max_q, max_k, dropout, is_causal, return_mask, **settings):
        assert not dropout and not return_mask
        where = (query_ends, key_ends, max_q, max_k, window_of(is_causal, settings))
        out = forward_of(q, k, v, *where, scale=settings["scale"])
        return out, q.new_zeros(q.shape[1], len(q), dtype=torch.float), torch.zeros(2), torch.zeros(0), torch.zeros(0)

    def backward(
        grad, q, k, v, out, lse, query_ends, key_ends, max_q, max_k, dropout, is_causal, state, unused, **settings
    ):
        assert lse.shape == (q.shape[1], len(q)) and not dropout
        where = (query_ends, key_ends, max_q, max_k, window_of(is_causal, settings))
        return backward_of(grad, q, k, v, out, *where, scale=settings["scale"])

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", forward, "CPU")
        library.impl("_flash_attention_backward", backward, "CPU")
        yield


def window_of(is_causal: bool, settings: dict) -> int | None:
    """As many tokens as the kernel lets a query see, itself included."""
    left, right = settings["window_size_left"], settings["window_size_right"]
    assert right == 0 and is_causal == (left == -1)
    return None if left == -1 else left + 1


def each_segment(query_ends, key_ends, max_queries, max_keys, window):
    """Of each, its queries, its keys, and the causal mask [Q, K] that is aligned with the last key."""
    for d in range(len(query_ends) - 1):
        queries, keys = (slice(int(ends[d]), int(ends[d + 1])) for ends in (query_ends, key_ends))
        num_queries, num_keys = queries.stop - queries.start, keys.stop - keys.start
        assert 0 < num_queries <= min(num_keys, max_queries) and num_keys <= max_keys
        ones_QK = torch.ones(num_queries, num_keys, dtype=torch.bool)
        seen_QK = ones_QK.tril(num_keys - num_queries)
        if window is not None:
            seen_QK &= ones_QK.triu(num_keys - num_queries - window + 1)
        yield queries, keys, seen_QK


def probabilities(q_QNH, k_KNH, seen_QK, scale) -> torch.Tensor:
    score_NQK = torch.einsum("qnh,knh->nqk", q_QNH, k_KNH) * scale
    return score_NQK.masked_fill(~seen_QK, -torch.inf).softmax(-1)


def forward_of(q, k, v, *where, scale) -> torch.Tensor:
    out, k, v = torch.empty_like(q), *(x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    for queries, keys, seen_QK in each_segment(*where):
        probability_NQK = probabilities(q[queries], k[keys], seen_QK, scale)
        out[queries] = torch.einsum("nqk,knh->qnh", probability_NQK, v[keys])
    return out


def backward_of(grad, q, k, v, out, *where, scale) -> tuple[torch.Tensor, ...]:
    groups, shared = k.shape[1], q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(shared, 1) for x in (k, v))
    grad_q, grad_k, grad_v = (torch.zeros_like(x) for x in (q, k, v))
    for queries, keys, seen_QK in each_segment(*where):
        probability_NQK = probabilities(q[queries], k[keys], seen_QK, scale)
        grad_v[keys] = torch.einsum("nqk,qnh->knh", probability_NQK, grad[queries])
        by_value_NQK = torch.einsum("qnh,knh->nqk", grad[queries], v[keys])
        mean_NQ1 = (grad[queries] * out[queries]).sum(-1).T[..., None]
        grad_score_NQK = probability_NQK * (by_value_NQK - mean_NQ1) * scale
        grad_q[queries] = torch.einsum("nqk,knh->qnh", grad_score_NQK, k[keys])
        grad_k[keys] = torch.einsum("nqk,qnh->knh", grad_score_NQK, q[queries])
    return grad_q, *(x.unflatten(1, (groups, shared)).sum(2) for x in (grad_k, grad_v))

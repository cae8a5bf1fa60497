"""Rows spread over context-parallel ranks: attention and head give what they give of whole rows, gradients included."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from family_models import CASES, SIZES
from rank_processes import run_ranks
from transformers import CONFIG_MAPPING

from titan_rl.config.load import ConfigError
from titan_rl.data.types import Segment
from titan_rl.models.builtin.tiny import tiny_config
from titan_rl.trainer.model.layout import check_layout  # before any torchtitan module

# isort: split
from torchtitan.config import ParallelismConfig

NUM_RANKS, NUM_TOKENS, SIZE = 2, 24, 4
ROW = [Segment(0, 7, ()), Segment(7, 5, ((0, 7),)), Segment(12, 6, ((0, 7),)), Segment(18, 6, ())]
"""Two samples behind one prompt, and one by itself."""
ATTENTION = [(4, 4, None, False), (4, 2, 3, False), (4, 1, None, False), (6, 3, None, False), (4, 2, None, True)]
"""Heads, heads of keys, window, and whether there are sinks."""
SOURCES = [[0], [23], [3, 3, 20], [6, 7, 8, 6, 12, 13, 22], list(range(23))]
"""Positions that predict trained tokens; on one rank, on either, and one more often than once."""


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


def close(got, wanted) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def check_attention(context, heads: int, key_heads: int, window: int | None, sinks: bool) -> None:
    from titan_rl.models.layers.attention import PackedAttention, SinkAttention, SpreadPlan, plan_attention

    if sinks:
        module = SinkAttention(SinkAttention.Config(window=window, num_heads=heads)).double()
        torch.nn.init.normal_(module.sinks)
    else:
        module = PackedAttention(PackedAttention.Config(window=window))
    plan, here = plan_attention(ROW, NUM_TOKENS, torch.device("cpu")), context.tokens(NUM_TOKENS)
    q, k, v, weight = (leaf(1, NUM_TOKENS, count, SIZE) for count in (heads, key_heads, key_heads, heads))
    keywords = {"scale": SIZE**-0.5, "enable_gqa": True}
    whole = module(q, k, v, attention_masks=plan, **keywords)
    wanted = torch.autograd.grad((whole * weight).sum(), [q, k, v, *module.parameters()])
    part = module(*(x[:, here] for x in (q, k, v)), attention_masks=SpreadPlan(plan, context), **keywords)
    close(part, whole[:, here])
    got = torch.autograd.grad((part * weight[:, here]).sum(), [q, k, v, *module.parameters()])
    for gradient, of_whole in zip(got, wanted, strict=True):
        dist.all_reduce(gradient)
        close(gradient, of_whole)


def check_head(context, source: list[int]) -> None:
    source_S = np.asarray(source)
    hidden, weight, target_S = leaf(NUM_TOKENS, SIZE), leaf(SIZE, 3), torch.randn(2, len(source), dtype=torch.float64)
    here, mine = context.tokens(NUM_TOKENS), context.targets(len(source))
    whole = (hidden[source_S] @ weight).T[:2]
    wanted = torch.autograd.grad(((whole - target_S) ** 2).sum(), [hidden, weight])
    states = context.route(source_S, NUM_TOKENS, torch.device("cpu")).exchanged(hidden[here])
    close(states, hidden[source_S[mine]])
    statistics = context.gathered((states @ weight).T[:2], len(source))
    close(statistics, whole)
    for gradient, of_whole in zip(
        torch.autograd.grad(((statistics - target_S) ** 2).sum(), [hidden, weight]), wanted, strict=True
    ):
        dist.all_reduce(gradient)
        close(gradient, of_whole)


def spread_rank(rank: int, port: int) -> None:
    from titan_rl.models.context_parallel import ContextParallel

    store = dist.TCPStore("127.0.0.1", port, NUM_RANKS, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    context = ContextParallel(dist.group.WORLD)
    for case in ATTENTION:
        torch.manual_seed(1)
        check_attention(context, *case)
    for source in SOURCES:
        torch.manual_seed(1)
        check_head(context, source)
    dist.destroy_process_group()


def test_a_row_that_is_spread_gives_what_it_gives_whole():
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    run_ranks(spread_rank, NUM_RANKS, store.port)


@pytest.mark.parametrize(
    ("degrees", "words"),
    [
        ({"context_parallel_degree": 3}, "must divide the model's num_attention_heads = 4"),
        ({"context_parallel_degree": 4, "tensor_parallel_degree": 2}, "= 8 must divide"),
    ],
)
def test_degrees_that_do_not_divide_the_heads_are_refused(degrees, words):
    with pytest.raises(ConfigError, match=words):
        check_layout(tiny_config(), ParallelismConfig(**degrees))


@pytest.mark.parametrize("name", CASES)
def test_rows_of_every_family_can_be_spread_but_for_those_with_linear_attention(name):
    model_type, settings = CASES[name]
    hf = CONFIG_MAPPING[model_type](**SIZES | settings)
    degrees = ParallelismConfig(context_parallel_degree=2)
    if "linear_attention" not in (getattr(hf, "layer_types", None) or ()):
        return check_layout(hf, degrees)
    with pytest.raises(ConfigError, match="such as by linear attention"):
        check_layout(hf, degrees)

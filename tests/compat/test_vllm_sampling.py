"""How an engine on a CPU draws tokens of a large vocabulary."""

import pytest
import torch
from vllm.v1.sample import sampler
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

from titan_rl.compat.vllm import sampling

BLOCK, WORDS = sampling._BLOCK, sampling._LARGE_VOCABULARY + 100


@pytest.fixture
def draws(monkeypatch):
    """vLLM's sampler, which draws by inversion, as ``draws(logits, generators, k)``."""
    monkeypatch.setattr(TopKTopPSampler, "forward_cpu", TopKTopPSampler.forward_cpu)
    monkeypatch.setattr(sampler, "batched_count_greater_than", vars(sampler)["batched_count_greater_than"])
    sampling.sample_by_inversion()
    its = TopKTopPSampler("processed_logprobs")
    return lambda logits, generators, k=None: its.forward(logits.clone(), generators, k, None)


def logprobs(num_rows: int, num_words: int) -> torch.Tensor:
    logits = 3 * torch.randn(num_rows, num_words, generator=torch.Generator().manual_seed(1))
    logits[:, ::7] = -torch.inf
    logits[:, BLOCK : 2 * BLOCK] = -torch.inf
    return logits.log_softmax(-1)


def test_a_token_is_drawn_as_often_as_its_probability_says():
    """Numbers that are spread evenly hit each word as often, to one, as it has probability; weights sum up to 2."""
    count, num_words = 40_000, 2 * BLOCK + 200
    logprob_1V = logprobs(1, num_words)
    uniform_N = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    weight_1V = 2 * logprob_1V.exp()
    drawn = torch.cat([sampling.draw(weight_1V.expand(len(part), -1), part) for part in uniform_N.split(1000)])
    hits = torch.bincount(drawn, minlength=num_words)
    assert (hits - count * logprob_1V[0].double().exp()).abs().max() <= 1.01
    assert not hits[logprob_1V[0] == -torch.inf].any() and (drawn.diff() >= 0).all()


def test_the_ends_of_the_interval_are_words_that_can_be_drawn():
    logprob_1V = logprobs(1, 2 * BLOCK + 1)
    finite = logprob_1V[0].isfinite().nonzero()[:, 0]
    ends = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    assert sampling.draw(logprob_1V.exp().expand(2, -1), ends).tolist() == [finite[0], finite[-1]]


@pytest.mark.parametrize("weight", [0.0, torch.nan, torch.inf])
def test_weights_that_say_nothing_give_a_word_all_the_same(weight):
    drawn = sampling.draw(torch.full((2, BLOCK + 1), weight), torch.tensor([0.0, 0.9], dtype=torch.float64))
    assert all(0 <= token <= BLOCK for token in drawn.tolist())


def test_a_seeded_request_draws_the_same_whatever_is_beside_it(draws):
    logits = logprobs(4, WORDS)
    together, logprob_NV = draws(logits, {place: torch.Generator().manual_seed(place) for place in range(4)})
    alone = [draws(logits[[place]], {0: torch.Generator().manual_seed(place)})[0].item() for place in range(4)]
    assert together.tolist() == alone and torch.equal(logprob_NV, logits.log_softmax(-1))


def test_a_token_is_drawn_of_those_that_are_left(draws):
    logits = logprobs(1, WORDS).expand(200, -1)
    drawn, logprob_NV = draws(logits, {0: torch.Generator().manual_seed(1)}, torch.full((200,), 3))
    likeliest = set(logits[0].topk(3).indices.tolist())
    assert set(drawn.tolist()) == likeliest == set(logprob_NV[0].isfinite().nonzero()[:, 0].tolist())


def test_a_small_vocabulary_is_drawn_from_by_vllms_own_kernel(draws):
    logits = logprobs(3, sampling._LARGE_VOCABULARY - 1)
    seeds = torch.tensor([torch.randint(0, 2**31, (1,), generator=torch.Generator().manual_seed(p)) for p in range(3)])
    drawn, _ = draws(logits, {place: torch.Generator().manual_seed(place) for place in range(3)})
    assert drawn.tolist() == torch.ops._C.fused_gumbel_argmax(logits, seeds).tolist()


def test_no_ranks_are_counted(draws):
    found = sampler.Sampler.gather_logprobs(logprobs(2, WORDS), 0, torch.tensor([1, 2]))
    assert found.selected_token_ranks.tolist() == [0, 0]

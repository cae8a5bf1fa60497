"""What branches of a rollout share stands once in a row, and each token still sees its own past and nothing else."""

import numpy as np
import pytest
import torch
from test_packing import MAX_NEW_TOKENS, packed, past, rows_of

from titan_rl.data.batches.packing import pack, token_weights
from titan_rl.data.batches.prefix_tree import prefix_tree
from titan_rl.data.types import Provenance, Sample
from titan_rl.models.layers import attention
from titan_rl.models.layers.attention import PackedAttention, plan_attention

MODEL, TEMPLATE, TOOL, REPEATED = Provenance.MODEL, Provenance.TEMPLATE, Provenance.TOOL, Provenance.REPEATED


def random_group(seed: int, length: int = 20) -> list[Sample]:
    """Rollouts of one prompt, whose branches fork from each other at any answer; no token is there twice otherwise."""
    rng, samples = np.random.default_rng(seed), []
    tokens = iter(range(1, 1_000_000))

    def drawn(kind: Provenance) -> list[tuple[int, int]]:
        return [(next(tokens), kind) for _ in range(rng.integers(1, length))]

    prompt = [(next(tokens), TEMPLATE) for _ in range(rng.integers(1, 40))]
    for number in range(rng.integers(1, 4)):
        branches: list[tuple[list, list[int]]] = []
        for _ in range(rng.integers(1, 5)):
            begin, ends = prompt, []
            if branches and rng.random() < 0.8:
                other, other_ends = branches[rng.integers(len(branches))]
                if rng.random() < 0.2:  # a conversation of its own
                    begin = [(next(tokens), TEMPLATE) for _ in range(30)]
                else:
                    cut = other_ends[rng.integers(len(other_ends))]
                    begin = [(token, REPEATED if kind == MODEL else kind) for token, kind in other[:cut]]
            row = list(begin)
            for _ in range(rng.integers(1, 4)):
                row += [*drawn(TOOL), *drawn(MODEL)]
                ends.append(len(row))
            branches.append((row, ends))
        for row, _ in branches:
            ids, kinds = (np.array(column) for column in zip(*row, strict=True))
            logprobs = -rng.random(len(ids)).astype(np.float32)
            advantage = float(rng.normal())
            samples.append(Sample(ids.astype(np.int32), kinds.astype(np.int8), logprobs, advantage, "a", number))
    return samples


@pytest.mark.parametrize("row_tokens", [350, 600, 5000])
@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_each_trained_token_sees_its_own_branch_alone(seed, share, row_tokens):
    group = random_group(seed)
    expected = {
        int(sample.tokens[place]): (
            sample.tokens[:place].tolist(),
            sample.logprobs[place],
            np.float32(sample.advantage),
        )
        for sample in group
        for place in np.flatnonzero(sample.provenance == MODEL)
    }
    batch = packed([group], 1, row_tokens, share)
    seen = []
    for row in rows_of(batch):
        columns = zip(row.source_S, row.target_S, row.logprob_S, row.advantage_S, row.weight_S, strict=True)
        for source, target, logprob, advantage, weight in columns:
            if weight:
                seen.append(int(target))
                assert (past(row, source), logprob, advantage) == expected[int(target)]
                assert row.positions_T[source] == len(past(row, source)) - 1
        assert len(row.tokens_T) <= row_tokens
        ends = np.cumsum([segment.length for segment in row.segments])
        assert [segment.start for segment in row.segments] == [0, *ends[:-1]] and ends[-1] == len(row.tokens_T)
    assert sorted(seen) == sorted(expected) and batch.num_trained_tokens == len(expected)


def test_what_is_shared_stands_once():
    saved = 0
    for seed in range(10):
        group = [sample for sample in random_group(seed, length=60) if sample.sample == 0]
        tree, whole = prefix_tree(group), sum(len(sample.tokens) - 1 for sample in group)
        distinct = {tuple(sample.tokens[: place + 1]) for sample in group for place in range(len(sample.tokens) - 1)}
        assert len(distinct) <= tree.num_tokens <= whole
        assert tree.num_tokens - len(distinct) < 16 * len(group)  # what is too short to share
        saved += whole - tree.num_tokens
    assert saved > 1000


def test_samples_of_different_rollouts_share_nothing_that_the_model_wrote():
    def sample(number: int) -> Sample:
        kinds = np.array([TEMPLATE] * 5 + [MODEL] * 40, np.int8)
        return Sample(np.arange(45, dtype=np.int32), kinds, np.zeros(45, np.float32), 1.0, "a", number)

    tree = prefix_tree([sample(0), sample(1)])
    assert [node.end - node.begin for node in tree.nodes] == [5, 39, 39]
    tree = prefix_tree([sample(0), sample(0)])  # of one rollout even all of it, if it is the same
    assert tree.num_tokens == 44 and tree.last[0] == tree.last[1]


def test_samples_share_no_token_that_went_through_other_experts():
    def sample(number: int, experts: list[int] | None) -> Sample:
        kinds = np.array([TEMPLATE] * 5 + [MODEL] * 4, np.int8)
        columns = np.arange(9, dtype=np.int32), kinds, np.zeros(9, np.float32), 1.0, "a", number
        experts_TLK = None if experts is None else np.array(experts, np.uint8).reshape(9, 1, 1)
        return Sample(*columns, routed_experts=experts_TLK)

    def lengths(*samples: Sample) -> list[int]:
        return [node.end - node.begin for node in prefix_tree(samples).nodes]

    assert lengths(sample(0, [1] * 9), sample(1, [1] * 5 + [2] * 4)) == [5, 3, 3]
    assert lengths(sample(0, [1] * 9), sample(1, [1] * 2 + [2] * 7)) == [2, 6, 6]
    assert lengths(sample(0, [1] * 9), sample(1, None)) == lengths(sample(0, [1] * 9), sample(1, [2] * 9)) == [8, 8]


@pytest.mark.parametrize("piece", [attention._PIECE, 6])
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("seed", range(5))
def test_attention_over_shared_parts_is_that_of_each_branch(monkeypatch, seed, window, piece):
    monkeypatch.setattr(attention, "_PIECE", piece)
    group = random_group(seed)
    batch = pack(
        [group],
        num_ranks=1,
        row_tokens=5000,
        share_prefix=True,
        weigh=lambda samples: token_weights(samples, "token", MAX_NEW_TOKENS),
    )
    torch.manual_seed(seed)
    table = torch.randn(3, int(max(sample.tokens.max() for sample in group)) + 1, 2, 4, dtype=torch.float64)
    attend = PackedAttention(PackedAttention.Config(window=window))
    of_target = {}
    for row in rows_of(batch):
        plan = plan_attention(row.segments, len(row.tokens_T), torch.device("cpu"))
        tokens_T = torch.from_numpy(row.tokens_T)
        out_TNH = attend(*(each[tokens_T][None] for each in table), attention_masks=plan)[0]
        of_target |= dict(zip(row.target_S.tolist(), out_TNH[torch.from_numpy(row.source_S)], strict=True))
    for sample in group:
        tokens_T = torch.from_numpy(sample.tokens.astype(np.int64))
        q, k, v = (each[tokens_T].transpose(0, 1) for each in table)
        place_T = torch.arange(len(tokens_T))
        seen_QK = place_T[:, None] >= place_T
        if window is not None:
            seen_QK &= place_T[:, None] - place_T < window
        out_TNH = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen_QK).transpose(0, 1)
        for place in np.flatnonzero(sample.provenance == MODEL):
            assert torch.allclose(of_target[int(sample.tokens[place])], out_TNH[place - 1])

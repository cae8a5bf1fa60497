"""Whatever the layout, each trained token is predicted once, from its own sample's past, with its own weight."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from titan_rl.algorithms.base import Algorithm
from titan_rl.algorithms.batches.batching import discard_reason, sft_batches, step_batches, usable_rollouts
from titan_rl.algorithms.policy_gradient.grpo import GRPO
from titan_rl.config.errors import NamedFault
from titan_rl.config.sections.schema import AlgorithmConfig, Config, SFTConfig
from titan_rl.data.batches.packing import fit_rows, pack, token_weights
from titan_rl.data.storage.sampling_mask import SamplingMask
from titan_rl.data.types import Batch, Group, Layout, Provenance, Rollout, Row, Sample

MAX_NEW_TOKENS = 12
LAYOUT = Layout(num_ranks=1, row_tokens=64)
LAYOUTS = [
    (seed, num_ranks, row_tokens, share_prefix)
    for seed in range(8)
    for num_ranks, row_tokens in [(1, 20), (1, 64), (2, 33), (3, 20), (7, 1000)]
    for share_prefix in (True, False)
]
layouts = pytest.mark.parametrize(("seed", "num_ranks", "row_tokens", "share_prefix"), LAYOUTS)


def random_groups(seed: int) -> list[list[Sample]]:
    """Groups in which no two tokens are the same, but for the prompts that a group shares; at most 21 tokens each. In
    some an environment says something to each sample before its first answer."""
    rng = np.random.default_rng(seed)
    tokens = iter(range(1, 100_000))

    def sample(prompt: list[int], speaks_first: bool) -> Sample:
        answer = [next(tokens) for _ in range(rng.integers(1, MAX_NEW_TOKENS + 1))]
        wrote = rng.choice([Provenance.MODEL, Provenance.MODEL, Provenance.TOOL], len(answer))
        first = int(rng.integers(len(answer))) if speaks_first else 0
        wrote[:first], wrote[first] = Provenance.TOOL, Provenance.MODEL
        provenance = np.concatenate([np.full(len(prompt), Provenance.TEMPLATE), wrote]).astype(np.int8)
        logprobs = -rng.random(len(provenance)).astype(np.float32)
        return Sample(np.array(prompt + answer, np.int32), provenance, logprobs, float(rng.normal()))

    def group() -> list[Sample]:
        prompt = [next(tokens) for _ in range(rng.integers(1, 10))]
        speaks_first = rng.random() < 0.3
        return [sample(prompt, speaks_first) for _ in range(rng.integers(1, 7))]

    return [group() for _ in range(rng.integers(1, 6))]


def packed(groups, num_ranks, row_tokens, share_prefix, aggregation="token", **settings) -> Batch:
    return pack(
        groups,
        num_ranks=num_ranks,
        row_tokens=row_tokens,
        share_prefix=share_prefix,
        weigh=lambda samples: token_weights(samples, aggregation, MAX_NEW_TOKENS),
        **settings,
    )


def rows_of(batch: Batch) -> list[Row]:
    return [row for rows in batch.rows for row in rows]


def is_dummy(row: Row) -> bool:
    return not row.weight_S.any()


def past(row: Row, source: int) -> list[int]:
    """The tokens that the model sees when it predicts at ``source``."""
    [segment] = [s for s in row.segments if s.start <= source < s.start + s.length]
    prefix = [token for start, length in segment.prefix for token in row.tokens_T[start : start + length].tolist()]
    return [*prefix, *row.tokens_T[segment.start : source + 1].tolist()]


@layouts
def test_each_trained_token_is_predicted_once_from_its_own_past(seed, num_ranks, row_tokens, share_prefix):
    groups = random_groups(seed)
    expected = {
        int(s.tokens[i]): (s.tokens[:i].tolist(), s.logprobs[i], np.float32(s.advantage))
        for group in groups
        for s in group
        for i in np.flatnonzero(s.provenance == Provenance.MODEL)
    }
    batch = packed(groups, num_ranks, row_tokens, share_prefix)
    seen = Counter()
    for row in rows_of(batch):
        if is_dummy(row):
            continue
        columns = zip(row.source_S, row.target_S, row.logprob_S, row.advantage_S, strict=True)
        for source, target, logprob, advantage in columns:
            seen[int(target)] += 1
            assert (past(row, source), logprob, advantage) == expected[int(target)]
            assert row.positions_T[source] == len(past(row, source)) - 1
    assert seen == Counter(expected.keys())
    assert batch.num_trained_tokens == len(expected)


def test_what_environments_say_alike_is_shared_and_what_they_say_otherwise_is_not():
    def sample(*tokens: int) -> Sample:
        provenance = np.array([Provenance.TEMPLATE, *[Provenance.TOOL] * (len(tokens) - 2), Provenance.MODEL], np.int8)
        return Sample(np.array(tokens, np.int32), provenance, np.zeros(len(tokens), np.float32), 1.0)

    for samples, shared in (
        ([sample(1, 2, 3, 90), sample(1, 2, 3, 91)], 3),
        ([sample(1, 2, 3, 90), sample(1, 2, 4, 91)], 2),
        ([sample(1, 2, 3, 90), sample(1, 2, 91)], 2),
        ([sample(1, 2, 3, 90), sample(5, 2, 3, 91)], 0),
    ):
        rows = rows_of(packed([samples], 1, 64, True))
        assert sum(len(row.tokens_T) for row in rows) == shared + sum(len(s.tokens) - 1 - shared for s in samples)


@layouts
def test_segments_cover_each_row_and_positions_go_on_from_the_prefix(seed, num_ranks, row_tokens, share_prefix):
    batch = packed(random_groups(seed), num_ranks, row_tokens, share_prefix)
    for row in rows_of(batch):
        end = 0
        for segment in row.segments:
            assert segment.start == end and segment.length > 0
            assert all(start + length <= segment.start for start, length in segment.prefix)
            end += segment.length
            positions = row.positions_T[segment.start : end]
            assert positions.tolist() == [*range(segment.prefix_length, segment.prefix_length + segment.length)]
        assert end == len(row.tokens_T) == len(row.positions_T)


@layouts
def test_rows_keep_their_limit_and_every_rank_has_as_many(seed, num_ranks, row_tokens, share_prefix):
    batch = packed(random_groups(seed), num_ranks, row_tokens, share_prefix)
    assert len(batch.rows) == num_ranks
    assert len({len(rows) for rows in batch.rows}) == 1
    assert all(len(row.tokens_T) <= row_tokens for row in rows_of(batch))
    assert sum(len(row.tokens_T) for row in rows_of(batch) if not is_dummy(row)) == batch.num_tokens


@layouts
@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_layout_changes_no_weight(seed, num_ranks, row_tokens, share_prefix, aggregation):
    def trained(batch: Batch) -> Counter:
        rows = [row for row in rows_of(batch) if not is_dummy(row)]
        return Counter(item for r in rows for item in zip(r.target_S, r.weight_S, r.advantage_S, strict=True))

    groups = random_groups(seed)
    batch = packed(groups, num_ranks, row_tokens, share_prefix, aggregation)
    assert trained(batch) == trained(packed(groups, 1, 10_000, False, aggregation))
    if aggregation != "constant":
        models = sum((s.provenance == Provenance.MODEL).any() for group in groups for s in group)
        assert models and sum(float(row.weight_S.sum()) for row in rows_of(batch)) == pytest.approx(1, abs=1e-5)


def with_arrays(group: list[Sample], value) -> list[Sample]:
    """The group with ``value(sample, count)`` as each sample's advantages."""
    counts = [int((s.provenance == Provenance.MODEL).sum()) for s in group]
    return [replace(s, advantage=value(s, count)) for s, count in zip(group, counts, strict=True)]


@layouts
def test_a_constant_array_of_advantages_is_the_number_bit_for_bit(seed, num_ranks, row_tokens, share_prefix):
    groups = random_groups(seed)
    arrays = [with_arrays(group, lambda s, count: np.full(count, s.advantage)) for group in groups]
    by_number, by_array = (packed(each, num_ranks, row_tokens, share_prefix) for each in (groups, arrays))
    assert by_array.has_signal == by_number.has_signal
    for a, b in zip(rows_of(by_number), rows_of(by_array), strict=True):
        assert a.advantage_S.dtype == b.advantage_S.dtype and a.advantage_S.tobytes() == b.advantage_S.tobytes()


@layouts
def test_each_token_gets_its_own_advantage(seed, num_ranks, row_tokens, share_prefix):
    def tokens_of(sample: Sample) -> np.ndarray:
        return sample.tokens[sample.provenance == Provenance.MODEL]

    groups = [with_arrays(group, lambda s, count: tokens_of(s) / 7) for group in random_groups(seed)]
    rows = [row for row in rows_of(packed(groups, num_ranks, row_tokens, share_prefix)) if not is_dummy(row)]
    assert rows
    for row in rows:
        assert row.advantage_S.tolist() == (row.target_S / 7).astype(np.float32).tolist()


@pytest.mark.parametrize(("values", "has_signal"), [([0.0, 0.0], False), ([0.0, 0.1], True), ([np.nan, 0.0], True)])
def test_signal_of_arrays(values, has_signal):
    sample = Sample(np.arange(3), np.array([0, 1, 1], np.int8), np.zeros(3, np.float32), np.array(values))
    assert packed([[sample]], 1, 16, True).has_signal is has_signal


def test_an_array_of_advantages_must_fit_its_tokens():
    sample = Sample(np.arange(3), np.array([0, 1, 1], np.int8), np.zeros(3, np.float32), np.array([1.0]))
    with pytest.raises(AssertionError, match="one for each token"):
        packed([[sample]], 1, 16, True)


@layouts
def test_groups_without_signal_stand_behind_the_others_in_rows_of_their_own(seed, num_ranks, row_tokens, share_prefix):
    groups = random_groups(seed)
    groups[::2] = [[replace(sample, advantage=0.0) for sample in group] for group in groups[::2]]
    batch = packed(groups, num_ranks, row_tokens, share_prefix, set_still_apart=True)
    signals = [[row.advantage_S != 0 for row in rows if row.owners] for rows in zip(*batch.rows, strict=True)]
    assert all(signal_S.all() == signal_S.any() for rows in signals for signal_S in rows)
    moves = [any(signal_S.any() for signal_S in rows) for rows in signals]
    assert moves == sorted(moves, reverse=True)
    assert all(signal_S.all() for rows in signals[: sum(moves)] for signal_S in rows)
    apart, together = (rows_of(each) for each in (batch, packed(groups, num_ranks, row_tokens, share_prefix)))
    assert Counter(targets(apart)) == Counter(targets(together))


def targets(rows: list[Row]) -> list[tuple]:
    return [each for row in rows for each in zip(row.target_S, row.advantage_S, row.weight_S, strict=True) if each[2]]


def test_ranks_without_work_get_rows_that_count_for_nothing():
    [prompt, answer] = np.array([5, 6], np.int32), np.array([0, 1], np.int8)
    batch = packed([[Sample(prompt, answer, np.zeros(2, np.float32), 1.0)]], 4, 16, True)
    real, *dummies = sorted(rows_of(batch), key=is_dummy)
    assert real.weight_S.tolist() == [1] and len(dummies) == 3
    for row in dummies:
        assert is_dummy(row) and not row.advantage_S.any() and len(row.tokens_T) == 1 and len(row.source_S) == 1


def test_shared_prompt_is_laid_down_once():
    prompt = list(range(100, 110))
    group = [
        Sample(np.array([*prompt, n], np.int32), np.array([0] * 10 + [1], np.int8), np.zeros(11, np.float32), float(n))
        for n in range(8)
    ]
    assert packed([group], 1, 1000, True).num_tokens == 10
    assert packed([group], 1, 1000, False).num_tokens == 80


def test_group_too_long_for_a_row_repeats_its_prompt_instead_of_overflowing():
    answers = [np.arange(n * 10, n * 10 + 8) for n in range(1, 5)]
    group = [
        Sample(np.array([1, 2, 3, *a], np.int32), np.array([0] * 3 + [1] * 8, np.int8), np.zeros(11, np.float32), 1.0)
        for a in answers
    ]
    batch = packed([group], 1, 17, True)
    assert [len(row.tokens_T) for row in rows_of(batch)] == [17, 17]


def test_sample_longer_than_a_row_is_an_error():
    sample = Sample(np.arange(9, dtype=np.int32), np.array([0] + [1] * 8, np.int8), np.zeros(9, np.float32), 1.0)
    packed([[sample]], 1, 8, True)
    with pytest.raises(AssertionError):
        packed([[sample]], 1, 7, True)


def test_packing_is_the_same_every_time():
    once, again = (packed(random_groups(3), 2, 33, True) for _ in range(2))
    for a, b in zip(rows_of(once), rows_of(again), strict=True):
        assert a.tokens_T.tolist() == b.tokens_T.tolist() and a.source_S.tolist() == b.source_S.tolist()


@layouts
def test_rows_come_in_multiples(seed, num_ranks, row_tokens, share_prefix):
    groups = random_groups(seed)
    weigh = lambda samples: token_weights(samples, "token", MAX_NEW_TOKENS)  # noqa: E731
    settings = dict(num_ranks=num_ranks, row_tokens=row_tokens, share_prefix=share_prefix, weigh=weigh)
    batch = pack(groups, row_multiple=3, **settings)
    assert all(rows and len(rows) % 3 == 0 for rows in batch.rows) and len({len(rows) for rows in batch.rows}) == 1
    targets = Counter(int(t) for row in rows_of(batch) if not is_dummy(row) for t in row.target_S)
    assert targets == Counter(int(t) for row in rows_of(pack(groups, **settings)) for t in row.target_S if t)


@pytest.mark.parametrize(("token_multiple", "row_multiple"), [(1, 1), (2, 1), (4, 3), (7, 2)])
@pytest.mark.parametrize("same_length", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_rows_fit_a_layout_and_train_what_they_trained(seed, token_multiple, row_multiple, same_length):
    rows = packed(random_groups(seed), 1, 40, True).rows[0]
    fitted = fit_rows(rows, token_multiple=token_multiple, row_multiple=row_multiple, same_length=same_length)
    lengths = [len(row.tokens_T) for row in fitted]
    assert len(fitted) % row_multiple == 0 and len(fitted) - len(rows) < row_multiple
    assert all(length % token_multiple == 0 for length in lengths) and (not same_length or len(set(lengths)) == 1)
    assert max(lengths) - max(len(row.tokens_T) for row in rows) < token_multiple
    assert all(is_dummy(row) for row in fitted[len(rows) :])
    for row in fitted:
        ends = np.cumsum([segment.length for segment in row.segments])
        assert [s.start for s in row.segments] == [0, *ends[:-1]] and ends[-1] == len(row.positions_T)
    for row, before in zip(fitted, rows, strict=False):
        kept = len(before.tokens_T)
        assert row.segments[: len(before.segments)] == before.segments
        assert all(not segment.prefix_length for segment in row.segments[len(before.segments) :])
        assert max(s.length for s in row.segments) == max(s.length for s in before.segments)
        assert row.tokens_T[:kept].tolist() == before.tokens_T.tolist()
        assert row.source_S is before.source_S and row.weight_S is before.weight_S


def group_of(name: str, *outcomes: tuple[float, str]) -> Group:
    rollouts = [
        Rollout(
            name,
            i,
            np.array([7, 8, 9], np.int32),
            np.array([0, 1, 1], np.int8),
            np.zeros(3, np.float32),
            np.array([-1, 0, 0], np.int32),
            [],
            status,
            reward,
        )
        for i, (reward, status) in enumerate(outcomes)
    ]
    return Group(name, rollouts)


@pytest.mark.parametrize(
    ("statuses", "train_truncated", "num_usable", "reason"),
    [
        (["ok", "ok", "timeout"], True, 2, None),
        (["ok", "truncated"], True, 2, None),
        (["ok", "truncated"], False, 1, None),
        (["truncated", "truncated"], False, 0, "truncated"),
        (["max_turns", "truncated", "ok"], True, 3, None),
        (["max_turns", "max_turns", "truncated"], False, 0, "max_turns"),
        (["ok", "infra_error", "infra_error", "timeout"], True, 1, "infra_error"),
        (["timeout", "timeout"], True, 0, "timeout"),
    ],
)
def test_what_may_reach_the_loss(statuses, train_truncated, num_usable, reason):
    algorithm = AlgorithmConfig(train_truncated=train_truncated)
    group = group_of("a", *((1.0, status) for status in statuses))
    assert len(usable_rollouts(group, algorithm)) == num_usable
    assert discard_reason(group, algorithm) == reason


def test_refused_group_is_discarded_by_its_own_name():
    assert discard_reason(Group("a", [], refused="prompt_too_long"), AlgorithmConfig()) == "prompt_too_long"


def test_failures_do_not_shift_the_advantages_of_the_rest():
    group = group_of("a", (1.0, "ok"), (0.0, "infra_error"), (0.0, "ok"), (0.0, "timeout"))
    [batch] = step_batches([group], GRPO(), Config(), LAYOUT)
    assert batch.num_trained_tokens == 4 and batch.has_signal
    [row] = rows_of(batch)
    h = 2**-0.5  # of two samples, each is half their difference from the mean, over that difference by the root of two
    assert sorted(row.advantage_S.tolist()) == pytest.approx([-h, -h, h, h], rel=1e-5)


def test_advantages_of_ones_own_take_the_place_of_the_algorithms():
    group, own = group_of("a", (1.0, "ok"), (0.0, "ok"), (0.0, "ok")), [0.5, -0.25, 2.0]
    for rollout, advantage in zip(group.rollouts, own, strict=True):
        rollout.advantage = advantage
    [row] = rows_of(step_batches([group], GRPO(), Config(), LAYOUT)[0])
    assert set(row.advantage_S.tolist()) == set(own)
    group.rollouts[1].advantage = None
    with pytest.raises(RuntimeError, match="sample 1 has no advantage, and 0 has: give one to each, or to none"):
        step_batches([group], GRPO(), Config(), LAYOUT)


def test_equal_rewards_are_no_signal():
    groups = [group_of(name, *[(reward, "ok")] * 7) for name, reward in (("a", 0.1), ("b", 1.0))]
    [batch] = step_batches(groups, GRPO(), Config(), LAYOUT)
    assert not batch.has_signal


def test_each_update_of_a_batch_is_normalized_by_itself():
    groups = [group_of(str(n), *[(float(i), "ok") for i in range(2 + n)]) for n in range(4)]
    batches = step_batches(groups, GRPO(), Config(algorithm=AlgorithmConfig(updates_per_batch=3)), LAYOUT)
    assert [batch.num_trained_tokens for batch in batches] == [2 * (2 + 3), 2 * 4, 2 * 5]
    for batch in batches:
        assert sum(float(row.weight_S.sum()) for row in rows_of(batch)) == pytest.approx(1)


class Given(Algorithm):
    """Advantages are what a test wants."""

    def __init__(self, advantages):
        self.given = advantages

    def advantages(self, rollouts):
        return self.given(rollouts)

    def loss(self, inputs):
        raise NotImplementedError


def test_advantages_may_come_token_by_token():
    [batch] = step_batches(
        [group_of("a", (1.0, "ok"), (0.0, "ok"))], Given(lambda rollouts: [np.array([0.5, -2.0]), 3]), Config(), LAYOUT
    )
    assert rows_of(batch)[0].advantage_S.tolist() == [0.5, -2.0, 3.0, 3.0]


@pytest.mark.parametrize(
    ("advantages", "said"),
    [
        (lambda rollouts: [1.0], "one for each of 2 rollouts is wanted, not 1 of them"),
        (lambda rollouts: 1.0, "wanted, not float"),
        (lambda rollouts: ["a", "b"], "must be a number or an array of 2 .* not str"),
        (lambda rollouts: np.zeros((2, 3)), "not an array \\(3,\\) of float64"),
        (lambda rollouts: rollouts[0].rewards, "AttributeError: .*'rewards'"),
    ],
)
def test_wrong_advantages_name_the_prompt(advantages, said):
    group = group_of("train/0000012", (1.0, "ok"), (0.0, "ok"))
    with pytest.raises(NamedFault, match=f"advantages of train/0000012: .*{said}") as caught:
        step_batches([group], Given(advantages), Config(), LAYOUT)
    assert "\n" not in str(caught.value)


def test_demonstrations_fill_a_batch_for_each_supervised_step():
    rollouts = [group_of(str(n), (0.0, "ok")).rollouts[0] for n in range(5)]
    batches = sft_batches(rollouts, Config(sft=SFTConfig(examples_per_step=2)), LAYOUT)
    assert [batch.num_trained_tokens for batch in batches] == [4, 4, 2] and all(b.has_signal for b in batches)
    assert all((row.advantage_S == 1).all() for batch in batches for row in rows_of(batch))
    with pytest.raises(ValueError, match="raise training.seq_len"):
        sft_batches(rollouts, Config(), Layout(1, 2))


@layouts
def test_each_token_of_a_row_keeps_the_experts_that_it_went_through(seed, num_ranks, row_tokens, share_prefix):
    """Made of the token, so that a row shows whose they are; those of samples without any are not recorded."""

    def with_experts(sample: Sample) -> Sample:
        experts_TLK = np.stack([sample.tokens % 200, sample.tokens // 200], axis=1).astype(np.uint8)[:, None]
        return replace(sample, routed_experts=experts_TLK)

    groups = [
        [with_experts(sample) if n % 2 else sample for n, sample in enumerate(group)] for group in random_groups(seed)
    ]
    rows = rows_of(packed(groups, num_ranks, row_tokens, share_prefix))
    num_recorded = 0
    for row in (row for row in rows if row.routed_experts is not None):
        assert len(row.routed_experts) == len(row.tokens_T)
        recorded = row.routed_experts[:, 0, 0] != 255
        num_recorded += int(recorded.sum())
        found = row.routed_experts.astype(int)[recorded, 0] @ [1, 200]
        assert np.array_equal(found, row.tokens_T[recorded])
    trained = [s for group in groups for s in group if s.routed_experts is not None]
    wanted = sum(len(s.tokens) - 1 for s in trained if (s.provenance == Provenance.MODEL).any())
    assert num_recorded == wanted if not share_prefix else 0 < num_recorded <= wanted
    padded = fit_rows(rows, token_multiple=7, row_multiple=1, same_length=True)
    assert all(len(row.routed_experts) == len(row.tokens_T) for row in padded if row.routed_experts is not None)


@layouts
def test_each_trained_token_keeps_its_own_sampling_mask(seed, num_ranks, row_tokens, share_prefix):
    """Made of the token, so that a row shows whose it is; samples without one are of the whole vocabulary."""

    def with_mask(sample: Sample) -> Sample:
        supports = [np.array([token, 5000 + token], np.int32) for token in sample.tokens.tolist()]
        return replace(sample, mask=SamplingMask.of(supports, 10_000))

    groups = [
        [with_mask(sample) if n % 2 else sample for n, sample in enumerate(group)] for group in random_groups(seed)
    ]
    rows = [row for row in rows_of(packed(groups, num_ranks, row_tokens, share_prefix)) if row.mask is not None]
    assert rows
    num_masked = 0
    for row in rows:
        assert len(row.mask) == len(row.target_S)
        for place in np.flatnonzero(row.mask.lengths).tolist():
            num_masked += 1
            assert row.mask.kept(place).tolist() == [row.target_S[place], 5000 + row.target_S[place]]
    trained = [s for group in groups for s in group if s.mask is not None]
    assert num_masked == sum(int((s.provenance == Provenance.MODEL).sum()) for s in trained)

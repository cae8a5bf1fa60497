"""What was trained on reads back as it was."""

from dataclasses import replace

import numpy as np
import pytest
from made_rollouts import rollout_of

from titan_rl.data.storage.decoding import Penalties
from titan_rl.data.storage.routed_experts import ExpertShape
from titan_rl.data.storage.sampling_mask import SamplingMask
from titan_rl.data.text.thinking import ThinkingTags
from titan_rl.data.types import Decoding, Group, Turn
from titan_rl.records.metrics import mask_metrics, sampling_metrics, thinking_metrics
from titan_rl.records.steps.rollouts import Limits, RolloutsError, read_rollouts, write_rollouts

GROUPS = [
    Group("train/0000002", [rollout_of("train/0000002", sample) for sample in range(3)]),
    Group(
        "train/0000001",
        [
            rollout_of("train/0000001", 0, status="timeout", reward=0.0, reward_parts={}, text=""),
            rollout_of("train/0000001", 1, turns=[Turn(1, 2, "stop"), Turn(3, 5, "length")], status="truncated"),
            rollout_of("train/0000001", 2, reward_parts={"b": 1.0, "a": -0.5}, reward=0.5),
            rollout_of("train/0000001", 3, penalties=Penalties(1.1, -0.2, 0.3)),
        ],
    ),
]


def test_groups_read_back_as_they_were(tmp_path):
    write_rollouts(tmp_path, 3, GROUPS)
    for group, wanted in zip(read_rollouts(tmp_path, 3), GROUPS, strict=True):
        assert group.prompt_id == wanted.prompt_id
        for rollout, original in zip(group.rollouts, wanted.rollouts, strict=True):
            for name, value in vars(original).items():
                got = getattr(rollout, name)
                if isinstance(value, np.ndarray):
                    assert got.dtype == value.dtype and np.array_equal(got, value), name
                else:
                    assert got == value, name


def test_a_step_written_again_replaces_the_first(tmp_path):
    write_rollouts(tmp_path, 3, GROUPS)
    write_rollouts(tmp_path, 3, GROUPS[:1])
    assert [group.prompt_id for group in read_rollouts(tmp_path, 3)] == ["train/0000002"]
    assert [file.name for file in tmp_path.iterdir()] == ["step-000003.parquet"]


def test_steps_stand_apart(tmp_path):
    write_rollouts(tmp_path, 1, GROUPS[:1])
    write_rollouts(tmp_path, 2, GROUPS[1:])
    assert [read_rollouts(tmp_path, step)[0].prompt_id for step in (1, 2)] == ["train/0000002", "train/0000001"]
    with pytest.raises(FileNotFoundError):
        read_rollouts(tmp_path, 3)


def test_sampling_masks_read_back_and_wrong_ones_are_refused(tmp_path):
    def masked(supports) -> list[Group]:
        mask = SamplingMask.of([np.array(support, np.int32) for support in supports], 400)
        return [Group("a", [rollout_of("a", 0, mask=mask), rollout_of("a", 1)])]

    supports = [[], [], [2, 7], [3, *range(100, 300)]]
    write_rollouts(tmp_path, 1, masked(supports))
    first, second = read_rollouts(tmp_path, 1)[0].rollouts
    assert [first.mask.kept(place).tolist() for place in (2, 3)] == supports[2:] and len(first.mask) == 4
    assert second.mask is None
    assert mask_metrics([first, second]) == {"sampling_mask_mib": 58 / 2**20, "sampled_from_mean": (2 + 201) / 2}
    assert mask_metrics([second]) == {}
    for wrong, said in (([[], [], [2]], "of 3 tokens"), ([[], [], [2], [7, 9]], "leaves token 3 itself out")):
        write_rollouts(tmp_path, 1, masked(wrong))
        with pytest.raises(RolloutsError, match=said):
            read_rollouts(tmp_path, 1)


def test_routed_experts_read_back_and_wrong_ones_are_refused(tmp_path):
    shape, kept = ExpertShape((False, True), 4, 2), np.array([[[0, 0], [1, 3]]] * 3 + [[[255, 255]] * 2], np.uint8)
    limits = Limits(99, 9, Decoding(), experts=shape)

    def read_back(experts_TLK, limits=limits) -> np.ndarray | None:
        write_rollouts(tmp_path, 1, [Group("a", [rollout_of("a", 0, routed_experts=experts_TLK)])])
        return read_rollouts(tmp_path, 1, limits)[0].rollouts[0].routed_experts

    for dtype in (np.uint8, np.uint16):
        experts_TLK = np.where(kept == 255, np.iinfo(dtype).max, kept.astype(dtype))
        got = read_back(experts_TLK)
        assert got.dtype == dtype and np.array_equal(got, experts_TLK)
    assert read_back(None, Limits(99, 9, Decoding())) is None
    unlike = {
        "expert 4 of 4": np.where(kept == 3, 4, kept).astype(np.uint8),
        "chosen twice": np.where(kept == 3, 1, kept).astype(np.uint8),
        "in a layer that has none": np.where(kept == 0, 1, kept).astype(np.uint8),
        "in some layers alone": np.concatenate([kept[:3], [[[255, 255], [1, 3]]]]).astype(np.uint8),
        "should have .4, 2, 2.": kept[1:],
        "lacks the experts that answered token 2": np.roll(kept, 2, 0),
    }
    for said, experts_TLK in unlike.items():
        with pytest.raises(RolloutsError, match=said):
            read_back(experts_TLK)
    silent = rollout_of("a", 0, provenance=np.zeros(4, np.int8), turns=[], status="unasked")
    write_rollouts(tmp_path, 1, [Group("a", [silent])])
    assert read_rollouts(tmp_path, 1, limits)[0].rollouts[0].routed_experts is None  # it asked nothing
    for experts_TLK, other, said in (
        (None, limits, "None, and should have"),
        (kept, replace(limits, experts=None), "algorithm.routing was not 'replay'"),
    ):
        with pytest.raises(RolloutsError, match=said):
            read_back(experts_TLK, other)


@pytest.mark.parametrize(
    ("turns", "said"),
    [
        ([Turn(2, 4, "stop")], ""),
        ([], "token 2 before its first answer"),
        ([Turn(3, 4, "stop")], "token 2 before its first answer"),
        ([Turn(3, 4, "stop"), Turn(2, 3, "stop")], "answers in another order"),
    ],
)
def test_what_was_penalized_has_a_context(tmp_path, turns, said):
    rollout = rollout_of("a", 0, turns=turns, penalties=Penalties(1.1))
    write_rollouts(tmp_path, 1, [Group("a", [rollout])])
    if not said:
        assert read_rollouts(tmp_path, 1)[0].rollouts[0].penalties == Penalties(1.1)
        return
    with pytest.raises(RolloutsError, match=said):
        read_rollouts(tmp_path, 1)


def test_a_forced_closing_belongs_to_a_budget(tmp_path):
    columns = dict(tokens=np.array([5, 6, 8, 2, 7], np.int32), provenance=np.array([0, 0, 1, 4, 1], np.int8))
    rollout = rollout_of("a", 1, **columns)
    write_rollouts(tmp_path, 1, [Group("a", [rollout])])
    assert np.array_equal(read_rollouts(tmp_path, 1)[0].rollouts[0].provenance, rollout.provenance)
    assert len(read_rollouts(tmp_path, 1, Limits(99, 64, Decoding(thinking_budget=1), ThinkingTags(6, 2)))) == 1
    with pytest.raises(RolloutsError, match="a sample 1 has a closing of thinking that was forced, and rollout.think"):
        read_rollouts(tmp_path, 1, Limits(99, 64, Decoding()))
    plain = rollout_of("a", 0)
    assert thinking_metrics([rollout, plain]) == {"thinking_closed": 0.5}
    assert sampling_metrics([Group("a", [plain])], 0, thinking_budget=8)["thinking_closed"] == 0.0
    assert "thinking_closed" not in sampling_metrics([Group("a", [plain])], 0)


@pytest.mark.parametrize(
    ("tokens", "provenance", "said"),
    [
        ([5, 6, 8, 2, 7], [0, 0, 1, 4, 1], ""),
        ([5, 6, 8, 2, 7], [0, 0, 1, 1, 1], "token 3 was forced, and is not marked so"),
        ([5, 6, 8, 2, 7], [0, 0, 4, 4, 4], "token 2 is marked as forced, and was not"),
        ([5, 6, 8, 2, 7], [0, 4, 1, 4, 1], "token 1 is marked as forced, and was not"),  # in no answer
        ([5, 7, 8, 2, 7], [0, 0, 1, 4, 1], "token 3 is marked as forced, and was not"),  # none was open
        ([5, 6, 8, 9, 7], [0, 0, 1, 1, 1], "goes on thinking beyond a budget of 1 tokens"),
    ],
)
def test_marks_of_forced_tokens_are_recomputed(tmp_path, tokens, provenance, said):
    columns = dict(tokens=np.array(tokens, np.int32), provenance=np.array(provenance, np.int8))
    write_rollouts(tmp_path, 1, [Group("a", [rollout_of("a", 1, **columns)])])
    limits = Limits(99, 64, Decoding(thinking_budget=1), ThinkingTags(6, 2))
    if not said:
        assert len(read_rollouts(tmp_path, 1, limits)) == 1
        return
    with pytest.raises(RolloutsError, match=said):
        read_rollouts(tmp_path, 1, limits)


@pytest.mark.parametrize("wrong", [Penalties(0.0), Penalties(float("nan")), Penalties(1.0, float("inf"))])
def test_penalties_of_no_distribution_are_refused(tmp_path, wrong):
    write_rollouts(tmp_path, 1, [Group("a", [rollout_of("a", 0, penalties=wrong)])])
    with pytest.raises(RolloutsError, match="are no penalties"):
        read_rollouts(tmp_path, 1)


@pytest.mark.parametrize(
    ("supports", "decoding", "said"),
    [
        (None, Decoding(stop=("a",)), ""),
        (None, Decoding(top_k=2), "a sample 0 has no sampling mask"),
        (None, Decoding(min_p=0.1), "a sample 0 has no sampling mask"),
        ([[], [], [2, 7], [3]], Decoding(top_k=2), ""),
        ([[], [], [2, 7], [3]], Decoding(), "a sample 0 has a sampling mask, and none of"),
        ([[], [], [2, 7], []], Decoding(top_k=2), "sampled from the whole vocabulary, and rollout.top_k = 2"),
        ([[], [], [], []], Decoding(top_k=2, top_p=0.9), "sampled from the whole vocabulary"),
        ([[], [], [2, 7], []], Decoding(top_p=0.9), ""),  # which may leave all
        (
            None,
            Decoding(presence_penalty=1.0),
            "was sampled with Penalties.*0.0\\), and .* Penalties.*presence=1.0",
        ),
    ],
)
def test_masks_are_those_of_the_decoding_settings(tmp_path, supports, decoding, said):
    mask = None if supports is None else SamplingMask.of([np.array(each, np.int32) for each in supports], 400)
    write_rollouts(tmp_path, 1, [Group("a", [rollout_of("a", 0, mask=mask)])])
    limits = Limits(400, 64, decoding)
    if not said:
        assert len(read_rollouts(tmp_path, 1, limits)) == 1
        return
    with pytest.raises(RolloutsError, match=said) as caught:
        read_rollouts(tmp_path, 1, limits)
    assert "\n" not in str(caught.value)

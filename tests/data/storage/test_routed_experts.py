"""Routed experts of tokens are joined, filled and checked."""

import numpy as np
import pytest

from titan_rl.data.storage.routed_experts import (
    ExpertShape,
    check_experts,
    compact,
    filled,
    is_recorded,
    joined_experts,
)

ONE = np.array([[[0, 1]], [[2, 3]]], np.uint8)


@pytest.mark.parametrize(("num_experts", "dtype"), [(8, np.uint8), (255, np.uint8), (256, np.uint16), (512, np.uint16)])
def test_the_dtype_has_a_number_that_is_no_expert(num_experts, dtype):
    compacted = compact(np.array([[[0, num_experts - 1]]]), num_experts)
    assert compacted.dtype == dtype and is_recorded(compacted).all()
    check_experts(compacted, ExpertShape((True,), num_experts, 2))


def test_parts_without_any_are_not_recorded():
    joined = joined_experts([None, ONE, None], [1, 2, 3])
    assert is_recorded(joined).tolist() == [False, True, True, False, False, False]
    assert np.array_equal(joined[1:3], ONE) and joined.dtype == ONE.dtype
    assert joined_experts([None, None], [1, 2]) is None


def test_the_first_pass_over_a_token_stays():
    first = filled(None, ONE, 3)
    assert is_recorded(first).tolist() == [True, True, False]
    later = filled(joined_experts([first, None], [3, 2]), np.full((4, 1, 2), [5, 6], np.uint8), 5)
    assert later[:, 0].tolist() == [[0, 1], [2, 3], [5, 6], [5, 6], [255, 255]]
    assert not is_recorded(first)[2], "it was not changed in place"


@pytest.mark.parametrize(
    ("experts", "said"), [([[4, 1]], "expert 4 of 4"), ([[1, 1]], "chosen twice"), ([[0, 0]], "chosen twice")]
)
def test_what_a_router_cannot_choose_is_refused(experts, said):
    check_experts(ONE, ExpertShape((True,), 4, 2))
    check_experts(np.array([[[0, 0], [1, 2]]], np.uint8), ExpertShape((False, True), 4, 2))
    with pytest.raises(ValueError, match=said):
        check_experts(np.array([experts], np.uint8), ExpertShape((True,), 4, 2))

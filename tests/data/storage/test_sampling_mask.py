"""Sampling masks: any sets of ids come back, in the fewest bytes, however tokens are taken and joined."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_rl.data.storage.sampling_mask import SamplingMask, joined


@st.composite
def supports(draw):
    vocabulary = draw(st.integers(1, 200))
    ids = st.sets(st.integers(0, vocabulary - 1)).map(lambda ids: np.array(sorted(ids), np.int32))
    return vocabulary, draw(st.lists(ids, max_size=12))


def kept(ids: np.ndarray, vocabulary: int) -> list[int]:
    return ids.tolist() if len(ids) else list(range(vocabulary))


@settings(max_examples=300, deadline=None)
@given(supports(), st.data())
def test_ids_come_back(made, data):
    vocabulary, ids = made
    mask = SamplingMask.of(ids, vocabulary)
    mask.check()
    assert [mask.kept(place).tolist() for place in range(len(mask))] == [kept(each, vocabulary) for each in ids]
    assert mask.num_kept.tolist() == [len(kept(each, vocabulary)) for each in ids]
    assert (mask.lengths <= mask.width).all() and (mask.lengths <= [4 * len(each) for each in ids]).all()
    places = np.array(data.draw(st.lists(st.integers(0, len(ids) - 1), max_size=8)) if ids else [], np.int64)
    assert mask.take(places).to_bytes() == SamplingMask.of([ids[place] for place in places], vocabulary).to_bytes()
    cut = data.draw(st.integers(0, len(ids)))
    parts = [SamplingMask.of(ids[:cut], vocabulary), None, SamplingMask.of(ids[cut:], vocabulary)]
    both = joined(parts, [cut, 2, len(ids) - cut])
    assert both.to_bytes() == [*mask.to_bytes()[:cut], b"", b"", *mask.to_bytes()[cut:]]
    again = SamplingMask.of_bytes(mask.to_bytes(), vocabulary)
    assert np.array_equal(again.bits(), mask.bits())
    unpacked = np.unpackbits(mask.bits(), axis=1, count=vocabulary, bitorder="little")
    assert [np.flatnonzero(row).tolist() for row in unpacked] == [kept(each, vocabulary) for each in ids]


def test_nothing_is_joined_of_nothing():
    assert joined([None, None], [3, 2]) is None


@pytest.mark.parametrize(
    "part",
    [b"abc", b"\0" * 40, np.array([5, 4], "<i4").tobytes(), np.array([-1], "<i4").tobytes()]
    + [np.array([300], "<i4").tobytes(), np.array([7, 7], "<i4").tobytes(), b"\1" * 39, b"\0" * 38],
    ids=["odd length", "too long", "descending", "negative", "beyond", "twice", "longer than bits", "no bit"],
)
def test_bytes_that_are_no_mask_are_refused(part):
    with pytest.raises(ValueError, match="the sampling mask of token 1 has"):
        SamplingMask.of_bytes([b"", part], 300).check()

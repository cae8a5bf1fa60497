"""Examples of clients as rows: each position is predicted with its own target, in whatever row it came to lie."""

import numpy as np
import pytest

from titan_rl.data.types import Layout
from titan_rl.service.rows import TrainingExample, pack_examples

_LENGTHS = (5, 1, 9, 3, 7, 2)


def _example(number: int, length: int) -> TrainingExample:
    places = 100 * number + np.arange(length)
    return TrainingExample(places, places + 1, places / 7, -places / 9, np.ones(length, np.float32))


@pytest.mark.parametrize("layout", [Layout(1, 9), Layout(2, 12), Layout(3, 9, row_multiple=2)])
def test_what_rows_give_comes_back_to_its_example(layout):
    examples = [_example(number, length) for number, length in enumerate(_LENGTHS)]
    packed = pack_examples(examples, layout)
    assert len(packed.rows) == layout.num_ranks
    assert len({len(rows) for rows in packed.rows}) == 1 and len(packed.rows[0]) % layout.row_multiple == 0
    assert all(len(row.tokens_T) <= layout.row_tokens for rows in packed.rows for row in rows)
    by_group = {
        group: {index: row.tokens_T[row.source_S] + row.target_S / 1000 for index, row in enumerate(rows)}
        for group, rows in enumerate(packed.rows)
    }
    for example, values in zip(examples, packed.logprobs(by_group), strict=True):
        np.testing.assert_allclose(values, example.tokens + example.targets / 1000)


def test_positions_begin_anew_and_segments_do_not_see_each_other():
    [row] = pack_examples([_example(0, 3), _example(1, 2)], Layout(1, 8)).rows[0]
    assert row.positions_T.tolist() == [0, 1, 2, 0, 1]
    assert [(segment.start, segment.length, segment.prefix) for segment in row.segments] == [(0, 3, ()), (3, 2, ())]
    assert row.branch_offsets.tolist() == [0, 3, 5]


def test_an_example_longer_than_a_row_is_refused():
    with pytest.raises(ValueError, match="has 9 tokens, and rows have room for 8"):
        pack_examples([_example(0, 3), _example(1, 9)], Layout(1, 8))

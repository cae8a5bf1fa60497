"""Examples of clients as rows: each position is predicted with its own target, in whatever row it came to lie."""

from dataclasses import replace

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


def _group(lengths: tuple[int, ...], prompt: int = 10) -> list[TrainingExample]:
    """Samples of one prompt: nothing is learned in the prompt, and its last token predicts each sample's own first."""
    examples = []
    for number, length in enumerate(lengths):
        full = np.concatenate([np.arange(prompt), 100 * (number + 1) + np.arange(length + 1)])
        coefficients = np.where(np.arange(len(full) - 1) < prompt - 1, 0, number + 1.0)
        nothing = np.zeros(len(full) - 1, np.float32)
        examples.append(TrainingExample(full[:-1], full[1:], coefficients, nothing, (coefficients != 0) + nothing))
    return examples


def test_samples_of_a_prompt_share_it_and_what_is_not_learned_there_is_computed_once():
    examples = _group((4, 0, 6))
    packed = pack_examples(examples, Layout(1, 64))
    [row] = packed.rows[0]
    assert len(row.tokens_T) == 10 + 4 + 6 and [segment.prefix for segment in row.segments][1:] == [((0, 10),)] * 2
    assert len(row.target_S) == 9 + 3 + 4 + 6  # the prompt once, then each sample's own
    values = {0: {0: row.positions_T[row.source_S] * 1000 + row.target_S}}
    for example, got in zip(examples, packed.logprobs(values), strict=True):
        np.testing.assert_array_equal(got, np.arange(len(example.tokens)) * 1000 + example.targets)
    weights = np.zeros(2000)
    np.add.at(weights, row.target_S, row.advantage_S)
    wanted = np.zeros(2000)
    for example in examples:
        np.add.at(wanted, example.targets, example.coefficients)
    np.testing.assert_array_equal(weights, wanted)


def test_a_loss_of_tokens_without_a_coefficient_counts_them_for_each_sample():
    examples = [replace(example, mask=np.ones_like(example.mask)) for example in _group((4, 6))]
    [row] = pack_examples(examples, Layout(1, 64), skips_zeros=False).rows[0]
    assert len(row.target_S) == sum(len(example.tokens) for example in examples)
    apart = pack_examples(examples, Layout(1, 64), share=False).rows[0]
    assert sum(len(each.tokens_T) for each in apart) == sum(len(example.tokens) for example in examples)


def test_a_group_that_is_longer_than_a_row_is_cut():
    packed = pack_examples(_group((8, 8, 8)), Layout(1, 26))
    assert sorted(len(row.tokens_T) for row in packed.rows[0]) == [18, 26]

"""Wilson's interval against published and recomputed values."""

import json

import pytest

from titan_rl.records.statistics import Proportion


@pytest.mark.parametrize(
    ("correct", "count", "low", "high"),
    [
        # Newcombe 1998, Statistics in Medicine 17, 857-872, table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_interval_agrees_with_the_literature(correct, count, low, high):
    assert Proportion(correct, count).interval == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize("count", [1, 7, 256])
def test_interval_solves_wilsons_equation_and_stays_within_0_and_1(count):
    for correct in range(count + 1):
        proportion = Proportion(correct, count)
        for bound in proportion.interval:
            assert -1e-12 <= bound <= 1 + 1e-12
            deviation = abs(bound - proportion.value)
            assert deviation == pytest.approx(1.959964 * (abs(bound * (1 - bound)) / count) ** 0.5, abs=1e-6)


def test_what_people_read():
    assert str(Proportion(1, 2)) == "50.0% (1 of 2, 95 % interval 9.5% to 90.5%)"
    assert str(Proportion(0, 105)) == "0.0% (0 of 105, 95 % interval 0.0% to 3.5%)", "and not -0.0%"
    assert Proportion(1, 4).as_dict() | {"interval_95": None} == {
        "accuracy": 0.25,
        "correct": 1,
        "count": 4,
        "interval_95": None,
    }


def test_answers_that_could_not_be_scored_in_time_are_told_and_kept():
    late = Proportion(1, 4, num_timeouts=3)
    assert str(late).endswith("; 3 of 4 could not be scored within verifier.score_timeout and count as wrong)")
    tied = Proportion(1, 4, num_ties=3)
    assert str(tied).endswith("; in 3 neither answer is preferred)")
    for each in (late, tied):
        assert Proportion.from_dict(json.loads(json.dumps(each.as_dict()))) == each

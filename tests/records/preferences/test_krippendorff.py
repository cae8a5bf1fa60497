"""Krippendorff's alpha beside his published examples, hand-computed cases, and coincidences counted pair by pair."""

from itertools import permutations

import numpy as np
import pytest

from titan_rl.records.preferences.krippendorff import nominal_alpha

TWO_OBSERVERS = ("0100000010", "1110010000")
FOUR_OBSERVERS = ("123321412...", "1233224125.3", ".3332342251.", "12332441251.")
"""K. Krippendorff, "Computing Krippendorff's Alpha-Reliability" (2011), sections A and C; a dot is a missing value."""


def units_of(observers) -> list[list[str]]:
    return [[value for value in unit if value != "."] for unit in zip(*observers, strict=True)]


def by_coincidences(units) -> float:
    """Alpha by the matrix of coincidences, pair by pair, as the paper counts."""
    values = sorted({value for unit in units for value in unit})
    coincidences = np.zeros((len(values), len(values)))
    for unit in units:
        for one, other in permutations(unit, 2):
            coincidences[values.index(one), values.index(other)] += 1 / (len(unit) - 1)
    n_c, n = coincidences.sum(0), coincidences.sum()
    observed = n - coincidences.trace()
    return 1 - (n - 1) * observed / (n * n - (n_c**2).sum())


def test_published_examples():
    assert nominal_alpha(units_of(TWO_OBSERVERS)) == pytest.approx(0.095, abs=5e-4)
    assert nominal_alpha(units_of(FOUR_OBSERVERS)) == pytest.approx(0.743, abs=5e-4)


def test_ties_are_a_value_of_their_own_by_hand():
    """Units aa, a-tie, tie-tie: n = 6, n_a = n_tie = 3. Observed 2, expected 36 - 9 - 9 = 18: alpha 1 - 2 * 5 / 18."""
    assert nominal_alpha([["a", "a"], ["a", "tie"], ["tie", "tie"]]) == pytest.approx(4 / 9)


def test_a_unit_that_one_person_judged_changes_nothing():
    units = [["a", "a"], ["a", "b"], ["b", "b"]]
    assert nominal_alpha([*units, ["b"], []]) == nominal_alpha(units)


def test_three_people_of_whom_one_differs_by_hand():
    """Units aab, bbb: n = 6, n_a = 2, n_b = 4. Observed (9 - 4 - 1) / 2 = 2, expected 36 - 4 - 16 = 16."""
    assert nominal_alpha([["a", "a", "b"], ["b", "b", "b"]]) == pytest.approx(1 - 2 * 5 / 16)


@pytest.mark.parametrize("units", [[], [["a"]], [["a", "a"], ["a", "a", "a"]]])
def test_alpha_is_undefined_without_pairs_or_without_two_values(units):
    assert nominal_alpha(units) is None


def test_it_is_that_of_coincidences_on_random_judgements():
    rng = np.random.default_rng(3)
    for _ in range(50):
        units = [list(rng.choice(["a", "b", "tie", "both_bad"], rng.integers(0, 5))) for _ in range(20)]
        paired = [unit for unit in units if len(unit) > 1]
        assert nominal_alpha(units) == pytest.approx(by_coincidences(paired), abs=1e-12)

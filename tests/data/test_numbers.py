"""Numbers that others say: finite ones are taken, and of all others one line is told."""

from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from titan_rl.data.numbers import as_float, finite


@pytest.mark.parametrize("value", [0, -3, 0.5, -0.0, 10**300, np.float64(2.5), 5e-324], ids=range(7))
def test_a_finite_number_is_taken(value):
    assert finite(value) == float(value) and type(finite(value)) is float


@pytest.mark.parametrize(
    "value",
    [10**400, -(10**4200), 10**5000, 1e400, -1e400, float("nan"), True, False, None, "1", "0.5", "1e400", [1], {}, 1j,
     Decimal("0.5"), Fraction(1, 2), np.bool_(True), b"1"],
    ids=range(19),
)  # fmt: skip
def test_what_is_none_is_told_in_one_line(value):
    with pytest.raises(ValueError, match="^[^\n]{1,140}: give a finite number$"):
        finite(value)


@pytest.mark.parametrize(
    ("value", "expected"), [(10**400, "inf"), (-(10**400), "-inf"), (Fraction(10**999, 3), "inf")], ids=range(3)
)
def test_what_no_float_holds_is_infinite(value, expected):
    assert str(as_float(value)) == expected

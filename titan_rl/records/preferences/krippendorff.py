"""Krippendorff's alpha for nominal values: agreement of several labellers about the same items. Pure.

K. Krippendorff, "Computing Krippendorff's Alpha-Reliability" (2011). With n_uc the number of labellers who gave
unit u the value c, m_u those who gave it any (units with one are left out), n_c = sum_u n_uc and n = sum_c n_c:

    observed disagreement   D_o = sum_u sum_{c != k} n_uc n_uk / (m_u - 1) / n
    expected by chance      D_e = sum_{c != k} n_c n_k / (n (n - 1))
    alpha                   1 - D_o / D_e:  1 is perfect, 0 is chance
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence


def nominal_alpha(units: Iterable[Sequence[Hashable]]) -> float | None:
    """Krippendorff's alpha. ``units``: the values that labellers gave each unit, without those that are missing.

    None where it is not defined: no unit has two values, or all values are the same.
    """
    paired = [Counter(values) for values in units if len(values) > 1]
    totals = sum(paired, Counter())
    n = totals.total()
    expected = _disagreement(totals)
    if not expected:
        return None
    observed = sum(_disagreement(counts) / (counts.total() - 1) for counts in paired)
    return 1.0 - observed * (n - 1) / expected


def _disagreement(counts: Counter) -> int:
    """Ordered pairs of values that differ: the square of their number less the pairs that are alike."""
    return counts.total() ** 2 - sum(count**2 for count in counts.values())

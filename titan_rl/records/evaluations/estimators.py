"""Estimators of repeated sampling: avg@n, pass@k, majority@n, with bootstrap intervals over questions.

Pure. Dimensions: N questions, n samples of each.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from titan_rl.data.seeds import named_seed
from titan_rl.records.statistics import wilson_interval

_RESAMPLES = 2000
_BOUNDS = (2.5, 97.5)
"""Percentiles of a two-sided 95 % interval."""


@dataclass(frozen=True)
class Estimate:
    """Mean over questions, with its 95 % interval."""

    value: float
    low: float
    high: float


def pass_at(k: int, num_samples: int, num_correct: int) -> float:
    """Unbiased probability that one of k samples is right, 1 - C(n - c, k) / C(n, k).

    Source: Chen et al. 2021, arXiv 2107.03374, equation 1. Exact integers, one rounding at the end.
    """
    assert 1 <= k <= num_samples and 0 <= num_correct <= num_samples, "k of n samples, c of them right"
    subsets = math.comb(num_samples, k)
    return (subsets - math.comb(num_samples - num_correct, k)) / subsets


def majority_at(votes: Sequence[str | None], correct: Sequence[bool]) -> float:
    """Probability that the most frequent final answer is right, ties broken at random.

    ``votes``: final answer of each sample; None abstains. 0 if all abstain. A final answer counts as right by the share
    of its samples that are: some scorers read more than the final answer.
    """
    counts = Counter(vote for vote in votes if vote is not None)
    if not counts:
        return 0.0
    most = max(counts.values())
    winners = [vote for vote, count in counts.items() if count == most]
    right = Counter(vote for vote, is_right in zip(votes, correct, strict=True) if is_right)
    return sum(right[vote] for vote in winners) / (most * len(winners))


def estimate(values: Sequence[float], name: str) -> Estimate:
    """Mean of one value a question, each from 0 to 1. Interval: percentiles of means of resampled questions (Efron
    1979); where all are alike, and resampling tells nothing, Wilson's, of as many trials.

    ``name`` seeds the resampling, so that an evaluation read again has the same interval.
    """
    value_N = np.asarray(values, np.float64)
    if (value_N == value_N[0]).all():
        return Estimate(float(value_N[0]), *wilson_interval(float(value_N[0]), len(value_N)))
    random = np.random.RandomState(named_seed("bootstrap", name) % 2**32)
    means = [value_N[random.randint(len(value_N), size=len(value_N))].mean() for _ in range(_RESAMPLES)]
    low, high = np.percentile(means, _BOUNDS)
    return Estimate(float(value_N.mean()), float(low), float(high))

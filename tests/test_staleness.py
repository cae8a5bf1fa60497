"""The bound on staleness holds whoever is fast or slow, and nobody waits for ever."""

import random
from collections import deque

import pytest

from titan_rl.controller.admission import Admission


def simulate(seed: int, groups_per_step: int, max_staleness: int, start: int, num_steps: int = 30) -> list[int]:
    """The lag of each trained group, with admission at random moments and random discards, trained in order."""
    chance = random.Random(seed)
    admission = Admission(groups_per_step, max_staleness, start)
    in_flight: deque[int] = deque()
    lags: list[int] = []

    def admit(at_most: int) -> None:
        while admission.can_admit() and at_most:
            admission.admit()
            in_flight.append(version)
            at_most -= 1

    for version in range(start, start + num_steps):
        admission.advance(version)
        batch = 0
        while batch < groups_per_step:
            admit(chance.randrange(groups_per_step + 1))
            if not in_flight:
                assert admission.can_admit(), "nobody is in flight and nobody may be admitted"
                continue
            admitted_under = in_flight.popleft()
            if chance.random() < 0.2:
                admission.give_back()
                continue
            lags.append(version - admitted_under)
            batch += 1
        admit(chance.randrange(3 * groups_per_step))
    return lags


@pytest.mark.parametrize("start", [0, 7])
@pytest.mark.parametrize("max_staleness", [0, 1, 3])
@pytest.mark.parametrize("groups_per_step", [1, 4])
def test_no_group_lags_behind_the_bound(groups_per_step, max_staleness, start):
    lags = [lag for seed in range(20) for lag in simulate(seed, groups_per_step, max_staleness, start)]
    assert min(lags) >= 0
    assert max(lags) == max_staleness


def test_slots_are_those_of_the_next_steps():
    admission = Admission(groups_per_step=4, max_staleness=1, version=0)
    assert admission.num_free == 8
    for _ in range(8):
        admission.admit()
    assert not admission.can_admit()
    with pytest.raises(AssertionError):
        admission.admit()
    admission.give_back()
    assert admission.num_free == 1
    admission.advance(1)
    assert admission.num_free == 5


def test_on_policy_admits_one_batch_at_a_time():
    admission = Admission(groups_per_step=3, max_staleness=0, version=5)
    assert admission.num_free == 3

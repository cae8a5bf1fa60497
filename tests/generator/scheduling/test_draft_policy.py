"""When drafts are left out, by what steps with and without them took."""

from collections.abc import Callable

import pytest

from titan_rl.generator.draft_policy import DraftPolicy


def limits(policy: DraftPolicy, batch: int, seconds_of: Callable[[int], float], tokens_of: Callable[[int], int]):
    """What was set, over steps of an engine that takes so long and gains so many tokens with each number of drafts."""
    limit, found = 3, []
    for _ in range(2000):
        if change := policy.measured(batch, limit, seconds_of(limit), tokens_of(limit)):
            sizes, limit = change
            assert batch in sizes
        found.append(limit)
    return found


@pytest.mark.parametrize(("seconds", "tokens", "chosen"), [(1.1, 2, 3), (4.0, 2, 0), (1.0, 1, None)])
def test_the_faster_one_is_kept_and_the_other_one_tried_again(seconds, tokens, chosen):
    """Over a step without drafts, which takes a second and gains a token for each request."""
    found = limits(
        DraftPolicy(3), 8, lambda limit: seconds if limit else 1.0, lambda limit: 8 * (tokens if limit else 1)
    )
    if chosen is not None:
        assert found[200:].count(chosen) > 0.9 * len(found[200:])
        assert any(limit != chosen for limit in found[1000:]), "which may be the better one by now"
    assert {0, 3} == set(found[:64]), "both were measured"


def test_sizes_of_batches_are_measured_apart():
    """Drafts that cost time in a large batch may save it where few requests are left."""
    policy = DraftPolicy(3)
    large = limits(policy, 64, lambda limit: 4.0 if limit else 1.0, lambda limit: 64 * (2 if limit else 1))
    small = limits(policy, 2, lambda limit: 1.1 if limit else 1.0, lambda limit: 2 * (2 if limit else 1))
    assert large[-300:].count(0) > 250 and small[-300:].count(3) > 250


def test_a_change_of_what_is_accepted_is_followed():
    policy = DraftPolicy(3)
    limits(policy, 4, lambda limit: 1.2 if limit else 1.0, lambda limit: 4)
    found = limits(policy, 4, lambda limit: 1.2 if limit else 1.0, lambda limit: 4 * (3 if limit else 1))
    assert found[-300:].count(3) > 250


def test_a_step_that_was_begun_before_a_change_counts_for_nothing():
    policy = DraftPolicy(3)
    assert all(policy.measured(4, 0, 1.0, 4) is None for _ in range(100))


def test_few_steps_with_drafts_that_are_slow_count():
    """Most steps find nothing to draft, and take as long as without."""
    policy, limit, found = DraftPolicy(3), 3, []
    for number in range(1000):
        seconds = 3.0 if limit and number % 3 == 0 else 1.0
        if change := policy.measured(8, limit, seconds, 9 if limit else 8):
            _, limit = change
        found.append(limit)
    assert found[-300:].count(0) > 250

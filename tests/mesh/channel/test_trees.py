"""Who takes a version from whom: trainers send it once, nobody sends it twice, and the last host is not far behind."""

import pytest

from titan_rl.mesh.channel.relay.trees import (
    arrival_times,
    parents_of,
    parents_of_a_late_one,
    stripes,
    two_trees,
)

COUNTS = [*range(1, 40), 63, 64, 65, 255, 256, 1000, 1023, 1024]


@pytest.mark.parametrize("count", COUNTS)
def test_both_trees_reach_every_host_from_one_root(count):
    for tree in two_trees(count):
        assert tree.count(None) == 1
        for place in range(count):
            steps = 0
            while tree[place] is not None:
                place, steps = tree[place], steps + 1
            assert steps <= count.bit_length() - 1


@pytest.mark.parametrize("count", COUNTS)
def test_nobody_sends_more_than_the_model_and_trainers_send_it_once(count):
    """Of both trees together, in halves of the model."""
    sent = [0] * count
    from_trainers = 0
    for parents in parents_of(range(count)):
        for parent in parents:
            share = 2 // len(parents)
            if parent is None:
                from_trainers += share
            else:
                sent[parent] += share
    assert from_trainers == 2 and max(sent) <= 2


@pytest.mark.parametrize("count", COUNTS)
def test_who_hands_on_in_one_tree_does_not_in_the_other(count):
    first, second = ({parent for parent in tree if parent is not None} for tree in two_trees(count))
    assert not first & second


def test_processes_of_one_host_take_it_from_one_of_them():
    hosts = ["b", "a", "b", "c", "a", "b"]
    found = parents_of(hosts)
    assert [len(parents) for parents in found] == [2, 2, 1, 2, 1, 1]
    assert [found[place] for place in (2, 4, 5)] == [(0,), (1,), (0,)]
    assert parents_of([]) == [] and parents_of(["a", "a"]) == [(None,), (0,)]


def test_a_late_one_asks_its_host_first_and_else_two_others():
    assert parents_of_a_late_one("b", ["a", "b", "c"], 0) == (1,)
    assert parents_of_a_late_one("d", ["a", "b", "c"], 5) == (2, 0)
    assert parents_of_a_late_one("d", ["a"], 5) == (0,)
    assert parents_of_a_late_one("d", [], 5) == (None,)


@pytest.mark.parametrize("sizes", [[8] * 9, [8, 1] * 20, [1, 8] * 20, [100, *[1] * 50], [], [3]])
def test_stripes_have_about_as_many_bytes(sizes):
    totals = [0, 0]
    for size, stripe in zip(sizes, stripes(sizes), strict=True):
        totals[stripe] += size
    assert abs(totals[0] - totals[1]) <= max(sizes, default=0)


@pytest.mark.parametrize("hosts", [1, 2, 4, 8, 64, 1024])
@pytest.mark.parametrize("blocks", [128, 512])
def test_the_last_host_is_not_far_behind_the_first(hosts, blocks):
    """Also where a block is under way for a while: 512 of 8 MiB are 4 GiB, a block takes 0.7 ms at 100 Gbit/s."""
    for latency in (0.0, 0.5):
        one = blocks + latency
        assert max(arrival_times(hosts, blocks, latency)) <= 1.5 * one


def test_arrival_times_are_those_of_links_that_send_one_block_at_a_time():
    assert arrival_times(1, 10) == [10.0]
    first, second = arrival_times(2, 4)
    # each root has its stripe by the fourth unit, and hands its last block on in the next
    assert (first, second) == (5.0, 4.0)

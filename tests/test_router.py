"""Groups go to the least busy replica, and never to one that is out."""

import pytest

from titan_rl.mesh.router import NoReplicaLeft, Router


def test_the_least_busy_is_chosen():
    router = Router(2)
    with router.choose() as first, router.choose() as second:
        assert {first, second} == {0, 1}
        with router.choose() as third:
            assert third == 0
    with router.choose() as again:
        assert again == 0


def test_one_that_is_out_gets_nothing():
    router = Router(3)
    router.take_out(0, "it failed")
    with router.choose() as one, router.choose() as two, router.choose() as three:
        assert {one, two, three} == {1, 2}
    assert router.healthy == [1, 2]


def test_the_last_one_out_is_an_error_that_tells_all_reasons():
    router = Router(2)
    router.take_out(1, "died")
    with pytest.raises(NoReplicaLeft, match="replica 0: hung; replica 1: died"):
        router.take_out(0, "hung")
    with pytest.raises(NoReplicaLeft), router.choose():
        pass


def test_the_first_reason_stays():
    router = Router(2)
    router.take_out(0, "first")
    router.take_out(0, "second")
    with pytest.raises(NoReplicaLeft, match="replica 0: first"):
        router.take_out(1, "x")


def test_a_group_that_failed_frees_its_place():
    router = Router(2)
    with pytest.raises(ValueError), router.choose():
        raise ValueError
    with router.choose() as replica:
        assert replica == 0

"""Groups go to the least busy, and never to one that is out."""

import asyncio

import pytest

from titan_rl.mesh.members.router import NoneLeft, Router
from titan_rl.mesh.processes.deadlines import DeadlineError


def test_the_least_busy_is_chosen():
    async def run():
        router = Router("generator", range(2))
        async with router.choose(1) as first, router.choose(1) as second:
            assert {first, second} == {0, 1}
            async with router.choose(1) as third:
                assert third == 0
        async with router.choose(1) as again:
            assert again == 0

    asyncio.run(run())


def test_one_that_is_out_gets_nothing_until_it_is_in_again():
    async def run():
        router = Router("generator", range(2))
        router.take_out(0, "it failed")
        async with router.choose(1) as one, router.choose(1) as two:
            assert (one, two) == (1, 1) and router.healthy == [1]
            router.put_in(0)
            async with router.choose(1) as three:
                assert three == 0

    asyncio.run(run())


def test_all_out_is_waited_for():
    async def run():
        router = Router("generator", range(1))
        router.take_out(0, "died")
        asyncio.get_running_loop().call_later(0.05, router.put_in, 0)
        async with router.choose(5) as number:
            assert number == 0
        router.take_out(0, "died again")
        with pytest.raises(DeadlineError, match="generator 0: died again"):
            async with router.choose(0.05):
                pass

    asyncio.run(run())


def test_all_given_up_is_an_error_that_tells_all_reasons():
    async def run():
        router = Router("generator", range(2))
        router.give_up(1, "hung")
        router.take_out(0, "died")
        asyncio.get_running_loop().call_later(0.05, router.give_up, 0, "its replacements failed")
        with pytest.raises(NoneLeft, match="generator 0: died; its replacements failed; generator 1: hung"):
            async with router.choose(5):
                pass

    asyncio.run(run())


def test_a_group_that_failed_frees_its_place():
    async def run():
        router = Router("generator", range(2))
        with pytest.raises(ValueError):
            async with router.choose(1):
                raise ValueError
        async with router.choose(1) as number:
            assert number == 0

    asyncio.run(run())


def test_members_come_and_go():
    async def run():
        router = Router("generator", range(1))
        router.add(1)
        assert router.members == [0, 1] and router.healthy == [0]
        router.put_in(1)
        async with router.choose(1), router.choose(1) as other:
            assert other == 1
            router.remove(1)  # what it has been given may end
            async with router.choose(1) as third:
                assert third == 0
        assert router.members == [0]

    asyncio.run(run())


def test_faults_without_a_group_between_them_end_it():
    async def run():
        router = Router("generator", range(1))

        def fail(times: int) -> None:
            for _ in range(times):
                router.take_out(0, "it raised")
                router.put_in(0)

        fail(11)
        router.worked()
        fail(11)
        async with router.choose(1):
            pass
        fail(1)
        with pytest.raises(NoneLeft, match="12 faults without a group between them: generator 0: it raised"):
            async with router.choose(1):
                pass

    asyncio.run(run())


def test_a_group_waits_for_room_unless_it_is_under_way():
    async def run():
        router = Router("generator", range(2), most_samples=lambda number: 6)
        async with router.choose(1, samples=4) as one, router.choose(1, samples=8) as two:
            assert {one, two} == {0, 1}, "a large one has an engine for itself"
            async with router.choose(1, samples=2) as third, router.choose(1, samples=4, is_under_way=True) as fourth:
                assert (third, fourth) == (one, one)
                waiting = asyncio.ensure_future(router.choose(1, samples=1).__aenter__())
                await asyncio.sleep(0)
                assert router.is_crowded and not waiting.done() and not router.runs_at_once(0, 6)
            assert await waiting == one and not router.is_crowded
            assert router.runs_at_once(1, 6) and not router.runs_at_once(2, 6), "beside 5 and 8"

    asyncio.run(run())


def test_one_that_rests_keeps_its_groups_and_gets_no_other():
    async def run():
        router = Router("generator", range(2))
        async with router.choose(1) as first:
            router.rest(first)
            async with router.choose(1) as other:
                assert other != first
            router.take_out(other, "died")
            waiting = asyncio.ensure_future(router.choose(0.05).__aenter__())
            await asyncio.sleep(0.1)
            assert router.is_crowded and not waiting.done(), "one that rests may come at any time"
            router.resume(first)
            assert await waiting == first
            router.rest(first)
            router.take_out(first, "died, too")
            with pytest.raises(DeadlineError, match=f"generator {other}: died"):
                async with router.choose(0.05):
                    pass
        router.rest(first)
        router.put_in(first)
        assert router.healthy == [first], "another has come in its place"

    asyncio.run(run())

"""A wait that ends too late says what it waited for."""

import asyncio

import pytest

from titan_rl.mesh.processes.deadlines import DeadlineError, within


async def never():
    await asyncio.Event().wait()


async def fail(error: Exception):
    raise error


def test_result_in_time():
    async def seven():
        await asyncio.sleep(0)
        return 7

    assert asyncio.run(within(5, "seven", seven())) == 7


def test_deadline_names_what_it_waits_for():
    with pytest.raises(DeadlineError, match=r"generator 3 pulling version 12 did not end within 0.01 s"):
        asyncio.run(within(0.01, "generator 3 pulling version 12", never()))


def test_what_is_waited_for_is_cancelled():
    cancelled = []

    async def watched():
        try:
            await never()
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    with pytest.raises(DeadlineError):
        asyncio.run(within(0.01, "it", watched()))
    assert cancelled


@pytest.mark.parametrize("error", [ValueError("broken"), TimeoutError("a timeout of its own")])
def test_failures_in_time_come_through_as_they_are(error):
    with pytest.raises(type(error), match=str(error)):
        asyncio.run(within(5, "it", fail(error)))


def test_futures_can_be_waited_for():
    async def run():
        future = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(future.set_result, 7)
        return await within(5, "it", future)

    assert asyncio.run(run()) == 7

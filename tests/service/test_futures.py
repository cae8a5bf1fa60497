"""Requests under way: done once however often they are posted, their answers kept until they are fetched."""

import asyncio
from collections.abc import Callable

import pytest

from titan_rl.service import clients, futures
from titan_rl.service.clients import Model
from titan_rl.service.futures import Answer, Busy, Failed, Futures, Unknown
from titan_rl.service.wire.reading import BadRequest


def _futures() -> tuple[Futures, list[str]]:
    said: list[str] = []
    return Futures(lambda line, error: said.append(line)), said


def test_a_request_that_comes_twice_is_done_once():
    async def check() -> None:
        requests, _ = _futures()
        count = 0

        async def work() -> Answer:
            nonlocal count
            count += 1
            await asyncio.sleep(0)
            return Answer(b"done")

        for _ in range(3):
            requests.begin("a:1", "a", work)
        answers = await asyncio.gather(*(requests.result("a:1", 5) for _ in range(3)))
        requests.begin("a:1", "a", work)
        assert [answer and answer.body for answer in answers] == [b"done"] * 3
        assert count == 1

    asyncio.run(check())


def test_whose_fault_it_was_is_told_and_only_ours_is_heard_of():
    async def check() -> None:
        requests, said = _futures()

        async def wrong() -> Answer:
            raise BadRequest("a token too many")

        async def broken() -> Answer:
            raise RuntimeError("a rank died")

        requests.begin("wrong", "a", wrong)
        requests.begin("broken", "a", broken)
        for name, is_clients in (("wrong", True), ("broken", False)):
            with pytest.raises(Failed) as failed:
                await requests.result(name, 5)
            assert failed.value.is_clients is is_clients
        assert said == ["request broken: RuntimeError: a rank died"]

    asyncio.run(check())


def test_an_answer_that_is_not_there_yet_is_none_and_one_of_nobody_unknown():
    async def check() -> None:
        requests, _ = _futures()
        gate = asyncio.Event()

        async def work() -> Answer:
            await gate.wait()
            return Answer(b"late")

        requests.begin("a", "session", work)
        assert await requests.result("a", 0) is None
        gate.set()
        answer = await requests.result("a", 5)
        assert answer is not None and answer.body == b"late"
        await requests.end_session("session")
        for name in ("a", "b"):
            with pytest.raises(Unknown):
                await requests.result(name, 0)

    asyncio.run(check())


def _at(model: Model, requests: Futures, order: list[int], gate: asyncio.Event | None = None) -> Callable[[int], None]:
    """Begins a model's request of a number, which writes it into ``order`` once it is done."""

    def begin(number: int) -> None:
        async def work() -> Answer:
            if gate is not None:
                await gate.wait()
            order.append(number)
            return Answer(b"")

        requests.begin(f"m:{number}", "s", work, model.turn(number))

    return begin


def test_a_models_requests_are_done_in_the_order_of_their_numbers():
    async def check() -> None:
        requests, _ = _futures()
        order: list[int] = []
        begin = _at(Model("m", "s", 8), requests, order)
        for number in (3, 1, 0, 2):
            begin(number)
        await requests.result("m:3", 5)
        assert order == [0, 1, 2, 3]

    asyncio.run(check())


@pytest.mark.parametrize("later", [False, True])
def test_one_that_is_cancelled_before_its_turn_holds_up_no_other(later):
    """``later``: not in the moment in which it has come."""

    async def check() -> None:
        requests, _ = _futures()
        order: list[int] = []
        begin = _at(Model("m", "s", 8), requests, order)
        for number in (1, 2, 3):
            begin(number)
        await asyncio.sleep(0.01 if later else 0)
        requests.cancel("m:1")
        requests.cancel("m:2")
        begin(0)
        await requests.result("m:3", 5)
        with pytest.raises(Failed, match="cancelled"):
            await requests.result("m:1", 5)
        assert order == [0, 3]

    asyncio.run(check())


def test_what_has_begun_in_its_turn_is_done_to_its_end():
    async def check() -> None:
        requests, _ = _futures()
        order: list[int] = []
        gate = asyncio.Event()
        begin = _at(Model("m", "s", 8), requests, order, gate)
        begin(0)
        begin(1)
        await asyncio.sleep(0.01)
        ending = asyncio.create_task(requests.end_session("s"))
        await asyncio.sleep(0.01)
        assert not ending.done()
        gate.set()
        await ending
        assert order == [0]

    asyncio.run(check())


def test_one_that_waits_for_a_number_that_never_comes_says_so(monkeypatch):
    """And one before it that takes long is not missing."""
    monkeypatch.setattr(clients, "_GAP_SECONDS", 0.02)

    async def check() -> None:
        requests, _ = _futures()
        order: list[int] = []
        gate = asyncio.Event()
        begin = _at(Model("m", "s", 8), requests, order, gate)
        for number in (0, 1, 3):
            begin(number)
        assert await requests.result("m:1", 0.1) is None
        gate.set()
        await requests.result("m:1", 5)
        with pytest.raises(Failed, match="request 3 waits for 2, which was refused or never came"):
            await requests.result("m:3", 5)
        assert order == [0, 1]

    asyncio.run(check())


def test_a_number_has_one_turn():
    async def check() -> None:
        model = Model("m", "s", 8)
        async with model.turn(0):
            with pytest.raises(BadRequest, match="request 0 of this model came before"):
                async with model.turn(0):
                    pass
        with pytest.raises(BadRequest, match="came before"):
            async with model.turn(0):
                pass

    asyncio.run(check())


def test_what_nobody_fetches_is_bounded_and_of_what_was_fetched_the_oldest_goes_first(monkeypatch):
    monkeypatch.setattr(futures, "MOST_UNDER_WAY", 3)
    monkeypatch.setattr(futures, "_MOST_BYTES", 10)

    async def check() -> None:
        requests, _ = _futures()

        async def work() -> Answer:
            return Answer(b"12345")

        for name in ("a", "b", "c"):
            requests.begin(name, "s", work)
        with pytest.raises(Busy):
            requests.begin("d", "s", work)
        for name in ("a", "b", "c"):
            await requests.result(name, 5)
        with pytest.raises(Unknown):
            await requests.result("a", 0)
        assert await requests.result("c", 0) is not None

    asyncio.run(check())

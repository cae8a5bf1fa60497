"""Requests under way: done once however often they are posted, their answers kept until they are fetched."""

import asyncio

import pytest

from titan_rl.service import futures
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
        assert (count, requests.num_repeated) == (1, 3)

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
        requests.end_session("session")
        for name in ("a", "b"):
            with pytest.raises(Unknown):
                await requests.result(name, 0)

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

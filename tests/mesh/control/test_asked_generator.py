"""Requests of a group under way go on at another generator if theirs dies, each answered once."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from monarch.actor import ActorError

from titan_rl.data.types import Request, RequestRefused
from titan_rl.mesh.members import asked_generator
from titan_rl.mesh.members.asked_generator import AskedGenerator, ReplicaFailed


class Generator:
    """An actor's stand-in: it answers once it may, or raises."""

    def __init__(self, name: str):
        self.name, self.requests = name, []
        self.outcome: asyncio.Future = asyncio.get_running_loop().create_future()
        self.ids, self.aborted = [], []
        self.generate = SimpleNamespace(call_one=self._call)
        self.abort = SimpleNamespace(call_one=self._abort)

    async def _call(self, request: Request):
        name = chr(request.tokens[0])
        self.requests.append(name)
        self.ids.append(request.id)
        return [f"{await asyncio.shield(self.outcome)} of {name}"]

    async def _abort(self, request_id):
        self.aborted.append(request_id)


def ask_for(name: str) -> Request:
    return Request(np.asarray([ord(name)]), [1], 4, 1.0)


@pytest.fixture
def generators(monkeypatch):
    there: dict[bytes, Generator] = {}
    monkeypatch.setattr(asked_generator, "actor_of", lambda reference: there[reference])
    monkeypatch.setattr(asked_generator, "_NEWS_SECONDS", 0.05)
    return there


def run(generators, play, patience: float = 20.0):
    async def main():
        generators.update({name: Generator(name.decode()) for name in (b"a", b"b")})
        return await play(AskedGenerator(b"a", patience), generators[b"a"], generators[b"b"])

    return asyncio.run(asyncio.wait_for(main(), 30))


def died() -> ActorError:
    return ActorError(RuntimeError("gone"), "a")


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize("is_known", [False, True], ids=["it hangs", "it is known to be gone"])
def test_requests_under_way_and_later_ones_go_to_the_next(generators, is_known):
    async def play(asked, one, other):
        works = [asyncio.ensure_future(asked.ask(ask_for(name))) for name in ("1", "2")]
        await settled()
        if is_known:
            one.outcome.set_exception(died())
        asked.move(None)
        works.append(asyncio.ensure_future(asked.ask(ask_for("3"))))
        await settled()
        assert not any(work.done() for work in works) and not other.requests
        asked.move(b"b")
        other.outcome.set_result("answer")
        assert await asyncio.gather(*works) == [[f"answer of {name}"] for name in ("1", "2", "3")]
        assert one.requests == ["1", "2"] and sorted(other.requests) == ["1", "2", "3"]
        assert not one.aborted and not other.aborted, "the one is dead"

    run(generators, play)


@pytest.mark.parametrize("why", ["moved", "cancelled"])
def test_a_generator_that_lives_is_told_what_nobody_waits_for(generators, why):
    async def play(asked, one, other):
        work = asyncio.ensure_future(asked.ask(ask_for("1")))
        await settled()
        if why == "moved":
            asked.move(b"b")
            other.outcome.set_result("answer")
            assert await work == ["answer of 1"]
        else:
            work.cancel()
            await asyncio.wait({work})
        await settled()
        assert one.aborted == one.ids and len(one.ids) == 1 and not other.aborted

    run(generators, play)


def test_what_was_answered_is_not_asked_again(generators):
    async def play(asked, one, other):
        one.outcome.set_result("answer")
        assert await asked.ask(ask_for("1")) == ["answer of 1"]
        asked.move(b"b")
        other.outcome.set_result("another")
        assert await asked.ask(ask_for("2")) == ["another of 2"]
        assert (one.requests, other.requests) == (["1"], ["2"])

    run(generators, play)


def test_a_death_late_in_a_group_is_waited_for_as_long(generators):
    async def play(asked, one, other):
        await asyncio.sleep(0.3)
        asked.move(None)
        work = asyncio.ensure_future(asked.ask(ask_for("1")))
        await settled()
        asked.move(b"b")
        other.outcome.set_result("answer")
        assert await work == ["answer of 1"]

    run(generators, play, patience=0.2)


def test_a_request_that_is_refused_goes_nowhere_else(generators):
    async def play(asked, one, other):
        one.outcome.set_exception(ActorError(RequestRefused("token 99"), "a"))
        with pytest.raises(ReplicaFailed) as caught:
            await asked.ask(ask_for("1"))
        assert caught.value.is_request_refused

    run(generators, play)


@pytest.mark.parametrize("end", ["no news", "ended", "none comes"])
def test_without_another_generator_the_group_fails(generators, end):
    async def play(asked, one, other):
        work = asyncio.ensure_future(asked.ask(ask_for("1")))
        await settled()
        if end == "no news":
            one.outcome.set_exception(died())
        else:
            asked.move(None)
            if end == "ended":
                asked.end()
        with pytest.raises(ReplicaFailed) as caught:
            await work
        assert not caught.value.is_request_refused and not other.requests

    run(generators, play, patience=0.2)


@pytest.mark.parametrize("hangs", [False, True])
def test_one_that_sleeps_is_waited_for_and_one_that_hangs_awake_is_not(generators, hangs):
    async def play(asked, one, other):
        awake = [0.0]
        one.seconds_awake = SimpleNamespace(call_one=lambda: result(awake[0]))
        work = asyncio.ensure_future(asked.ask(ask_for("1")))
        await asyncio.sleep(0.2)
        assert not work.done()
        if hangs:
            awake[0] = 60.0
            with pytest.raises(ReplicaFailed) as failed:
                await work
            assert "did not end within 0.05 s" in str(failed.value.__cause__)
        else:
            one.outcome.set_result("answer")
            assert await work == ["answer of 1"]

    run(generators, play, patience=0.05)


async def result(value: float) -> float:
    return value

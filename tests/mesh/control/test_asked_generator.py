"""Requests of a group under way go on at another generator if theirs dies, each answered once."""

import asyncio
from types import SimpleNamespace

import pytest
from monarch.actor import ActorError

from titan_rl.data.types import RequestRefused
from titan_rl.mesh.members import asked_generator
from titan_rl.mesh.members.asked_generator import AskedGenerator, ReplicaFailed


class Generator:
    """An actor's stand-in: it answers once it may, or raises."""

    def __init__(self, name: str):
        self.name, self.requests = name, []
        self.outcome: asyncio.Future = asyncio.get_running_loop().create_future()
        self.generate = SimpleNamespace(call_one=self._call)

    async def _call(self, request):
        self.requests.append(request)
        return [f"{await asyncio.shield(self.outcome)} of {request}"]


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
        works = [asyncio.ensure_future(asked.ask(request)) for request in ("first", "second")]
        await settled()
        if is_known:
            one.outcome.set_exception(died())
        asked.move(None)
        works.append(asyncio.ensure_future(asked.ask("third")))
        await settled()
        assert not any(work.done() for work in works) and not other.requests
        asked.move(b"b")
        other.outcome.set_result("answer")
        assert await asyncio.gather(*works) == [[f"answer of {name}"] for name in ("first", "second", "third")]
        assert one.requests == ["first", "second"] and sorted(other.requests) == ["first", "second", "third"]

    run(generators, play)


def test_what_was_answered_is_not_asked_again(generators):
    async def play(asked, one, other):
        one.outcome.set_result("answer")
        assert await asked.ask("first") == ["answer of first"]
        asked.move(b"b")
        other.outcome.set_result("another")
        assert await asked.ask("second") == ["another of second"]
        assert (one.requests, other.requests) == (["first"], ["second"])

    run(generators, play)


def test_a_death_late_in_a_group_is_waited_for_as_long(generators):
    async def play(asked, one, other):
        await asyncio.sleep(0.3)
        asked.move(None)
        work = asyncio.ensure_future(asked.ask("first"))
        await settled()
        asked.move(b"b")
        other.outcome.set_result("answer")
        assert await work == ["answer of first"]

    run(generators, play, patience=0.2)


def test_a_request_that_is_refused_goes_nowhere_else(generators):
    async def play(asked, one, other):
        one.outcome.set_exception(ActorError(RequestRefused("token 99"), "a"))
        with pytest.raises(ReplicaFailed) as caught:
            await asked.ask("first")
        assert caught.value.is_request_refused

    run(generators, play)


@pytest.mark.parametrize("end", ["no news", "ended", "none comes"])
def test_without_another_generator_the_group_fails(generators, end):
    async def play(asked, one, other):
        work = asyncio.ensure_future(asked.ask("first"))
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
        work = asyncio.ensure_future(asked.ask("first"))
        await asyncio.sleep(0.2)
        assert not work.done()
        if hangs:
            awake[0] = 60.0
            with pytest.raises(ReplicaFailed) as failed:
                await work
            assert "did not end within 0.05 s" in str(failed.value.__cause__)
        else:
            one.outcome.set_result("answer")
            assert await work == ["answer of first"]

    run(generators, play, patience=0.05)


async def result(value: float) -> float:
    return value

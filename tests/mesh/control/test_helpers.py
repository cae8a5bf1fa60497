"""Helper generators have the trainer's devices while it waits, and never while it works. Actors are fakes."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace

import pytest
from waiting import eventually

from titan_rl.data.types import EngineStatistics
from titan_rl.mesh.control import colocation, helpers
from titan_rl.mesh.control.generators import StartupGate
from titan_rl.mesh.control.helpers import HelperTurns
from titan_rl.mesh.members.replica import Replica
from titan_rl.mesh.members.router import Router
from titan_rl.mesh.supervision.actor_process import ActorDied
from titan_rl.mesh.supervision.calls import Deadline
from titan_rl.mesh.supervision.remote_call import RemoteCall
from titan_rl.mesh.telemetry.step_record import StepRecord

HELPER = 1


class FakeTrainers:
    def __init__(self, log: list[str]):
        died = asyncio.get_running_loop().create_future()
        self.log, self.ranks, self.is_dead = log, [SimpleNamespace(name="trainer rank 0", why="died", died=died)], False

    async def call(self, request: RemoteCall, *, what: str) -> None:
        self.log.append(request.endpoint)
        if self.is_dead:
            raise ActorDied(self.ranks, what)


class FakeLink:
    def __init__(self, log: list[str]):
        self.log, self.version, self.published, self.fails, self.hangs = log, 3, 3, False, False
        self.lock = asyncio.Lock()

    def undisturbed(self) -> asyncio.Lock:
        return self.lock

    async def update(self, replica: Replica) -> EngineStatistics:
        self.log.append(f"{replica.number} wakes")
        if self.fails:
            raise OSError("no memory")
        if self.hangs:
            await asyncio.Event().wait()
        return EngineStatistics()


class Scene:
    """A run whose generator 0 is full, with generator 1 on the trainer's device."""

    def __init__(self, monkeypatch):
        self.log: list[str] = []
        self.trainers, self.link = FakeTrainers(self.log), FakeLink(self.log)
        self.router, self.replica = (
            Router("generator", range(1), most_samples=lambda number: 4),
            Replica(HELPER, ranks=[self.trainers.ranks[0]]),
        )
        self.generators = SimpleNamespace(
            router=self.router,
            replicas={HELPER: self.replica},
            helpers=range(1, 2),
            helper_gate=StartupGate(),
            start_helpers=self.start_helpers,
            config=SimpleNamespace(generator=SimpleNamespace(max_num_seqs=4)),
            fail=lambda number, why: self.log.append(f"{number} {why}"),
            log=self.log.append,
        )
        self.turns = HelperTurns(self.trainers, self.generators, self.link, 1.0, StepRecord())

        async def call(process, request: RemoteCall, *, seconds: float, what: str) -> EngineStatistics:
            self.log.append(request.endpoint)
            return EngineStatistics(num_tokens=7)

        for module in (colocation, helpers):
            monkeypatch.setattr(module, "call", call)

    async def start_helpers(self) -> None:
        self.router.add(HELPER)
        self.router.put_in(HELPER)
        self.log.append("helpers start")

    def sampled(self) -> asyncio.Task[int]:
        """A group of 4 samples; the number of the generator that it comes to."""

        async def sample() -> int:
            async with self.router.choose(5, samples=4) as number:
                return number

        return asyncio.ensure_future(sample())


def play(monkeypatch, act: Callable[[Scene], Awaitable[None]]) -> None:
    async def run():
        scene = Scene(monkeypatch)
        await scene.turns.begin()
        await scene.turns.start()
        await scene.turns.take()
        assert scene.log == ["offload", "helpers start", "sleep", "take_statistics", "onload"]
        del scene.log[:]
        watching = asyncio.ensure_future(scene.turns.watch())
        async with scene.router.choose(5, samples=4):
            await act(scene)
        watching.cancel()

    asyncio.run(asyncio.wait_for(run(), 60))


async def a_while() -> None:
    await asyncio.sleep(3 * helpers._LOOK_SECONDS)


def test_devices_are_lent_while_the_trainer_waits_and_a_group_wants_an_engine(monkeypatch):
    async def act(scene: Scene) -> None:
        group = scene.sampled()
        await a_while()
        assert not scene.log, "the trainer works"
        scene.turns.release()
        assert await group == HELPER
        assert scene.log == ["offload", "1 wakes"]
        await scene.turns.take()
        assert scene.log[2:] == ["sleep", "take_statistics", "onload"] and scene.router.healthy == [0]
        assert [(each.generator, each.num_tokens) for each in scene.turns.take_statistics()] == [(1, 14)]
        assert not scene.turns.take_statistics()
        await scene.turns.take()
        assert len(scene.log) == 5, "nothing was lent"

    play(monkeypatch, act)


def test_a_trainer_that_dies_while_helpers_start_ends_the_start_by_name(monkeypatch):
    """They would wait for its repair, which waits for them."""

    async def run():
        scene = Scene(monkeypatch)

        async def start_helpers() -> None:
            scene.trainers.ranks[0].died.set_result(0.0)
            await asyncio.Event().wait()

        scene.generators.start_helpers = start_helpers
        await scene.turns.begin()
        with pytest.raises(ActorDied, match="trainer rank 0 died while helper generators started"):
            await scene.turns.start()
        await scene.turns.take(dead=True)

    asyncio.run(asyncio.wait_for(run(), 10))


def test_a_helper_that_died_comes_back_where_no_other_generator_is_left(monkeypatch):
    async def act(scene: Scene) -> None:
        scene.router.give_up(0, "its replacements failed")
        scene.router.take_out(HELPER, "died asleep")
        del scene.generators.replicas[HELPER]

        async def bring() -> None:
            async with scene.generators.helper_gate.inside():
                scene.generators.replicas[HELPER] = scene.replica
                scene.router.put_in(HELPER)

        bringing, group = asyncio.ensure_future(bring()), scene.sampled()
        scene.turns.release()
        assert await group == HELPER
        await bringing
        assert scene.log == ["offload"]

    play(monkeypatch, act)


@pytest.mark.parametrize("why", ["nobody waits", "a version is on its way", "it takes long", "none is left"])
def test_they_are_not_lent_where_that_helps_nobody(monkeypatch, why):
    async def act(scene: Scene) -> None:
        group = None if why == "nobody waits" else scene.sampled()
        if why == "a version is on its way":
            scene.link.published += 1
        if why == "it takes long":
            scene.turns._seconds_to_lend = 1000.0
        if why == "none is left":
            scene.router.give_up(HELPER, "its replacements failed")
        scene.turns.release()
        await a_while()
        assert not scene.log
        if group is not None:
            group.cancel()

    play(monkeypatch, act)


def test_what_a_helper_holds_keeps_its_time_and_goes_on_where_it_was(monkeypatch):
    async def act(scene: Scene) -> None:
        deadline = Deadline(1000.0)
        deadline.at = 0.0
        with scene.replica.at_work(deadline, samples=4):
            await eventually(lambda: deadline.at > 0.0, "its time begins anew")
            scene.turns.release()
            await eventually(lambda: scene.log == ["offload", "1 wakes"], "it is lent")
            deadline.at = 0.0
            await a_while()
            assert not deadline.at, "it is awake"

    play(monkeypatch, act)


async def fallen_asleep(scene: Scene, worked: float, held: float) -> None:
    """With what a helper is at, after it has worked on that and the trainer has worked the time before, in seconds."""
    scene.turns.release()
    await eventually(lambda: scene.log == ["offload", "1 wakes"], "it is lent")
    scene.turns._seconds_worked = worked
    [group] = scene.replica.groups
    group.began = scene.turns._lent_since = time.monotonic() - held
    await scene.turns.take()


@pytest.mark.parametrize(
    ("worked", "held", "is_full", "moves"),
    [(90.0, 30.0, False, True), (30.0, 90.0, False, False), (90.0, 30.0, True, False)],
    ids=["the trainer works longer", "it would be done again for longer", "no engine has room"],
)
def test_a_group_that_sleeps_moves_where_an_engine_has_room_for_long_enough(monkeypatch, worked, held, is_full, moves):
    async def act(scene: Scene) -> None:
        moved = asyncio.get_running_loop().create_future()
        with scene.replica.at_work(Deadline(1000.0), samples=4, moved=moved):
            await fallen_asleep(scene, worked, held)
            await a_while()
            assert not moved.done(), "generator 0 is full"
            if not is_full:
                scene.router.add(2)
                scene.router.put_in(2)
            await a_while()
            assert moved.done() == moves

    play(monkeypatch, act)


def test_what_the_trainer_worked_is_measured_from_turn_to_turn(monkeypatch):
    async def act(scene: Scene) -> None:
        group = scene.sampled()
        scene.turns._asleep_since = time.monotonic() - 50.0
        scene.turns.release()
        assert await group == HELPER
        assert 50.0 <= scene.turns._seconds_worked < 60.0

    play(monkeypatch, act)


def test_a_call_that_comes_while_devices_are_lent_has_them_first(monkeypatch):
    async def act(scene: Scene) -> None:
        group = scene.sampled()
        async with scene.turns._lock:
            scene.turns.release()
            await a_while()
            taking = asyncio.ensure_future(scene.turns.take())
            await a_while()
        await taking
        assert not scene.log
        group.cancel()

    play(monkeypatch, act)


def test_a_helper_that_does_not_wake_up_is_replaced_and_gets_nothing(monkeypatch):
    async def act(scene: Scene) -> None:
        scene.link.fails, group = True, scene.sampled()
        scene.turns.release()
        failed = "1 did not wake up: no memory"
        await eventually(lambda: scene.log == ["offload", "1 wakes", failed], "it is ended")
        assert not group.done() and scene.router.healthy == [0]
        group.cancel()

    play(monkeypatch, act)


def test_a_trainer_that_dies_while_a_helper_reads_its_weights_has_its_device_soon(monkeypatch):
    async def act(scene: Scene) -> None:
        scene.link.hangs, group = True, scene.sampled()
        scene.turns.release()
        await eventually(lambda: scene.log == ["offload", "1 wakes"], "it is lent")
        taking = asyncio.ensure_future(scene.turns.take(dead=True))
        scene.trainers.ranks[0].died.set_result(0.0)
        await taking
        assert scene.log[2:] == ["sleep", "take_statistics"] and scene.router.healthy == [0]
        group.cancel()

    play(monkeypatch, act)


def test_a_trainer_that_dies_while_it_leaves_has_its_device_and_is_asked_anew(monkeypatch):
    async def act(scene: Scene) -> None:
        scene.trainers.is_dead, group = True, scene.sampled()
        scene.turns.release()
        await eventually(lambda: len(scene.log) == 2, "it is tried")
        assert scene.log[0] == "offload" and scene.log[1].startswith("the trainer's devices were not lent to helpers")
        await scene.turns.take(dead=True)
        scene.trainers.is_dead = False
        await scene.turns.take()
        assert scene.log[2:] == ["onload"], "ranks that live had left"
        scene.turns.release()
        assert await group == HELPER

    play(monkeypatch, act)

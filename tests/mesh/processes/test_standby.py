"""At most one process of a kind waits, and its state says how far it is. Processes are fakes."""

import asyncio
from types import SimpleNamespace

import pytest

from titan_rl.mesh.hosts.hosts import Host
from titan_rl.mesh.supervision.actor_process import ActorDied
from titan_rl.mesh.supervision.deaths import DeathHandlers
from titan_rl.mesh.supervision.standby import Standby, State


def remote(number: int) -> Host:
    return Host(f"host {number}", None, facts=SimpleNamespace(), number=number)


class FakeProcess:
    def __init__(self, name: str, prepare):
        self.name, self.pid, self.why, self.deaths, self.wakes = name, 0, "died", DeathHandlers(), set()
        self.died, self.host = asyncio.get_running_loop().create_future(), Host("controller", None)
        self.actor = SimpleNamespace(prepare=SimpleNamespace(call_one=prepare))

    @property
    def is_dead(self) -> bool:
        return self.died.done()

    def end(self) -> None:
        self.died.set_result(0.0)
        self.deaths.run(self)
        for wake in list(self.wakes):
            wake()


class FakeProcesses:
    """In the place of ActorProcesses; what a process prepares takes until ``imported`` is set."""

    def __init__(self):
        self.preparing, self.imported = asyncio.Lock(), asyncio.Event()
        self.spawned, self.forgotten, self.told = [], [], []

    async def spawn(self, name: str, *arguments, on: int | None = None) -> FakeProcess:
        self.spawned.append(FakeProcess(name, self.imported.wait))
        if on is not None:
            self.spawned[-1].host = remote(on)
        return self.spawned[-1]

    def forget(self, process: FakeProcess) -> None:
        self.forgotten.append(process)

    def record_event(self, kind: str, **fields) -> None:
        self.told.append(kind)


def make(processes: FakeProcesses, is_wanted: bool = True) -> Standby:
    config = SimpleNamespace(recovery=SimpleNamespace(has_standbys=is_wanted), mesh=SimpleNamespace(start_timeout=5.0))
    return Standby(processes, config, "trainer")


async def until(standby: Standby, state: State) -> None:
    for _ in range(100):
        if standby.state is state:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{standby.state}, not {state}")


def test_from_nothing_to_ready_and_taken():
    async def run():
        processes = FakeProcesses()
        standby = make(processes)
        assert standby.state is State.NONE
        async with processes.preparing:  # by another kind
            standby.make()
            await asyncio.sleep(0.01)
            assert standby.state is State.QUEUED and not processes.spawned
        await until(standby, State.PREPARING)
        processes.imported.set()
        await until(standby, State.READY)
        standby.make()  # there is one already
        process = await standby.take("trainer rank 0")
        assert process.name == "trainer rank 0" and processes.spawned == [process]
        assert standby.state is State.NONE and processes.told == ["standby_waits"]

    asyncio.run(run())


def test_one_that_is_queued_is_not_waited_for():
    async def run():
        processes = FakeProcesses()
        standby = make(processes)
        async with processes.preparing:
            standby.make()
            await asyncio.sleep(0)
            process = await standby.take("trainer rank 0")
        await asyncio.sleep(0.01)
        assert processes.spawned == [process] and standby.state is State.NONE

    asyncio.run(run())


def test_one_that_dies_while_it_waits_is_followed_by_another():
    async def run():
        processes = FakeProcesses()
        standby = make(processes)
        processes.imported.set()
        standby.make()
        await until(standby, State.READY)
        first = processes.spawned[0]
        first.end()
        assert standby.state is State.QUEUED and processes.forgotten == [first]
        await until(standby, State.READY)
        taken = await standby.take("trainer rank 0")
        assert taken is processes.spawned[1]
        taken.end()  # that is its new owner's business
        assert standby.state is State.NONE and processes.forgotten == [first]

    asyncio.run(run())


def test_one_that_ends_with_its_run_is_followed_by_none():
    async def run():
        processes = FakeProcesses()
        standby = make(processes)
        processes.imported.set()
        standby.make()
        await until(standby, State.READY)
        standby.stop()
        processes.spawned[0].end()
        await asyncio.sleep(0.01)
        assert standby.state is State.NONE and len(processes.spawned) == 1

    asyncio.run(run())


def test_standbys_that_die_one_after_the_other_are_not_made_for_ever():
    async def run():
        processes = FakeProcesses()
        processes.imported.set()
        standby = make(processes)
        for asked in range(2):
            standby.make()
            for lost in range(3):
                await until(standby, State.READY)
                assert len(processes.spawned) == 3 * asked + lost + 1
                processes.spawned[-1].end()
            await asyncio.sleep(0.05)
            assert standby.state is State.LOST and len(processes.spawned) == 3 * asked + 3

    asyncio.run(run())


def test_one_that_dies_while_it_prepares_is_lost_and_can_be_made_again():
    async def run():
        processes = FakeProcesses()
        standby = make(processes)
        standby.make()
        await until(standby, State.PREPARING)
        await asyncio.sleep(0.01)
        processes.spawned[0].end()
        await until(standby, State.LOST)
        processes.imported.set()
        standby.make()
        await until(standby, State.READY)

    asyncio.run(run())


def test_one_that_dies_while_it_is_taken_is_replaced_by_a_fresh_process():
    async def run():
        processes = FakeProcesses()
        standby = make(processes)
        standby.make()
        await until(standby, State.PREPARING)
        taking = asyncio.ensure_future(standby.take("trainer rank 0"))
        await asyncio.sleep(0.01)
        processes.spawned[0].end()
        assert await taking is processes.spawned[1] and processes.forgotten == processes.spawned[:1]

    asyncio.run(run())


def test_none_is_made_where_none_is_wanted():
    async def run():
        standby = make(FakeProcesses(), is_wanted=False)
        standby.make()
        assert standby.state is State.NONE

    asyncio.run(run())


def test_a_preparation_that_raises_is_met_by_the_one_that_takes_it():
    async def run():
        processes = FakeProcesses()
        standby = make(processes)

        async def spawn(name, *arguments):
            raise ActorDied([], "it was spawned") if name == "trainer rank 0" else ValueError("no such file")

        processes.spawn = spawn
        standby.make()
        await until(standby, State.LOST)
        with pytest.raises(ValueError, match="no such file"):
            await standby.take("trainer rank 0")

    asyncio.run(run())


def test_one_on_another_host_than_the_one_that_is_wanted_goes_on_waiting():
    async def run():
        processes = FakeProcesses()
        standby = make(processes)
        standby.make()
        processes.imported.set()
        await until(standby, State.READY)
        waiting = processes.spawned[0]
        waiting.host = remote(1)
        assert (await standby.take("trainer rank 0", 0)).host.number == 0
        assert standby.state is State.READY and await standby.take("trainer rank 1", 1) is waiting

    asyncio.run(run())


def test_of_two_that_would_wait_one_is_ended():
    async def run():
        processes = FakeProcesses()
        standby = make(processes)
        standby.make()
        await until(standby, State.PREPARING)
        taking = asyncio.ensure_future(standby.take("trainer rank 0", 0))
        await asyncio.sleep(0.01)
        standby.make()  # while it is not known yet that the first is on another host
        first = processes.spawned[0]
        first.host, killed = remote(1), []
        first.kill = lambda: killed.append(first)
        processes.imported.set()
        assert (await taking).host.number == 0
        await until(standby, State.READY)
        assert killed == processes.forgotten == [first] and first.is_stopping

    asyncio.run(run())

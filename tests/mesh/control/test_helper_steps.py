"""Steps of a run with helper generators, in simulated time: turns, router and replicas are real, engines are fakes."""

import asyncio
from types import SimpleNamespace

import pytest

from titan_rl.controller.loop.admission import Admission
from titan_rl.controller.planning.forecast.simulation import lengths
from titan_rl.data.types import EngineStatistics
from titan_rl.mesh.control import colocation, helpers
from titan_rl.mesh.control.colocation import NoColocation
from titan_rl.mesh.control.generators import StartupGate
from titan_rl.mesh.control.helpers import HelperTurns
from titan_rl.mesh.members import replica
from titan_rl.mesh.members.replica import Replica
from titan_rl.mesh.members.router import Router
from titan_rl.mesh.supervision.calls import Deadline
from titan_rl.mesh.telemetry.step_record import StepRecord

_TICK = 0.25
"""Seconds in which an engine goes on with each of its groups."""


class SimulatedTime(asyncio.SelectorEventLoop):
    """Event loop whose clock is at once where the next timer is due."""

    def __init__(self):
        super().__init__()
        self._now = 0.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:
            self._now = max(self._now, self._scheduled[0]._when)
        super()._run_once()


class Run:
    """Steps of 8 groups of 8 samples, staleness 1, on two generators of which each runs two groups at once."""

    def __init__(self, num_helpers: int, seconds_trained: float, seconds_of_group):
        self.seconds_trained, self.seconds_of_group = seconds_trained, seconds_of_group
        self.helpers, numbers = range(2, 2 + num_helpers), range(2 + num_helpers)
        self.router = Router("generator", range(2), (lambda number: 16 + 8 * (number < 2)) if num_helpers else None)
        self.replicas = {number: Replica(number, [SimpleNamespace(name=str(number))]) for number in numbers}
        died = asyncio.get_running_loop().create_future()
        trainers = SimpleNamespace(ranks=[SimpleNamespace(name="trainer rank 0", died=died)], call=self._turn)
        link = SimpleNamespace(version=0, published=0, undisturbed=asyncio.Lock, update=self._turn)
        generators = SimpleNamespace(
            router=self.router,
            replicas=self.replicas,
            helpers=self.helpers,
            helper_gate=StartupGate(),
            start_helpers=self._start_helpers,
            config=SimpleNamespace(generator=SimpleNamespace(max_num_seqs=16)),
            log=pytest.fail,
        )
        owners = trainers, generators, link, 1.0, StepRecord()
        self.turns = HelperTurns(*owners) if num_helpers else NoColocation()

    async def _turn(self, *_, **__) -> None:
        await asyncio.sleep(0.1)

    async def _start_helpers(self) -> None:
        for number in self.helpers:
            self.router.add(number)
            self.router.put_in(number)

    async def group(self, number: int) -> None:
        left, is_under_way = self.seconds_of_group[number], False
        while left > 0:
            async with self.router.choose(1.0, samples=8, is_under_way=is_under_way) as engine:
                moved = asyncio.get_running_loop().create_future()
                groups = self.replicas[engine].groups
                with self.replicas[engine].at_work(Deadline(1e9), 8, moved):
                    mine, left, is_under_way = groups[-1], self.seconds_of_group[number], True
                    while left > 0 and not moved.done():
                        await asyncio.sleep(_TICK)
                        runs = mine in groups[:2] and not self.router.is_resting(engine)
                        left -= _TICK * runs

    async def seconds(self, num_steps: int) -> float:
        """Of a step, on average."""
        await self.turns.begin()
        await self.turns.start()
        watching = asyncio.ensure_future(self.turns.watch())
        admission, groups, began = Admission(8, 1), [], 0.0
        for step in range(num_steps):
            admission.advance(step)
            while admission.can_admit():
                admission.admit()
                groups.append(asyncio.ensure_future(self.group(len(groups))))
            if step == 4:
                began = asyncio.get_running_loop().time()
            await asyncio.gather(*groups[8 * step : 8 * (step + 1)])
            await self.turns.take()
            await asyncio.sleep(self.seconds_trained)
            self.turns.release()
        whole = asyncio.get_running_loop().time() - began
        for task in (watching, *groups):
            task.cancel()
        return whole / (num_steps - 4)


def simulated(num_helpers: int, seconds_trained: float) -> float:
    with asyncio.Runner(loop_factory=SimulatedTime) as runner:

        async def run() -> float:
            return await Run(num_helpers, seconds_trained, lengths(10.0, 30.0, 400, seed=1)).seconds(20)

        return runner.run(run())


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    async def call(*_, **__):
        return EngineStatistics()

    for module in (helpers, colocation):
        monkeypatch.setattr(module, "call", call)
    for module in (helpers, replica):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: asyncio.get_running_loop().time()))


@pytest.mark.parametrize(
    ("seconds_trained", "most"),
    [(2.0, 0.85), (30.0, 1.01), (45.0, 1.01)],
    ids=["the trainer waits", "it waits for a moment", "it never waits"],
)
def test_a_helper_shortens_steps_that_wait_and_no_step_waits_for_one(seconds_trained, most):
    """As long as all groups stayed in helpers that sleep, the steps of the second took 1.11 times as long, and of the
    third 1.05 times."""
    assert simulated(1, seconds_trained) < most * simulated(0, seconds_trained)

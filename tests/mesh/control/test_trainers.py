"""Several ranks die at once: each is replaced, and every rank goes back to one common step. Processes are fakes."""

import asyncio
from types import SimpleNamespace

import pytest

from titan_rl.mesh.control.trainer_snapshots import RestorableSteps, TrainerSnapshots
from titan_rl.mesh.hosts.host_path import HostPath
from titan_rl.mesh.hosts.hosts import Host
from titan_rl.mesh.members.run_context import RunContext
from titan_rl.mesh.members.trainers import Trainers
from titan_rl.mesh.supervision.deaths import DeathHandlers

CONFIG = SimpleNamespace(
    mesh=SimpleNamespace(start_timeout=5.0, step_timeout=5.0), recovery=SimpleNamespace(has_standbys=False)
)


class FakeProcess:
    """Answers each endpoint at once, and notes what it was asked."""

    def __init__(self, name: str, is_dead: bool = False):
        self.name, self.is_dead, self.asked = name, is_dead, []
        self.host, self.wakes, self.deaths, self.why = Host("controller", None), set(), DeathHandlers(), "died"
        self.actor = SimpleNamespace(prepare=self._endpoint("prepare"), restore=self._endpoint("restore"))

    def _endpoint(self, name: str) -> SimpleNamespace:
        async def answer(*arguments):
            self.asked.append((name, *arguments))

        return SimpleNamespace(call_one=answer)


class FakeProcesses:
    """In the place of ActorProcesses."""

    def __init__(self):
        self.spawned, self.forgotten = [], []

    async def spawn(self, name: str, *arguments, on: int | None = None) -> FakeProcess:
        self.spawned.append(FakeProcess(name))
        return self.spawned[-1]

    def forget(self, process: FakeProcess) -> None:
        self.forgotten.append(process)


def trainers_of(processes: FakeProcesses, *ranks: FakeProcess) -> Trainers:
    trainers = Trainers(
        object, RunContext(processes, CONFIG, HostPath()), {"trainer": len(ranks)}, {}, stragglers=None, roles=None
    )
    trainers.ranks = list(ranks)
    return trainers


@pytest.mark.parametrize("dead", [{0}, {1, 2}, {0, 1, 2}])
def test_each_dead_rank_is_replaced_and_no_other(dead):
    async def run():
        processes = FakeProcesses()
        before = [FakeProcess(f"trainer rank {rank}", is_dead=rank in dead) for rank in range(3)]
        trainers = trainers_of(processes, *before)
        await trainers.replace(trainers.dead)
        assert trainers.is_complete and processes.forgotten == [before[rank] for rank in sorted(dead)]
        assert [process.name for process in trainers.ranks] == [process.name for process in before]
        assert all((trainers.ranks[rank] is before[rank]) == (rank not in dead) for rank in range(3))
        assert [process.asked for process in processes.spawned] == [[("prepare",)]] * len(dead)

    asyncio.run(run())


def test_every_rank_goes_back_to_the_common_step():
    """A survivor, too: it may be a step ahead of what was kept of the dead rank."""

    async def run():
        ranks = [FakeProcess(f"trainer rank {rank}") for rank in range(3)]
        snapshots = TrainerSnapshots(SimpleNamespace(ranks=ranks, world_size=3), SimpleNamespace(leaders=[]), seconds=5)
        await snapshots.restore(RestorableSteps([[4, 5], [4, 5]], {1: ([4], "where it was kept")}), 4)
        assert [rank.asked for rank in ranks] == [
            [("restore", 4, None)],
            [("restore", 4, "where it was kept")],
            [("restore", 4, None)],
        ]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("own", "kept", "at_most", "newest"),
    [
        ([[4, 5], [4, 5]], [5], 5, 5),
        ([[4, 5], [5, 6]], [5, 6], 6, 5),
        ([[5, 6], [5, 6]], [5, 6], 5, 5),  # step 6 was never done by the run
        ([[5, 6], [5, 6]], [3, 4], 6, None),
        ([[5, 6], [5, 6]], [], 6, None),
        ([[6], [6]], [6], 5, None),
    ],
)
def test_the_step_to_go_back_to_is_the_newest_of_all_that_the_run_has_done(own, kept, at_most, newest):
    assert RestorableSteps(own, {2: (kept, None)}).newest(at_most) == newest

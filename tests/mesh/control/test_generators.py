"""Engines that are started while the trainer is being repaired, and none while the run ends. Actors are fakes."""

import asyncio
from types import SimpleNamespace

import pytest

from titan_rl.config.load import load_config
from titan_rl.mesh.control import generators
from titan_rl.mesh.control.generators import Generators
from titan_rl.mesh.hosts.host_path import HostPath
from titan_rl.mesh.members.replica import Replica
from titan_rl.mesh.members.run_context import RunContext
from titan_rl.mesh.supervision.deaths import DeathHandlers


def make(monkeypatch, link: SimpleNamespace, said: list[str], warm_spares: int = 0) -> Generators:
    monkeypatch.setattr(generators, "Standby", lambda *_: SimpleNamespace(make=lambda: None, stop=lambda: None))
    monkeypatch.setattr(generators, "_PAUSE_SECONDS", 0.001)
    processes = SimpleNamespace(forget=lambda process: None, record_event=lambda *_, **__: None)
    config = load_config(None, {"recovery": {"warm_spares": warm_spares}})
    run = RunContext(processes, config, HostPath(), log=said.append)
    engines = Generators(None, run, 0, {}, link)

    async def start_one(number: int) -> Replica:
        process = SimpleNamespace(name="spare", pid=1, why="died", is_dead=False, kill=lambda: None)
        process.deaths = DeathHandlers()
        return Replica(number, ranks=[process])

    engines._start_one = start_one
    return engines


def test_one_that_meets_a_repair_of_the_trainer_is_started_again_after_it(monkeypatch):
    """And not given up: as often as the trainer is repaired, which has a limit of its own."""
    repairs, said = 7, []
    link = SimpleNamespace(is_broken=False, epoch=1)

    async def repair() -> None:
        await asyncio.sleep(0.02)
        link.is_broken, link.epoch = False, link.epoch + 1

    async def bring_up(replica: Replica) -> None:
        nonlocal repairs
        if repairs and not link.is_broken:
            repairs -= 1
            link.is_broken = True
            asyncio.get_running_loop().create_task(repair())
        if link.is_broken:
            raise RuntimeError("the version was withdrawn")

    link.bring_up = bring_up
    engines = make(monkeypatch, link, said)
    engines.router.take_out(0, "died")

    async def bring() -> None:
        engines._replacements.begin(0, lambda: engines._bring(0))
        while not engines.router.healthy:
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(bring(), 60))
    assert not engines.router.is_given_up(0) and said[-1] == "generator 0 serves"
    assert any("is started again after the trainer's repair: the version was withdrawn" in line for line in said)


def test_one_that_fails_beside_a_whole_trainer_is_given_up(monkeypatch):
    said = []

    async def bring_up(replica: Replica) -> None:
        raise RuntimeError("no memory")

    engines = make(monkeypatch, SimpleNamespace(is_broken=False, epoch=1, bring_up=bring_up), said)
    engines.router.take_out(0, "died")

    async def bring() -> None:
        engines._replacements.begin(0, lambda: engines._bring(0))
        while not engines.router.is_given_up(0):
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(bring(), 60))
    with pytest.raises(RuntimeError, match="no memory"):
        asyncio.run(engines._bring(0))
    assert len(said) == 5 and all("could not be started: no memory" in line for line in said)


@pytest.mark.parametrize("ends", [False, True])
def test_a_spare_that_dies_is_followed_by_another_unless_the_run_ends(monkeypatch, ends):
    async def num_spares() -> int:
        engines = make(monkeypatch, SimpleNamespace(), [], warm_spares=1)
        engines.prepare()
        await asyncio.sleep(0.01)
        ((spare,),) = (replica.ranks for replica in engines._spares)
        if ends:
            engines.stop()
        spare.deaths.run(spare)
        await asyncio.sleep(0.01)
        return len(engines._spares)

    assert asyncio.run(num_spares()) == (0 if ends else 1)

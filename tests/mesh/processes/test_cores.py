"""Which process works on which GPU is told by one table before anything starts, and what does not fit is refused."""

import asyncio
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from titan_rl.config.load import ConfigError, load_config
from titan_rl.config.sections.hosts import HostsConfig, hosts_of
from titan_rl.config.sections.placement import PlacementConfig
from titan_rl.config.sections.schema import GeneratorConfig
from titan_rl.mesh.control import generators
from titan_rl.mesh.hosts.host_path import HostPath
from titan_rl.mesh.hosts.hosts import Host
from titan_rl.mesh.members import trainers
from titan_rl.mesh.members.run_context import RunContext
from titan_rl.mesh.resources.devices import Crew, Devices, EngineMemory, EngineSeats, Seat, place, seats_of
from titan_rl.mesh.supervision.deaths import DeathHandlers
from titan_rl.models import device


def crews(trainer: int, replicas: int, tensor_parallel: int = 1, **own: int) -> list[Crew]:
    others = [Crew(role, ranks, mend=f"[{role}.parallelism]") for role, ranks in own.items()]
    engines = Crew("generator", tensor_parallel, replicas, of_one_host=True, mend="generator.replicas")
    return [Crew("trainer", trainer), *others, engines]


def numbers(seats) -> tuple[int, ...]:
    """Of GPUs on their host."""
    return tuple(seat.device for seat in seats)


def engines(table) -> list[tuple[int, ...]]:
    return [numbers(seats) for seats in table.engines()]


def test_on_one_gpu_all_roles_share_it():
    table = place(crews(1, 1, critic=1), PlacementConfig(), 1)
    assert table.used() == [Seat(0, 0)]
    assert table.at(Seat(0, 0)) == [("trainer", 0, 0), ("critic", 0, 0), ("generator", 0, 0)]


def test_on_eight_each_rank_has_one_of_its_own():
    table = place(crews(4, 1, 2, critic=1, reference=1), PlacementConfig(), 8)
    assert numbers(table.of_role("trainer")) == (0, 1, 2, 3)
    assert numbers(table.of_role("critic")) == (4,) and numbers(table.of_role("reference")) == (5,)
    assert engines(table) == [(6, 7)] and len(table.used()) == 8


def test_on_two_hosts_the_trainer_fills_the_first_and_engines_stay_whole():
    table = place(crews(8, 2, 4), PlacementConfig(), 8, 2)
    assert table.seats["trainer"] == [[Seat(0, i) for i in range(8)]]
    assert table.seats["generator"] == [[Seat(1, i) for i in range(4)], [Seat(1, i) for i in range(4, 8)]]
    beside = place(crews(6, 2, 4), PlacementConfig(), 8, 2)  # two are left on the first host, too few for an engine
    assert {seat.host for group in beside.seats["generator"] for seat in group} == {1}
    spread = place(crews(10, 1, 4), PlacementConfig(), 8, 2)
    assert spread.seats["trainer"][0][8:] == [Seat(1, 0), Seat(1, 1)]
    assert spread.engines() == [tuple(Seat(1, device) for device in (2, 3, 4, 5))]


def test_devices_by_role_are_counted_on_each_host():
    settings = PlacementConfig(trainer=[1, 0], generator=[2, 3])
    table = place(crews(4, 2, 2), settings, 4, 2)
    assert table.seats["trainer"] == [[Seat(0, 1), Seat(0, 0), Seat(1, 1), Seat(1, 0)]]
    assert table.seats["generator"] == [[Seat(0, 2), Seat(0, 3)], [Seat(1, 2), Seat(1, 3)]]


def test_who_names_none_gets_what_nobody_else_names():
    table = place(crews(2, 1), PlacementConfig(generator=[0]), 4)
    assert table.engines() == [(Seat(0, 0),)] and numbers(table.of_role("trainer")) == (1, 2)


def test_roles_share_what_both_name():
    table = place(crews(2, 2), PlacementConfig(trainer=[0, 1], generator=[0, 1]), 8)
    assert len(table.at(Seat(0, 0))) == 2 and table.used() == [Seat(0, 0), Seat(0, 1)]


def test_engines_that_take_turns_with_the_trainer_have_its_gpus():
    settings = PlacementConfig(mode="colocated")
    assert engines(place(crews(4, 2, 2), settings, 4)) == [(0, 1), (2, 3)]
    beside = place(crews(4, 2, 2, critic=1), settings, 5)  # whose GPU is nobody else's
    assert numbers(beside.of_role("critic")) == (4,) and engines(beside) == [(0, 1), (2, 3)]
    assert engines(place(crews(2, 1), PlacementConfig(mode="colocated", generator=[3]), 4)) == [(3,)]


@pytest.mark.parametrize(
    ("asked", "settings", "there", "says"),
    [
        (crews(2, 1), {}, (1, 1), "the trainer needs 2 GPUs, and 1 of 1 GPU is left for it: lower [parallelism]"),
        (crews(1, 2), {}, (1, 1), "the generator needs 2 GPUs"),
        (crews(8, 1), {}, (8, 1), "0 of 8 GPUs are left for it: lower generator.replicas, or name GPUs in placement."),
        (crews(4, 2, 4), {}, (8, 1), "needs 8 GPUs, 4 for each engine on one host, and 4 of 8 GPUs are left"),
        (crews(5, 1, 8), {}, (4, 2), "on one host, and 3 of 8 GPUs (2 hosts x 4) are left"),
        (crews(1, 1), {"trainer": [8]}, (8, 1), "placement.trainer = [8]: a host's GPUs are numbered from 0 to 7"),
        (crews(1, 1), {"critic": [0]}, (8, 1), "it has no processes of its own"),
        (crews(1, 1), {"trainer": [0, 0]}, (8, 1), "names a GPU twice"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line_with_the_mend(asked, settings, there, says):
    with pytest.raises(ConfigError) as error:
        place(asked, PlacementConfig(**settings), *there)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_only_what_there_is_can_be_asked_for():
    assert load_config(None, {}).placement.mode == "disaggregated"
    with pytest.raises(ConfigError, match="placement.mode"):
        load_config(None, {"placement": {"mode": "elsewhere"}})
    with pytest.raises(ConfigError, match="placement.trainer"):
        load_config(None, {"placement": {"trainer": [-1]}})


def test_an_engine_takes_the_devices_of_one_that_has_gone():
    one, other = (Seat(0, 0), Seat(0, 1)), (Seat(0, 2), Seat(0, 3))
    seats = EngineSeats([one, other])
    assert (seats.take(), seats.take()) == (one, other)
    with pytest.raises(RuntimeError, match="for 2 engines"):
        seats.take()
    seats.give_back(one)
    assert seats.take() == one


def test_an_engine_whose_host_is_lost_goes_where_gpus_are_free_or_waits_for_its_own():
    one, other = (Seat(0, 0), Seat(0, 1)), (Seat(1, 0), Seat(1, 1))
    seats = EngineSeats([one, other])
    assert seats.take(lambda host: host == 1) == other
    assert seats.take(lambda host: host == 1) == one


def test_roles_go_to_the_hosts_that_are_named_for_them():
    hosts = HostsConfig(trainer=["big"], generator=[1, 2], labels=["big", "small", "small"])
    table = place(crews(2, 2, 2), PlacementConfig(), 2, 3, partial(hosts_of, hosts, count=3))
    assert table.of_role("trainer") == [Seat(0, 0), Seat(0, 1)]
    assert table.engines() == [(Seat(1, 0), Seat(1, 1)), (Seat(2, 0), Seat(2, 1))]
    with pytest.raises(ConfigError, match="the trainer needs 3 GPUs, and 2 of 6 GPUs .3 hosts x 2. are left for it"):
        place(crews(3, 1), PlacementConfig(), 2, 3, partial(hosts_of, hosts, count=3))


def test_a_process_works_on_the_gpu_that_it_was_given(monkeypatch):
    monkeypatch.setattr(device, "DEVICE_TYPE", "cuda")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 8)
    try:
        device.take_device(5)
        assert device.local_device(0) == device.local_device(9) == torch.device("cuda", 5)
        device.take_device(None)
        assert device.local_device(9) == torch.device("cuda", 1)
    finally:
        device.take_device(None)


@pytest.fixture
def joined(monkeypatch) -> list[tuple]:
    """What each process is told as it joins, or starts."""
    told = []

    async def call_each(calls, **_):
        told.extend((process, *request.arguments) for process, request in calls)

    class FakeStandby:
        async def take(self, name, on=None):
            state = dict(is_dead=False, kill=lambda: None, deaths=DeathHandlers(), host=Host("controller", None))
            return SimpleNamespace(name=name, **state)

    for module in (trainers, generators):
        monkeypatch.setattr(module, "call_each", call_each)
        monkeypatch.setattr(module, "Standby", lambda *_: FakeStandby())
    return told


def devices_for(*asked) -> Devices:
    return Devices(place(crews(*asked), PlacementConfig(), 8), *2 * [EngineMemory(3.0, 0.5)])


@pytest.mark.parametrize("on_gpus", [True, False])
def test_ranks_are_told_their_gpus(on_gpus, joined):
    devices = devices_for(2, 1) if on_gpus else None
    sides, rest = {"trainer": 1, "critic": 1}, (None, None)
    ranks = trainers.Trainers(
        *(None, RunContext(None, load_config(None, {}), HostPath()), sides, {}, *rest),
        seats=seats_of(devices, "trainer"),
    )
    asyncio.run(ranks.start())
    assert [arguments[5:] for arguments in joined] == ([(0,), (1,)] if on_gpus else [(), ()])


def test_an_engine_s_ranks_are_told_all_its_gpus_and_a_dead_one_s_are_free_again(joined):
    config = load_config(None, {"generator": {"replicas": 2, "tensor_parallel": 2}})
    processes = SimpleNamespace(forget=lambda process: None, is_there=lambda host: True)
    link, said = None, []
    run = RunContext(processes, config, HostPath(), log=said.append)
    engines = generators.Generators(None, run, 0, {}, link, devices_for(2, 2, 2))

    async def one_dies() -> None:
        first, second = await asyncio.gather(engines._start_one(0), engines._start_one(1))
        assert (numbers(first.seats), numbers(second.seats)) == ((2, 3), (4, 5))
        engines._end(first)
        engines._end(first)
        assert numbers((await engines._start_one(0)).seats) == (2, 3)

    asyncio.run(one_dies())
    assert {arguments[3] for arguments in joined} == {(2, 3), (4, 5)}
    engines.scale(3)
    assert said == ["scale: requested 3 generators, the placement has GPUs for 2: running 2"]


def test_engines_get_the_memory_that_the_placement_left():
    settled = devices_for(1, 1).of_engine(GeneratorConfig(max_num_seqs=7))
    assert (settled.kv_cache_gib, settled.gpu_memory_utilization, settled.max_num_seqs) == (3.0, 0.5, 7)


def test_on_a_cpu_there_are_none():
    seats = EngineSeats(None)
    assert seats.take() == () == seats.take() and seats.count is None

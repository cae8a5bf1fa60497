"""Which process works on which GPU is told by one table before anything starts, and what does not fit is refused."""

import pytest

from titan_rl.config.load import ConfigError, load_config
from titan_rl.config.placement import PlacementConfig
from titan_rl.mesh.launch.devices import Crew, EngineSeats, Seat, place


def crews(trainer: int, replicas: int, tensor_parallel: int = 1, **own: int) -> list[Crew]:
    others = [Crew(role, ranks, mend=f"[{role}.parallelism]") for role, ranks in own.items()]
    engines = Crew("generator", tensor_parallel, replicas, of_one_host=True, mend="generator.replicas")
    return [Crew("trainer", trainer), *others, engines]


def test_on_one_gpu_all_roles_share_it():
    table = place(crews(1, 1, critic=1), PlacementConfig(), 1)
    assert table.used() == [Seat(0, 0)]
    assert table.at(Seat(0, 0)) == [("trainer", 0, 0), ("critic", 0, 0), ("generator", 0, 0)]


def test_on_eight_each_rank_has_one_of_its_own():
    table = place(crews(4, 1, 2, critic=1, reference=1), PlacementConfig(), 8)
    assert table.devices("trainer") == [0, 1, 2, 3]
    assert table.devices("critic") == [4] and table.devices("reference") == [5]
    assert table.engines() == [(6, 7)] and len(table.used()) == 8


def test_on_two_hosts_the_trainer_fills_the_first_and_engines_stay_whole():
    table = place(crews(8, 2, 4), PlacementConfig(), 8, 2)
    assert table.seats["trainer"] == [[Seat(0, i) for i in range(8)]]
    assert table.seats["generator"] == [[Seat(1, i) for i in range(4)], [Seat(1, i) for i in range(4, 8)]]
    beside = place(crews(6, 2, 4), PlacementConfig(), 8, 2)  # two are left on the first host, too few for an engine
    assert {seat.host for group in beside.seats["generator"] for seat in group} == {1}
    spread = place(crews(10, 1, 4), PlacementConfig(), 8, 2)
    assert spread.seats["trainer"][0][8:] == [Seat(1, 0), Seat(1, 1)]
    assert spread.engines() == [(2, 3, 4, 5)]


def test_devices_by_role_are_counted_on_each_host():
    settings = PlacementConfig(trainer=[1, 0], generator=[2, 3])
    table = place(crews(4, 2, 2), settings, 4, 2)
    assert table.seats["trainer"] == [[Seat(0, 1), Seat(0, 0), Seat(1, 1), Seat(1, 0)]]
    assert table.seats["generator"] == [[Seat(0, 2), Seat(0, 3)], [Seat(1, 2), Seat(1, 3)]]


def test_who_names_none_gets_what_nobody_else_names():
    table = place(crews(2, 1), PlacementConfig(generator=[0]), 4)
    assert table.engines() == [(0,)] and table.devices("trainer") == [1, 2]


def test_roles_share_what_both_name():
    table = place(crews(2, 2), PlacementConfig(trainer=[0, 1], generator=[0, 1]), 8)
    assert len(table.at(Seat(0, 0))) == 2 and table.used() == [Seat(0, 0), Seat(0, 1)]


@pytest.mark.parametrize(
    ("asked", "settings", "there", "says"),
    [
        (crews(2, 1), {}, (1, 1), "the trainer needs 2 GPUs, and of 1 GPU 1 are left for it: lower [parallelism]"),
        (crews(1, 2), {}, (1, 1), "the generator needs 2 GPUs"),
        (crews(8, 1), {}, (8, 1), "of 8 GPUs 0 are left for it: lower generator.replicas, or name GPUs in placement."),
        (crews(4, 2, 4), {}, (8, 1), "needs 8 GPUs, 4 for each engine on one host, and of 8 GPUs 4 are left"),
        (crews(5, 1, 8), {}, (4, 2), "on one host, and of 8 GPUs (2 hosts x 4) 3 are left"),
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
    seats = EngineSeats([(0, 1), (2, 3)])
    first, second = seats.take(), seats.take()
    with pytest.raises(RuntimeError, match="for 2 engines"):
        seats.take()
    seats.give_back(first)
    assert seats.take() == first and second == (2, 3)


def test_on_a_cpu_there_are_none():
    seats = EngineSeats(None)
    assert seats.take() == () == seats.take() and seats.count is None

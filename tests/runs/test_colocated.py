"""Trainer and generators take turns on the same devices: nothing else changes, whoever dies in whichever turn."""

import asyncio
import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest
import running
from faults import check_records, last_step, pid_of, replay, wait_for, wait_for_event

from titan_rl.config.load import ConfigError, load_config
from titan_rl.controller.preflight.checks import check
from titan_rl.controller.preflight.device import check_placement
from titan_rl.mesh.control.colocation import Colocation
from titan_rl.mesh.control.generators import StartupGate
from titan_rl.mesh.supervision.actor_process import ActorDied
from titan_rl.mesh.supervision.remote_call import RemoteCall
from titan_rl.mesh.weights.channel_link import WeightLink
from titan_rl.records.metrics import read_metrics
from titan_rl.trainer.titan_config import build_titan

COLOCATED = dict(placement__mode="colocated")

# what it asks


@pytest.mark.parametrize(
    "tables, mend",
    [
        ({"rollout": {"max_staleness": 1}}, "set it to 0"),
        ({"recovery": {"warm_spares": 1}}, "recovery.warm_spares = 0"),
        ({"data": {"file": "task"}, "algorithm": {"name": "sft"}}, "leave it out"),
        ({"placement": {"mode": "colocated", "helper_generators": 1}}, "leave one of both out"),
        ({"placement": {"helper_generators": 1}, "generator": {"max_num_seqs": 8}}, "set that above 0"),
        ({"placement": {"helper_generators": 1}}, "16 groups are sampled .*, and engines have room for 17"),
        ({"placement": {"helper_generators": 2}, "rollout": {"max_staleness": 1}}, "which has 1; set it to 1 at most"),
        (
            {"placement": {"helper_generators": 1}, "generator": {"update": "drain"}, "rollout": {"max_staleness": 1}},
            "take 'in_flight'",
        ),
    ],
)
def test_a_run_that_cannot_take_turns_is_refused(tables, mend):
    with pytest.raises(ConfigError, match=mend) as error:
        check(load_config(None, {"placement": {"mode": "colocated"}} | tables))
    assert "\n" not in str(error.value)


def test_helpers_are_refused_where_an_episode_has_a_limit_that_goes_on_while_they_sleep():
    config = load_config(None, {"placement": {"helper_generators": 1}, "rollout": {"max_staleness": 1}})
    task = SimpleNamespace(parts={}, has_agent=True, sessions=None)
    with pytest.raises(ConfigError, match="has a time limit of its own"):
        check_placement(config, build_titan(config), task, on_cpu=True)


@pytest.mark.parametrize(
    ("count", "ranks", "said"),
    [(2, 1, "need 2 devices of the trainer, which has 1; set it to 1 at most"), (1, 2, "or lower generator.tensor_p")],
)
def test_more_helpers_than_a_trainer_has_devices_are_refused(count, ranks, said):
    tables = {"placement": {"helper_generators": count}, "generator": {"tensor_parallel": ranks}}
    with pytest.raises(ConfigError, match=said):
        check(load_config(None, tables | {"rollout": {"max_staleness": 1}}))


# who has it


class FakeRanks:
    def __init__(self, log: list):
        self.log, self.is_dead = log, False

    async def call(self, request: RemoteCall, *, what: str) -> None:
        if self.is_dead:
            raise ActorDied([SimpleNamespace(name="trainer rank 0", why="died")], what)
        self.log.append(request.endpoint)


def make(monkeypatch) -> tuple[Colocation, list]:
    log, gate = [], StartupGate()
    rank = SimpleNamespace(died=asyncio.get_running_loop().create_future())
    rank.died.set_result(0.0)
    replicas = {number: SimpleNamespace(number=number, ranks=[rank]) for number in range(2)}
    failed = lambda number, why: log.append(f"{number} {why}")  # noqa: E731
    generators = SimpleNamespace(startup_gate=gate, replicas=replicas, fail=failed)

    async def call(process, request: RemoteCall, *, seconds: float, what: str) -> None:
        log.append(request.endpoint)
        if len(log) == 3:
            raise OSError("no memory")

    monkeypatch.setattr("titan_rl.mesh.control.colocation.call", call)
    return Colocation(FakeRanks(log), generators, WeightLink(None, "auto", 1.0), 1.0), log


def test_the_turn_is_the_trainers_until_it_gives_it(monkeypatch):
    async def run():
        turns, log = make(monkeypatch)
        await turns.begin()
        assert turns.is_with_trainer
        await turns.give()
        await turns.give()
        await turns.take()
        assert log == ["offload", "sleep", "sleep", "1 did not fall asleep: no memory", "onload"]
        await turns.take()
        assert log[5:] == ["onload"] and turns.is_with_trainer

    asyncio.run(run())


def test_an_engine_that_is_started_is_let_come_up_and_none_is_started_in_the_trainers_turn(monkeypatch):
    async def run():
        turns, log = make(monkeypatch)
        await turns.begin()
        gate, may_leave = turns.generators.startup_gate, asyncio.Event()

        async def start(name: str) -> None:
            async with gate.inside():
                log.append(f"{name} starts")
                await may_leave.wait()
            log.append(f"{name} is up")

        first = asyncio.create_task(start("first"))
        await asyncio.sleep(0)
        assert not log
        await turns.give()
        await asyncio.sleep(0)
        taking = asyncio.create_task(turns.take())
        await asyncio.sleep(0)
        second = asyncio.create_task(start("second"))
        await asyncio.sleep(0)
        assert log == ["offload", "first starts"]
        may_leave.set()
        await asyncio.gather(first, taking)
        assert log.index("first is up") < log.index("sleep") and "second starts" not in log
        await turns.give()
        await second

    asyncio.run(run())


def test_a_dead_rank_gives_no_turn_and_one_that_begins_anew_has_nothing_to_load(monkeypatch):
    async def run():
        turns, log = make(monkeypatch)
        turns.trainers.is_dead = True
        with pytest.raises(ActorDied):
            await turns.give()
        assert turns.is_with_trainer
        await turns.take(dead=True)
        assert not log

    asyncio.run(run())


@pytest.mark.parametrize("why", ["", "nobody waits", "the trainer works", "it is the generators' turn"])
def test_groups_that_sleep_have_the_turn_once_the_trainer_is_idle(monkeypatch, why):
    """As in a loop of one's own, which samples, computes gradients, and waits for the samples before the update."""
    monkeypatch.setattr("titan_rl.mesh.control.colocation._LOOK_SECONDS", 0.001)
    monkeypatch.setattr("titan_rl.mesh.control.colocation._IDLE_SECONDS", 0.01)

    async def run():
        turns, _ = make(monkeypatch)
        await turns.begin()
        for replica in turns.generators.replicas.values():
            replica.groups = [object()] * (why != "nobody waits")
        if why == "it is the generators' turn":
            await turns.give()
        turns.release()
        if why == "the trainer works":
            await turns.take()
        watching = asyncio.create_task(turns.watch())
        if why:
            await asyncio.sleep(0.1)
        else:
            await asyncio.wait_for(turns.interrupted.wait(), 60)
        assert turns.interrupted.is_set() == (not why)
        watching.cancel()

    asyncio.run(run())


# runs


@pytest.mark.slow
def test_it_learns_what_it_learns_side_by_side_to_the_last_bit(finished_run, tmp_path):
    root = tmp_path / "run"
    assert running.train(root, **running.FINISHED, **COLOCATED) == 0, running.output(root)[-3000:]
    names = ("step", "loss", "grad_norm", "reward", "held_out_accuracy")
    of_both = [
        [tuple(record.get(name) for name in names) for record in read_metrics(each)] for each in (finished_run, root)
    ]
    assert of_both[0] == of_both[1]
    assert any(loss for _, loss, *_ in of_both[0]), "something was learnt"


HELPED = dict(rollout__max_staleness=1, generator__max_num_seqs=4, placement__helper_generators=1)
FAULTS_OF_HELPERS = [
    ("generator 1", "kill at sleep"),
    ("generator 1", "kill at wake"),
    ("generator 1", "raise at sleep"),
    ("generator 1", "kill at work"),
    ("trainer rank 0", "kill at offload"),
    ("trainer rank 0", "kill at onload"),
]
FAULTS = [
    ("generator 0", "kill at sleep"),
    ("generator 0", "kill at wake"),
    ("generator 0", "kill at work"),
    ("trainer rank 0", "kill at onload"),
    ("trainer rank 0", "kill at offload"),
    ("trainer rank 0", "kill at work"),
    ("trainer rank 0", "kill at update"),
    ("generator 0", "raise at sleep"),
    ("trainer rank 0", "raise at offload"),
]


def find_pid(root: Path, name: str) -> int | None:
    pids = json.loads((root / "pids.json").read_text())
    return next((int(pid) for pid, known in pids.items() if known == name), None)


def strike_while_it_generates(root: Path) -> None:
    """A trainer rank, in the generators' turn."""
    wait_for(lambda: "generating" in (root / "phase").read_text(), "generating")
    pid = pid_of(root, "trainer rank 0")
    os.kill(pid, signal.SIGKILL)
    wait_for_event(root, "died", pid=pid)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "layout, faults", [(COLOCATED, FAULTS), (HELPED, FAULTS_OF_HELPERS)], ids=["in turns", "helped"]
)
def test_a_fault_in_each_state_is_recovered(tmp_path, monkeypatch, layout, faults):
    root, orders = tmp_path / "run", tmp_path / "orders"
    orders.mkdir()
    monkeypatch.setenv("TITAN_RL_CHAOS", str(orders))
    settings = running.FINISHED | dict(training__steps=5000, checkpoint__every=0, eval__every=0)
    process = running.start(root, **settings, **layout)
    try:
        running.wait_for_step(root, 2)
        children = running.descendants(process.pid)
        for target, order in faults:
            pid = wait_for(lambda target=target: find_pid(root, target), target)
            (orders / str(pid)).write_text(order)
            wait_for_event(root, "died", pid=pid)
            assert (orders / f"{pid}.obeyed").exists()
            running.wait_for_step(root, 2 + last_step(root))
        strike_while_it_generates(root)
        running.wait_for_step(root, 2 + last_step(root))
    finally:
        process.send_signal(signal.SIGINT)
    assert process.wait(120) == 130, running.output(root)[-3000:]
    assert running.gone(children)
    check_records(root, last_step(root), layout.get("rollout__max_staleness", 0))
    assert replay(root) == 0


@pytest.mark.slow
@pytest.mark.confirms
def test_all_ranks_of_either_side_take_turns(tmp_path):
    root = tmp_path / "run"
    layout = dict(parallelism__data_parallel_shard_degree=2, generator__tensor_parallel=2)
    assert running.train(root, training__steps=3, **layout, **COLOCATED) == 0, running.output(root)[-3000:]
    check_records(root, 3)

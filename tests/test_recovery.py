"""A process that is killed is replaced, and the run ends as it would have."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import running

from titan_rl.records.events import read_events
from titan_rl.records.ledger import Ledger
from titan_rl.records.metrics import read_metrics

pytestmark = pytest.mark.slow
confirms = pytest.mark.confirms
"""`titan-rl chaos` injects such faults by the hundred, and `titan-rl bench replacement` times the rest."""
STEPS = 10


def strike(root: Path, target: str, number: signal.Signals = signal.SIGKILL) -> None:
    os.kill(pid_of(root, target), number)


def pid_of(root: Path, name: str) -> int:
    pids = json.loads((root / "pids.json").read_text())
    return next(int(pid) for pid, known in pids.items() if known == name)


def wait_for(condition, what: str, timeout: float = 120):
    deadline = time.monotonic() + timeout
    while not (found := condition()):
        assert time.monotonic() < deadline, f"no {what} within {timeout} s"
        time.sleep(0.05)
    return found


def wait_for_event(root: Path, kind: str, **fields) -> dict:
    def find():
        events = read_events(root)
        return next((e for e in events if e["kind"] == kind and fields.items() <= e.items()), None)

    return wait_for(find, f"event {kind} {fields}")


def kill_the_one_that_waits(root: Path, kind: str, **fields) -> int:
    """Another one comes; its process's id."""
    pid = wait_for_event(root, kind, **fields)["pid"]
    os.kill(pid, signal.SIGKILL)

    def find():
        return next(
            (e["pid"] for e in read_events(root) if {"kind": kind, **fields}.items() <= e.items() and e["pid"] != pid),
            None,
        )

    return wait_for(find, f"{kind} {fields} after {pid}")


def wait_for_name(root: Path, pid: int, name: str) -> None:
    """Until the run knows this process under that name."""
    wait_for(lambda: json.loads((root / "pids.json").read_text()).get(str(pid)) == name, f"{name} with id {pid}")


def run_under_fire(root: Path, target: str, number: signal.Signals = signal.SIGKILL, **settings) -> str:
    """A run of which one process is signalled after step 2; what it said. It must end well and leave no process."""
    process = running.start(root, training__steps=STEPS, **settings)
    running.wait_for_step(root, 2)
    children = running.descendants(process.pid)
    strike(root, target, number)
    assert process.wait(150) == 0, running.output(root)[-3000:]
    assert running.gone(children)
    records = [record for record in read_metrics(root) if "reward" in record]
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert all(record["agreement_mean"] <= 1.0001 for record in records)
    ledger = Ledger(root / "ledger.db")
    ledger.verify()
    return running.output(root)


def replay(root: Path) -> int:
    """Whether every step comes out the same, bit for bit, from the rollouts that were written down."""
    from titan_rl import cli

    return cli.main(["replay", str(root), "--from", "1", "--to", str(STEPS)])


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=confirms), 2])
def test_a_trainer_rank_is_replaced_from_memory(tmp_path, ranks):
    """The replica of a rank that has no peers is held by a generator."""
    root = tmp_path / "run"
    layout = dict(parallelism__data_parallel_shard_degree=ranks)
    said = run_under_fire(root, f"trainer rank {ranks - 1}", **layout)
    assert f"trainer rank {ranks - 1} died: replaced, and all ranks at step" in said
    assert replay(root) == 0


def test_a_stopped_trainer_rank_is_replaced(tmp_path):
    root = tmp_path / "run"
    said = run_under_fire(root, "trainer rank 0", signal.SIGSTOP, mesh__step_timeout=15)
    assert "trainer rank 0 hung: replaced" in said
    [log] = (root / "logs").glob("trainer_rank_0_1.txt")
    assert "Current thread" in log.read_text() or "Thread 0x" in log.read_text(), "its stacks are in its log"


def test_a_generator_is_replaced(tmp_path):
    said = run_under_fire(tmp_path / "run", "generator 0")
    assert "generator 0 died: its groups are sampled elsewhere" in said and "generator 0 serves" in said


@confirms
def test_a_verifier_is_replaced(tmp_path):
    said = run_under_fire(tmp_path / "run", "verifier 0")
    assert "verifier 0 died: its groups are sampled again" in said


@confirms
def test_a_host_takes_its_processes_with_it_and_all_are_replaced(tmp_path):
    root = tmp_path / "run"
    layout = dict(parallelism__data_parallel_shard_degree=2, generator__replicas=2, mesh__worker_loops=2)
    said = run_under_fire(root, "host 1", **layout)
    assert "trainer rank 1 lost host 1: replaced" in said and "lost host 1: its groups are sampled elsewhere" in said
    assert replay(root) == 0


@confirms
def test_a_standby_takes_the_place_of_the_dead(tmp_path):
    root = tmp_path / "run"
    process = running.start(root, training__steps=5000, recovery__standby="true")
    kinds = ("trainer", "generator", "verifier")
    try:
        standbys = {kind: wait_for_event(root, "standby_waits", of=kind)["pid"] for kind in kinds}
        standbys["verifier"] = kill_the_one_that_waits(root, "standby_waits", of="verifier")
        for target, kind in (("trainer rank 0", "trainer"), ("generator 0", "generator"), ("verifier 0", "verifier")):
            strike(root, target)
            wait_for_name(root, standbys[kind], target)
        running.wait_for_step(root, 1 + max(record["step"] for record in read_metrics(root)))
    finally:
        process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130, running.output(root)[-3000:]


@confirms
def test_warm_spare_serves_at_once(tmp_path):
    root = tmp_path / "run"
    process = running.start(root, training__steps=5000, recovery__warm_spares=1)
    try:
        pid = kill_the_one_that_waits(root, "spare_waits")
        running.wait_for_step(root, 2)
        strike(root, "generator 0")
        wait_for_event(root, "generator_serves", number=0)
        wait_for_name(root, pid, "generator 0")
    finally:
        process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130, running.output(root)[-3000:]


@confirms
def test_an_exception_is_repaired_as_a_death(tmp_path, monkeypatch):
    """In each kind of actor, where it works."""
    root, orders = tmp_path / "run", tmp_path / "orders"
    orders.mkdir()
    monkeypatch.setenv("TITAN_RL_CHAOS", str(orders))
    process = running.start(root, training__steps=5000, generator__replicas=2)
    try:
        running.wait_for_step(root, 2)
        for target in ("trainer rank 0", "generator 0", "verifier 0"):
            pid = pid_of(root, target)
            (orders / str(pid)).write_text("raise")
            event = wait_for_event(root, "died", pid=pid)
            assert event["name"] == target and "ChaosError: an exception that was ordered" in event["why"]
            assert (orders / f"{pid}.obeyed").exists()
            running.wait_for_step(root, 1 + max(record["step"] for record in read_metrics(root)))
    finally:
        process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130, running.output(root)[-3000:]
    Ledger(root / "ledger.db").verify()


def test_generators_come_and_go(tmp_path):
    from titan_rl import cli

    root = tmp_path / "run"
    process = running.start(root, training__steps=5000)
    try:
        running.wait_for_step(root, 2)
        assert cli.main(["scale", str(root), "--generators", "2"]) == 0
        wait_for_event(root, "generator_serves", number=1)
        newcomer = pid_of(root, "generator 1")
        running.wait_for_step(root, 2 + max(record["step"] for record in read_metrics(root)))
        assert cli.main(["scale", str(root), "--generators", "1"]) == 0
        wait_for_event(root, "generator_gone", number=1)
        assert running.gone({newcomer})
        running.wait_for_step(root, 2 + max(record["step"] for record in read_metrics(root)))
    finally:
        process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130, running.output(root)[-3000:]
    account = Ledger(root / "ledger.db").account()
    assert not any(name.startswith("discarded") for name in account), "nothing was lost by it"
    assert cli.main(["scale", str(root), "--generators", "2"]) == 2, "no run is under way any more"


@pytest.mark.parametrize("step", [pytest.param(0, marks=confirms), 3, pytest.param(8, marks=confirms)])
def test_a_killed_controller_is_resumed_to_the_same_end(tmp_path, step):
    """Before the first step, before the first checkpoint, and after it."""
    root = tmp_path / "run"
    settings = dict(training__steps=STEPS, checkpoint__every=5)
    process = running.start(root, **settings)
    if step:
        running.wait_for_step(root, step)
    else:
        wait_for_event(root, "started", name="trainer rank 0")
    children = running.descendants(process.pid)
    folders = running.scratch_folders(children)
    os.kill(max(children), signal.SIGSTOP)  # which cannot end by itself
    process.kill()
    process.wait()
    assert running.gone(children, timeout=5), "no orphan stays"
    assert len(folders) == 2 and not any(folder.exists() for folder in folders)
    assert running.train(root, "--resume", **settings) == 0, running.output(root)[-3000:]
    records = [record for record in read_metrics(root) if "reward" in record]
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    events = read_events(root)
    assert all(event["same"] for event in events if event["kind"] == "redone")
    [resumed] = [event for event in events if event["kind"] == "resumed"]
    assert step <= resumed["step"] and resumed["redone"] == resumed["step"] - resumed["checkpoint_step"]
    account = Ledger(root / "ledger.db").account()
    assert account == {"issued": STEPS * 16, "trained": STEPS * 16, "pending": 0}
    assert replay(root) == 0


def test_without_recovery_a_dead_trainer_ends_the_run_by_name(tmp_path):
    root = tmp_path / "run"
    process = running.start(root, training__steps=5000, recovery__snapshot_every=0)
    running.wait_for_step(root, 2)
    children = running.descendants(process.pid)
    strike(root, "trainer rank 0")
    start = time.monotonic()
    assert process.wait(60) == 1, running.output(root)[-3000:]
    assert time.monotonic() - start < 30 and running.gone(children)
    assert "trainer rank 0 died" in json.loads((root / "summary.json").read_text())["why_ended"]

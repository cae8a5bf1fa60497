"""A process that is killed is replaced, and the run ends as it would have."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
import running
from faults import check_records, last_step, pid_of, replay, strike, wait_for, wait_for_event

from titan_rl.records.events import read_events
from titan_rl.records.ledger import Ledger

pytestmark = pytest.mark.slow
confirms = pytest.mark.confirms
"""`titan-rl chaos` injects such faults by the hundred, and `titan-rl bench replacement` times the rest."""
STEPS = 10


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


def strike_and_wait(root: Path, target: str, number: signal.Signals = signal.SIGKILL) -> None:
    """Until another process has its name, and two steps more are done."""
    pid = pid_of(root, target)
    os.kill(pid, number)
    wait_for_event(root, "died", pid=pid)
    running.wait_for_step(root, 2 + last_step(root))
    assert pid_of(root, target) != pid


def test_one_kind_after_the_other_is_replaced(tmp_path, monkeypatch):
    """Killed, hung, or with an exception where it works. The replica of a rank without peers is held by a generator."""
    root, orders = tmp_path / "run", tmp_path / "orders"
    orders.mkdir()
    monkeypatch.setenv("TITAN_RL_CHAOS", str(orders))
    process = running.start(root, training__steps=5000, mesh__step_timeout=15)
    try:
        running.wait_for_step(root, 2)
        children = running.descendants(process.pid)
        for target, number in (
            ("generator 0", signal.SIGKILL),
            ("verifier 0", signal.SIGKILL),
            ("trainer rank 0", signal.SIGSTOP),
            ("trainer rank 0", signal.SIGKILL),
        ):
            strike_and_wait(root, target, number)
        for target in ("trainer rank 0", "generator 0", "verifier 0"):
            pid = pid_of(root, target)
            (orders / str(pid)).write_text("raise")
            event = wait_for_event(root, "died", pid=pid)
            assert event["name"] == target and "ChaosError: an exception that was ordered" in event["why"]
            assert (orders / f"{pid}.obeyed").exists()
            running.wait_for_step(root, 1 + last_step(root))
    finally:
        process.send_signal(signal.SIGINT)
    assert process.wait(120) == 130, running.output(root)[-3000:]
    assert running.gone(children)
    said = running.output(root)
    for line in (
        "generator 0 died: its groups are sampled elsewhere",
        "verifier 0 died: its groups are sampled again",
        "trainer rank 0 hung: replaced",
        "trainer rank 0 died: replaced, and all ranks at step",
    ):
        assert line in said, said
    log = (root / "logs" / "trainer_rank_0_1.txt").read_text()
    assert "Current thread" in log or "Thread 0x" in log, "the stacks of the one that hung are in its log"
    check_records(root, last_step(root))
    assert replay(root) == 0


@confirms
def test_a_host_takes_its_processes_with_it_and_all_are_replaced(tmp_path):
    """And before that, a rank alone."""
    root = tmp_path / "run"
    layout = dict(parallelism__data_parallel_shard_degree=2, generator__replicas=2, mesh__worker_loops=2)
    process = running.start(root, training__steps=STEPS, **layout)
    running.wait_for_step(root, 2)
    children = running.descendants(process.pid)
    strike_and_wait(root, "trainer rank 1")
    strike(root, "host 1")
    assert process.wait(300) == 0, running.output(root)[-3000:]
    assert running.gone(children)
    said = running.output(root)
    assert "trainer rank 1 died: replaced, and all ranks at step" in said
    # a process's own end may be noticed before its host's: then whoever was to replace it there is who lost the host
    assert re.search(r"trainer rank 1 lost host 1(: replaced| while it was spawned)", said), said
    assert re.search(r"generator \d lost host 1(: its groups are sampled elsewhere| while it was spawned)", said), said
    check_records(root, STEPS)
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
        running.wait_for_step(root, 1 + last_step(root))
    finally:
        process.send_signal(signal.SIGINT)
    assert process.wait(120) == 130, running.output(root)[-3000:]


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
    assert process.wait(120) == 130, running.output(root)[-3000:]


def test_generators_come_and_go(tmp_path):
    from titan_rl import cli

    root = tmp_path / "run"
    process = running.start(root, training__steps=5000)
    try:
        running.wait_for_step(root, 2)
        assert cli.main(["scale", str(root), "--generators", "2"]) == 0
        wait_for_event(root, "generator_serves", number=1)
        newcomer = pid_of(root, "generator 1")
        running.wait_for_step(root, 2 + last_step(root))
        assert cli.main(["scale", str(root), "--generators", "1"]) == 0
        wait_for_event(root, "generator_gone", number=1)
        assert running.gone({newcomer})
        running.wait_for_step(root, 2 + last_step(root))
    finally:
        process.send_signal(signal.SIGINT)
    assert process.wait(120) == 130, running.output(root)[-3000:]
    account = Ledger(root / "ledger.db").account()
    assert not any(name.startswith("discarded") for name in account), "nothing was lost by it"
    assert cli.main(["scale", str(root), "--generators", "2"]) == 2, "no run is under way any more"


def wait_for_resumed(root: Path, number: int) -> dict:
    """The event of the resume of that number, from 0."""
    return wait_for(lambda: [e for e in read_events(root) if e["kind"] == "resumed"][number:], "event resumed")[0]


@confirms
def test_a_killed_controller_is_resumed_to_the_same_end(tmp_path):
    """Before the first step, before the first checkpoint, and after it. The ranks' files are in a store."""
    root, store = tmp_path / "run", tmp_path / "store"
    settings = dict(training__steps=STEPS, checkpoint__every=5, checkpoint__store=store)
    process = running.start(root, **settings)
    for number, step in enumerate((0, 3, 8)):
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
        process = running.start(root, "--resume", **settings)
        resumed = wait_for_resumed(root, number)
        assert step <= resumed["step"] and resumed["redone"] == resumed["step"] - resumed["checkpoint_step"]
    assert process.wait(180) == 0, running.output(root)[-3000:]
    check_records(root, STEPS)
    events = read_events(root)
    assert [event["kind"] for event in events].count("resumed") == 3
    assert all(event["same"] for event in events if event["kind"] == "redone")
    account = Ledger(root / "ledger.db").account()
    assert account == {"issued": STEPS * 16, "trained": STEPS * 16, "pending": 0}
    assert replay(root) == 0
    kept = [path.name for path in (root / "checkpoints").glob("step-*")]
    assert len(list((store / "run").iterdir())) == len(kept) and not list(root.rglob("*.distcp"))


def test_without_recovery_a_dead_trainer_ends_the_run_by_name(tmp_path):
    root = tmp_path / "run"
    process = running.start(root, training__steps=5000, recovery__snapshot_every=0)
    running.wait_for_step(root, 2)
    children = running.descendants(process.pid)
    strike(root, "trainer rank 0")
    start = time.monotonic()
    assert process.wait(120) == 1, running.output(root)[-3000:]
    assert time.monotonic() - start < 30 and running.gone(children)
    assert "trainer rank 0 died" in json.loads((root / "summary.json").read_text())["why_ended"]

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

from titan_rl import cli
from titan_rl.diagnostics.chaos.targets import below_verifier
from titan_rl.records.ledger.ledger import Ledger
from titan_rl.records.run_directory.events import read_events

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
    """Until another process has its name, and a step more is done."""
    pid = pid_of(root, target)
    os.kill(pid, number)
    assert wait_for_event(root, "died", pid=pid)["name"] == target
    running.wait_for_step(root, 2 + last_step(root))
    assert pid_of(root, target) != pid


class Tour:
    """One run in which every kind of process is struck in turn; each stop asserts its own fault by name."""

    def __init__(self, folder: Path):
        self.root, self.store, self.orders = folder / "run", folder / "store", folder / "orders"
        self.orders.mkdir()
        self.settings = dict(
            sft__steps=30,
            checkpoint__every=5,
            checkpoint__store=self.store,
            mesh__step_timeout=20,
            recovery__standby="true",
        )
        self.process = running.start(self.root, training__steps=5000, **self.settings)

    def standby(self) -> None:
        """A process that waits with its imports done dies and is made again; then it takes the place of the dead."""
        standbys = {
            kind: wait_for_event(self.root, "standby_waits", of=kind)["pid"] for kind in ("trainer", "verifier")
        }
        standbys["verifier"] = kill_the_one_that_waits(self.root, "standby_waits", of="verifier")
        for target, kind in (("trainer rank 0", "trainer"), ("verifier 0", "verifier")):
            strike(self.root, target)
            wait_for_name(self.root, standbys[kind], target)

    def scorer(self) -> None:
        pid = wait_for(lambda: below_verifier(self.root, "verifier 0", "scorer"), "the scorer of verifier 0")
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: below_verifier(self.root, "verifier 0", "scorer") not in (None, pid), "another scorer")
        running.wait_for_step(self.root, 1 + last_step(self.root))

    def exceptions(self) -> None:
        """One where each kind works ends its process, which is replaced."""
        for target in ("trainer rank 0", "generator 0", "verifier 0"):
            pid = pid_of(self.root, target)
            (self.orders / str(pid)).write_text("raise")
            event = wait_for_event(self.root, "died", pid=pid)
            assert event["name"] == target and "ChaosError: an exception that was ordered" in event["why"]
            assert (self.orders / f"{pid}.obeyed").exists()
            running.wait_for_step(self.root, 1 + last_step(self.root))

    def scale(self) -> None:
        """A generator is added, which serves, and removed again."""
        assert cli.main(["scale", str(self.root), "--generators", "2"]) == 0
        wait_for_event(self.root, "generator_serves", number=1)
        added = pid_of(self.root, "generator 1")
        running.wait_for_step(self.root, 1 + last_step(self.root))
        assert cli.main(["scale", str(self.root), "--generators", "1"]) == 0
        wait_for_event(self.root, "generator_gone", number=1)
        assert running.gone({added})

    def controller(self) -> None:
        """It is killed, with a process that is stopped and cannot end by itself; nothing of the run is left."""
        children = running.descendants(self.process.pid)
        folders = running.scratch_folders(children)
        os.kill(max(children), signal.SIGSTOP)
        self.process.kill()
        self.process.wait()
        assert running.gone(children, timeout=30), "no orphan stays"
        assert len(folders) == 2 and not any(folder.exists() for folder in folders)


def test_every_kind_of_process_is_struck_in_turn_and_the_run_ends_as_it_would_have(tmp_path, monkeypatch):
    """Standby, generator, trainer (hung and killed), scorer, exceptions in each, scaling, then the controller.

    The replica of a rank without peers is held by a generator; the ranks' files are in a store.
    """
    monkeypatch.setenv("TITAN_RL_CHAOS", str(tmp_path / "orders"))
    tour = Tour(tmp_path)
    root = tour.root
    try:
        running.wait_for_step(root, 1)
        tour.standby()
        strike_and_wait(root, "generator 0")
        strike_and_wait(root, "trainer rank 0", signal.SIGSTOP)
        strike_and_wait(root, "trainer rank 0")
        tour.scorer()
        tour.exceptions()
        tour.scale()
        tour.controller()
    except BaseException:
        tour.process.send_signal(signal.SIGINT)
        raise
    said, before = running.output(root), last_step(root)
    for line in (
        "generator 0 died: its groups are sampled elsewhere",
        "verifier 0 died: its groups are sampled again",
        "trainer rank 0 hung: replaced",
        "trainer rank 0 died: replaced, and all ranks at step",
    ):
        assert line in said, said
    logs = [path.read_text() for path in (root / "logs").glob("*trainer_*.txt")]
    assert any("Current thread" in log or "Thread 0x" in log for log in logs), "stacks of the one that hung"
    steps = before + 3
    settings = tour.settings | dict(training__steps=steps)
    assert running.train(root, "--resume", **settings) == 0, running.output(root)[-3000:]
    [resumed] = [event for event in read_events(root) if event["kind"] == "resumed"]
    assert before <= resumed["step"] and resumed["redone"] == resumed["step"] - resumed["checkpoint_step"]
    assert all(event["same"] for event in read_events(root) if event["kind"] == "redone")
    check_records(root, steps)
    account = Ledger(root / "ledger.db").account()
    assert account == {"issued": steps * 16, "trained": steps * 16, "pending": 0}, "nothing was lost by any of it"
    kept = [path.name for path in (root / "checkpoints").glob("step-*")]
    assert len(list((tour.store / "run").iterdir())) == len(kept) and not list(root.rglob("*.distcp"))
    assert cli.main(["scale", str(root), "--generators", "2"]) == 2, "no run is under way any more"
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


def wait_for_resumed(root: Path, number: int) -> dict:
    """The event of the resume of that number, from 0."""
    return wait_for(lambda: [e for e in read_events(root) if e["kind"] == "resumed"][number:], "event resumed")[0]


@confirms
def test_a_killed_controller_is_resumed_to_the_same_end(tmp_path):
    """Before the first step, before the first checkpoint, and after it."""
    root = tmp_path / "run"
    settings = dict(training__steps=STEPS, checkpoint__every=5)
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
        assert running.gone(children, timeout=30), "no orphan stays"
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
    assert "what the actors printed is in" in running.output(root)

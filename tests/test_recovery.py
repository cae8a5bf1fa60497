"""Whoever is killed is replaced, and the run ends as it would have."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import running

from titan_rl.ledger import Ledger
from titan_rl.metrics import read_metrics

pytestmark = pytest.mark.slow
STEPS = 10


def strike(root: Path, victim: str, number: signal.Signals = signal.SIGKILL) -> None:
    pids = json.loads((root / "pids.json").read_text())
    os.kill(next(int(pid) for pid, name in pids.items() if name == victim), number)


def run_under_fire(root: Path, victim: str, number: signal.Signals = signal.SIGKILL, **settings) -> str:
    """A run whose victim is struck after step 2; what it said. It must end well and leave nobody behind."""
    process = running.start(root, training__steps=STEPS, **settings)
    running.wait_for_step(root, 2)
    children = running.descendants(process.pid)
    strike(root, victim, number)
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


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_trainer_rank_is_replaced_from_memory(tmp_path, ranks):
    """A rank that is alone has its snapshots kept by a generator."""
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
    assert "generator 0 died: its groups are sampled elsewhere" in said and "generator 0 serves again" in said


def test_a_verifier_is_replaced(tmp_path):
    said = run_under_fire(tmp_path / "run", "verifier 0")
    assert "verifier 0 died: its groups are sampled again" in said


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

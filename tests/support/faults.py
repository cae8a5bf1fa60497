"""Faults on order: a run's process is struck, and what follows is waited for and checked."""

import json
import os
import signal
import time
from pathlib import Path

from titan_rl.records.ledger.ledger import Ledger
from titan_rl.records.metrics import read_metrics
from titan_rl.records.run_directory.events import read_events


def strike(root: Path, target: str, number: signal.Signals = signal.SIGKILL) -> None:
    os.kill(pid_of(root, target), number)


def pid_of(root: Path, name: str) -> int:
    pids = json.loads((root / "pids.json").read_text())
    return next(int(pid) for pid, known in pids.items() if known == name)


def wait_for(condition, what: str, timeout: float = 240):
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


def last_step(root: Path) -> int:
    return max(record["step"] for record in read_metrics(root) if "reward" in record)


def check_records(root: Path, last: int, max_staleness: int = 0) -> None:
    """Every step is there once, trained on what was sampled, and the account adds up."""
    records = [record for record in read_metrics(root) if "reward" in record]
    assert [record["step"] for record in records] == list(range(1, last + 1))
    assert max_staleness or all(record["agreement_mean"] <= 1.0001 for record in records)
    assert all(record["staleness_max"] <= max_staleness for record in records)
    Ledger(root / "ledger.db").verify()


def replay(root: Path) -> int:
    """Whether every step comes out the same, bit for bit, from the rollouts that were written down."""
    from titan_rl import cli

    return cli.main(["replay", str(root), "--from", "1", "--to", str(last_step(root))])

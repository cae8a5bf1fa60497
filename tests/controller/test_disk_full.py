"""A full disk: one line that says what wants how much, nothing half done, and a run that goes on when there is room."""

import json
import resource
import signal
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import running
from faults import wait_for

from titan_rl.config.sections.schema import MetricsConfig
from titan_rl.controller.console.display import Display
from titan_rl.data.storage.files import DiskFull, LineFile, is_full, replace_text, unless_full, wanting
from titan_rl.data.types import Group, Provenance, Rollout, Turn
from titan_rl.diagnostics.ledger_report import read_ledger
from titan_rl.records.ledger.audit import flaws
from titan_rl.records.ledger.ledger import Ledger
from titan_rl.records.metrics import MetricsLog, read_metrics
from titan_rl.records.run_directory.events import EventLog, read_events
from titan_rl.records.steps.rollouts import has_rollouts, read_rollouts, write_rollouts
from titan_rl.records.trackers import Trackers


@contextmanager
def largest_file(num_bytes: int):
    """No file of this process grows beyond that: what a full disk does, without a disk to fill."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_line_that_was_cut_short_is_no_line_and_the_next_is_whole(tmp_path):
    path = tmp_path / "lines"
    lines = LineFile(path)
    lines.write("first")
    with largest_file(9), pytest.raises(DiskFull, match=rf"{path} wants 0.000 MB, and [\d,.]+ MB are left"):
        lines.write("second")
    with largest_file(9), pytest.raises(DiskFull):
        lines.write("third")
    lines.write("fourth")
    assert path.read_text() == "first\nsec\nfourth\n"


def test_a_line_that_a_process_died_in_is_ended_by_the_next(tmp_path):
    (tmp_path / "lines").write_text("whole\nha")
    LineFile(tmp_path / "lines").write("ä")
    assert (tmp_path / "lines").read_text() == "whole\nha\nä\n"


def test_metrics_stop_the_run_but_what_is_told_does_not(tmp_path):
    metrics, events, display = MetricsLog(tmp_path), EventLog(tmp_path), Display(1, tmp_path / "log.txt")
    with largest_file(0):
        events.write("died", name="generator 0")
        display.log("generator 0 died")
        with pytest.raises(DiskFull, match="metrics.jsonl wants"):
            metrics.write({"step": 1})
    metrics.write({"step": 1})
    events.write("started")
    assert list(read_metrics(tmp_path)) == [{"step": 1}] and [e["kind"] for e in read_events(tmp_path)] == ["started"]


def groups(length: int = 1000) -> list[Group]:
    numbers = np.arange(length, dtype=np.int32)
    wrote = np.where(numbers > 0, Provenance.MODEL, Provenance.TEMPLATE).astype(np.int8)
    rollout = Rollout("a", 0, numbers, wrote, np.zeros(length, np.float32), numbers, [Turn(0, length, "stop")], "ok")
    return [Group("a", [rollout])]


def test_rollouts_are_whole_or_absent_and_it_is_said_what_they_want(tmp_path):
    with largest_file(500), pytest.raises(DiskFull, match=r"step-000007.parquet wants 0.0\d\d MB, and"):
        write_rollouts(tmp_path, 7, groups())
    assert not has_rollouts(tmp_path, 7) and not list(tmp_path.iterdir()), "half a file would keep the disk full"
    write_rollouts(tmp_path, 7, groups())
    assert len(read_rollouts(tmp_path, 7)) == 1


def test_a_file_that_cannot_be_replaced_stays(tmp_path):
    replace_text(tmp_path / "config.json", "old")
    with largest_file(2), pytest.raises(DiskFull, match=r"config.json wants"):
        replace_text(tmp_path / "config.json", "new and longer")
    assert (tmp_path / "config.json").read_text() == "old" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("act", ["issue", "settle", "count_retry", "rewind"])
def test_the_ledger_does_a_thing_wholly_or_not_at_all(tmp_path, act):
    ledger = Ledger(tmp_path / "ledger.db")
    before = [f"{'a' * 100}{number}" for number in range(40)]
    ledger.issue(before, 4)
    ledger.settle({name: [None] * 4 for name in before[:20]}, 1)
    new = [f"{'b' * 100}{number}" for number in range(40)]
    acts = {
        "issue": lambda: ledger.issue(new, 4),
        "settle": lambda: ledger.settle({name: ["x" * 200] * 4 for name in before[20:]}, 2),
        "count_retry": lambda: [ledger.count_retry(name) for _ in range(20) for name in before],
        "rewind": lambda: ledger.rewind(0, 40),
    }
    [(pages,)] = ledger._connection.execute("pragma page_count")
    ledger._connection.execute(f"pragma max_page_count = {pages}")
    with pytest.raises(DiskFull, match=r"ledger.db wants 4.096 MB"):
        acts[act]()
    assert flaws(ledger.path) == []
    ledger.check(80)
    ledger._connection.execute("pragma max_page_count = 1000000")
    acts[act]()
    ledger.verify()
    assert flaws(ledger.path) == []


def test_a_full_disk_is_known_by_whatever_says_so():
    assert is_full(OSError(28, "No space left on device")) and is_full(
        sqlite3.OperationalError("database or disk is full")
    )
    assert is_full(
        RuntimeError("Traceback ...\nSafetensorError: IoError(Os { code: 28, message: No space left on device })")
    )
    with pytest.raises(DiskFull) as told, wanting(Path("model"), 9):
        raise OSError(28, "No space left on device")
    assert is_full(RuntimeError(f"trainer rank 0 raised DiskFull: {told.value} while the run went on"))
    assert not is_full(OSError(2, "no such file")) and not is_full(ValueError("full"))
    with pytest.raises(ValueError), unless_full():
        raise ValueError


def test_what_is_trained_but_not_written_down_is_not_saved(tmp_path):
    """The trainer is one step ahead of the records then: a checkpoint would bear the wrong number."""
    import asyncio

    from titan_rl.controller.loop.controller import Controller
    from titan_rl.controller.loop.rollout_queue import Collected
    from titan_rl.controller.loop.shutdown import Shutdown

    async def update(step):
        return []

    async def finish():
        pass

    async def save():
        saved.append(controller.progress.step)

    controller = object.__new__(Controller)
    controller.run_dir = SimpleNamespace(rollouts=tmp_path)
    controller.reporter = SimpleNamespace(enter=lambda *_: None)
    controller.progress = SimpleNamespace(step=6)
    finite = SimpleNamespace(weights_are_finite=True)
    checkpointing = SimpleNamespace(timeout=60.0, saved_step=3, writing=None, finish=finish)
    controller.shutdown = Shutdown(
        tmp_path, None, checkpointing, finite, controller.progress, save_last=save, log=print, export_dtype="auto"
    )
    controller._is_between_steps, saved = True, []
    asyncio.run(controller.rescue(RuntimeError("between two steps")))
    assert saved == [6]
    with largest_file(500), pytest.raises(DiskFull) as error:
        asyncio.run(controller.train(Collected(groups(), {}), update))
    asyncio.run(controller.rescue(error.value))
    assert saved == [6], "nothing more"


def test_a_full_disk_costs_tensorboard_its_numbers_and_is_said_once(tmp_path, capfd):
    said: list[str] = []
    trackers = Trackers(MetricsConfig(), tmp_path, {}, said.append)
    trackers.log({"step": 1, "loss": 1.0})
    with largest_file(120):
        for step in range(2, 40):
            trackers.log({"step": step, "loss": 1.0})
    trackers.close()
    assert said == ["metrics.tensorboard: OSError: [Errno 27] File too large; the run goes on without it"]
    assert capfd.readouterr().err == ""


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """An empty run directory that is a disk of its own."""
    root = tmp_path / "run"
    root.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", root], capture_output=True, text=True)
    if mount.returncode:
        pytest.skip(f"needs the right to mount a tmpfs: {mount.stderr.strip()}")
    yield root
    subprocess.run(["umount", "--lazy", root], check=True)


def fill(disk: Path, name: str = "ballast") -> Path:
    ballast = disk / name
    with suppress(OSError), open(ballast, "wb", buffering=0) as file:
        while file.write(bytes(1 << 16)):
            pass
    return ballast


def is_held_between_checkpoints(process: subprocess.Popen, root: Path) -> bool:
    """One that is half written would be removed, and leave room; and the last steps may be faster than the filling."""
    if not (root / "checkpoints" / "step-000004").is_dir():
        return False
    process.send_signal(signal.SIGSTOP)
    if any((root / "checkpoints").glob("writing-*")):
        process.send_signal(signal.SIGCONT)
        return False
    return True


@pytest.mark.slow
def test_a_run_stops_with_one_line_and_goes_on_when_there_is_room(small_disk):
    root, settings = small_disk, dict(training__steps=12, checkpoint__every=4)
    process = running.start(root, **settings)
    wait_for(lambda: is_held_between_checkpoints(process, root), "checkpoint")
    children = running.descendants(process.pid)
    ballast = fill(root)
    process.send_signal(signal.SIGCONT)
    assert process.wait(60) == 1 and running.gone(children), running.output(root)[-3000:]
    said = running.output(root)
    [*_, line] = [line for line in said.splitlines() if "the disk is full" in line]
    assert "wants" in line and "--resume" in line and "Traceback" not in said, said[-3000:]
    assert read_ledger(root)["flaws"] == []
    more = fill(root, "more")  # what the end of the run has left
    assert running.train(root, "--resume", **settings) == 2, "there is still no room"
    assert "the disk is full" in running.output(root) and "Traceback" not in running.output(root)
    ballast.unlink()
    more.unlink()
    assert running.train(root, "--resume", **settings) == 0, running.output(root)[-3000:]
    assert [record["step"] for record in read_metrics(root) if "reward" in record] == list(range(1, 13))
    assert all(event["same"] for event in read_events(root) if event["kind"] == "redone")
    assert read_ledger(root)["flaws"] == [] and read_ledger(root)["trained"] == 12 * 16
    assert json.loads((root / "summary.json").read_text())["why_ended"] == "completed"

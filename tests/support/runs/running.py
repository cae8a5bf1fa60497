"""Runs of the real thing, small: the command line in a process of its own, and trainers on recorded rollouts."""

import asyncio
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import warm_commands

from titan_rl.config.io.overrides import parse_overrides
from titan_rl.config.load import load_config
from titan_rl.controller.preflight.checks import resolve
from titan_rl.diagnostics.replay.replay import Plan, replay_steps
from titan_rl.mesh.processes.processes import MARK, running
from titan_rl.records.run_directory.rundir import RunDir

SMALL = {
    "task.name": "gcd",
    "task.options.max_value": 60,
    "rollout.prompts_per_step": 4,
    "rollout.group_size": 4,
    "rollout.max_new_tokens": 5,
    "generator.kv_cache_gib": 0.0625,  # engines fill it with zeros
    "training.seq_len": 512,
    "eval.prompts": 16,
    "optimizer.lr": 1e-3,
    "sft.steps": 10,
    "recovery.standby": False,  # its imports take longer than such a run
}
STEPS = 6
FINISHED = dict(
    sft__steps=60,
    rollout__prompts_per_step=8,
    training__steps=STEPS,
    checkpoint__every=2,
    checkpoint__keep_latest_k=3,
    eval__every=3,
)
"""Of the run that tests share (conftest.py)."""


def overrides(**settings) -> list[str]:
    """``training__steps=3`` becomes ``--training.steps 3``, on top of SMALL."""
    given = {name.replace("__", "."): value for name, value in settings.items()}
    data = given.get("data.file")
    # refused in a run on data
    unread = ("generator.", "rollout.", "task.")[: 0 if data is None else 2 if data == "task" else 3]
    unread += ("task.options",) if "task.name" in given else ()
    merged = {name: value for name, value in SMALL.items() if not name.startswith(unread)} | given
    return [
        part
        for name, value in merged.items()
        for part in (f"--{name}", str(value).lower() if isinstance(value, bool) else str(value))
    ]


def start(root: Path, *flags: str, **settings) -> subprocess.Popen:
    """A training run under way; its output goes to ``root``'s side."""
    return _start([sys.executable, *_training(root, *flags, **settings)], root)


def _training(root: Path, *flags: str, **settings) -> list[str]:
    return ["-m", "titan_rl.train", "--run.dir", str(root), *flags, *overrides(**settings)]


def _start(command: list[str], root: Path) -> subprocess.Popen:
    with open(root.parent / f"{root.name}.out", "w") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)


def output(root: Path) -> str:
    return (root.parent / f"{root.name}.out").read_text()


def train(root: Path, *flags: str, timeout: float = 300, on_one_core: bool = False, **settings) -> int:
    """A whole training run; its exit code."""
    pinned = ["taskset", "--cpu-list", str(min(os.sched_getaffinity(0)))] if on_one_core else []
    return _start(pinned + warm_commands.command(*_training(root, *flags, **settings)), root).wait(timeout)


def descendants(pid: int) -> set[int]:
    """All processes below one, as /proc tells, and those of a run there that were forked by servers of the tests."""
    found = below(pid)
    marks = {mark for child in found if (mark := mark_of(child))}
    return found.union(*(running({MARK: mark}) for mark in marks))


def below(pid: int) -> set[int]:
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the thread, or its process, is gone
            for child in map(int, task.read_text().split()):
                found |= {child} | below(child)
    return found


def mark_of(pid: int) -> str:
    """Of the run that a process belongs to; empty without one."""
    with suppress(OSError):
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return next((v.partition(b"=")[2].decode() for v in variables if v.startswith(f"{MARK}=".encode())), "")
    return ""


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except (FileNotFoundError, ProcessLookupError):  # it is gone, or goes while it is read
        return ""


def scratch_folders(pids: set[int]) -> list[Path]:
    """Of a run, as its reaper was told."""
    [command] = (command_line(pid) for pid in pids if "processes.reaper" in command_line(pid))
    return [Path(folder) for folder in command.split()[4:]]


def wait_for_step(root: Path, step: int, timeout: float = 240) -> None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        metrics = root / "metrics.jsonl"
        if metrics.exists() and f'"step": {step}, "reward"' in metrics.read_text():
            return
        time.sleep(0.05)
    raise AssertionError(f"step {step} was not reached: {output(root)[-2000:]}")


def gone(pids: set[int], timeout: float = 30) -> bool:
    deadline = time.monotonic() + timeout
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def replay(root: Path, first: int, last: int, **settings) -> list:
    """StepMetrics of fresh trainer actors on a run's recorded rollouts of steps ``first`` to ``last``, without SFT."""
    config = load_config(None, parse_overrides(overrides(**settings)))
    return asyncio.run(replay_steps(Plan(RunDir(root), resolve(config), first, last)))


LISTENS = {"/proc/net/unix": "00010000", "/proc/net/tcp": "0A", "/proc/net/tcp6": "0A"}


def listening(pids: set[int], table: str) -> list[str]:
    """Addresses at which these processes listen."""
    opened = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            try:
                opened.add(os.readlink(descriptor))
            except OSError:
                continue
    rows = [line.split() for line in Path(table).read_text().splitlines()[1:]]
    if table == "/proc/net/unix":
        return [row[7] for row in rows if row[3] == LISTENS[table] and f"socket:[{row[6]}]" in opened]
    return [row[1] for row in rows if row[3] == LISTENS[table] and f"socket:[{row[9]}]" in opened]

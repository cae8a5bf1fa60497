"""A run's processes as targets of faults: found by ``pids.json``, in /proc, and by marks in their environment."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from titan_rl.mesh.processes.fault_injection import CHAOS_FOLDER
from titan_rl.mesh.processes.processes import GONE, MARK, process_state

_MODULES = {
    "scorer": b"titan_rl.environments.scoring.scorer",
    "reward_model": b"titan_rl.environments.scoring.reward_model",
}
"""What the processes below a verifier run."""


@dataclass(frozen=True)
class Target:
    name: str
    """The run's name for it, such as ``trainer rank 0``."""
    pid: int


def is_well(pid: int) -> bool:
    """Whether a process is alive and not stopped."""
    return process_state(pid) not in (GONE, "T")


def is_running(pid: int | None) -> bool:
    """Whether it, or one right below it, is on a core or waits for one."""
    return pid is not None and any(process_state(each) == "R" for each in (pid, *_children(pid)))


def _children(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # it ended meanwhile
            yield from map(int, task.read_text().split())


def child_of(verifier: int, kind: str) -> int | None:
    """The living process of that kind below a verifier. ``pids.json`` is out of date once it was replaced."""
    for child in _children(verifier):
        with suppress(OSError):  # it ended meanwhile
            if _MODULES[kind] in Path(f"/proc/{child}/cmdline").read_bytes() and process_state(child) != GONE:
                return child
    return None


def named_processes(root: Path) -> dict[str, int]:
    """The run's actor processes by name, from ``pids.json``; without scorers."""
    with suppress(OSError, ValueError):
        names = json.loads((root / "pids.json").read_text())
        return {name: int(pid) for pid, name in names.items() if not name.startswith("scorer")}
    return {}


def targets_of(root: Path, kind: str) -> list[Target]:
    """Processes of a kind (any but the controller) that are alive and not stopped."""
    named = named_processes(root)
    if kind in _MODULES:
        verifiers = [(name, pid) for name, pid in named.items() if _is_of("verifier", name)]
        pairs = [(f"{kind} {_number(name)}", child_of(pid, kind)) for name, pid in verifiers]
    else:
        pairs = [(name, pid) for name, pid in named.items() if _is_of(kind, name)]
    return [Target(name, pid) for name, pid in sorted(pairs) if pid is not None and is_well(pid)]


def _is_of(kind: str, name: str) -> bool:
    return name.split()[0] == kind


def _number(name: str) -> str:
    return name.split()[1]


def below_verifier(root: Path, name: str, kind: str) -> int | None:
    """The process of that kind that verifier N has now, of ``verifier N`` or of ``scorer N``."""
    pid = named_processes(root).get(f"verifier {_number(name)}")
    return None if pid is None else child_of(pid, kind)


class Members:
    """All processes of a run, lost ones included."""

    def __init__(self, orders: Path) -> None:
        """``orders``: the folder that TITAN_RL_CHAOS names for this run, and for no other."""
        self._folder_mark = f"{CHAOS_FOLDER}={orders}".encode()
        self._marks: set[bytes] = set()

    def pids(self) -> list[int]:
        """Live pids. Scorers carry only the mark of their mesh, which is learnt from the other processes."""
        environments: dict[int, set[bytes]] = {}
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it ended meanwhile, or belongs to another user
                variables = set((process / "environ").read_bytes().split(b"\0"))
                environments[int(process.name)] = variables
                if self._folder_mark in variables:
                    self._marks |= {variable for variable in variables if variable.startswith(f"{MARK}=".encode())}
        marks = {self._folder_mark} | self._marks
        return [pid for pid, variables in environments.items() if variables & marks and process_state(pid) != GONE]

    def kill(self) -> None:
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

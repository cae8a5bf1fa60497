"""Training run in a separate process: start, resume, observe and end it with its children."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from titan_rl.config.io.overrides import override_arguments
from titan_rl.diagnostics.chaos.schedule import PHASES
from titan_rl.diagnostics.chaos.targets import Members
from titan_rl.mesh.processes.fault_injection import CHAOS_FOLDER

EVENTS = "events.jsonl"
_POLL_SECONDS = 0.05
_ORPHANS_SECONDS = 60.0
_LEFT_SECONDS = 10.0
"""How long the processes of a run may outlive it."""


class TimedOut(RuntimeError):
    """The time limit of the whole command was reached."""


class RunProcess:
    """Process of ``titan_rl.train`` in one run directory. Errors of every wait: TimedOut."""

    def __init__(
        self, root: Path, config_file: str | None, overrides: dict[str, dict[str, Any]], deadline: float
    ) -> None:
        """``deadline``: of the whole command, on the monotonic clock."""
        self.root, self.deadline = root, deadline
        self.output = root.parent / f"{root.name}.out"
        self.orders = (root.parent / f"{root.name}-orders").absolute()
        self.members = Members(self.orders)
        self._process: subprocess.Popen[bytes] | None = None
        self.num_starts = 0
        self.seconds_to_first_step = 0.0
        """Of the first start."""
        self.started = 0.0
        """When the current process was started, in seconds since 1970."""
        self._events = _EventTail(root)
        file = ["--job.config_file", config_file] if config_file else []
        arguments = override_arguments(overrides | {"run": overrides.get("run", {}) | {"dir": str(root)}})
        self._command = [sys.executable, "-m", "titan_rl.train", *file, *arguments]

    def start(self) -> None:
        """Start the run, or resume it from the second time on."""
        self.orders.mkdir(parents=True, exist_ok=True)
        resume = ["--resume"] if self.num_starts else []
        self.started, self.num_starts = time.time(), self.num_starts + 1
        with open(self.output, "a", opener=_private) as output:
            self._process = subprocess.Popen(
                self._command + resume,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=os.environ | {CHAOS_FOLDER: str(self.orders)},
                start_new_session=True,
            )

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The controller's process, of a run that was started."""
        assert self._process is not None, "start() comes first"
        return self._process

    @property
    def has_ended(self) -> bool:
        if time.monotonic() > self.deadline:
            raise TimedOut
        return self.process.poll() is not None

    @property
    def is_writing_checkpoint(self) -> bool:
        """A checkpoint of the current process: what a killed one left behind does not count."""
        began = (int(folder.name.rpartition("-")[2]) for folder in self.root.glob("checkpoints/writing-*-*"))
        return any(nanoseconds / 1e9 > self.started for nanoseconds in began)

    def position(self) -> tuple[int, str]:
        """Steps done, and the phase, which is none of PHASES until the current process is in its first step."""
        path = self.root / "phase"
        with suppress(OSError, ValueError):
            if path.stat().st_mtime > self.started:
                step, phase = path.read_text().split()
                if phase in PHASES:
                    self.seconds_to_first_step = self.seconds_to_first_step or time.time() - self.started
                return int(step), phase
        return -1, ""

    def events(self) -> list[dict[str, Any]]:
        """Events of the run so far, over all its starts."""
        return self._events.read()

    def learn_marks(self) -> None:
        """Learn the marks by which scorers are found. Call it before a controller's death, while its processes live."""
        self.members.pids()

    def await_orphans_gone(self, since: float) -> float | None:
        """Seconds from ``since`` until no process of the run was left; None if some had to be killed from here."""
        self.process.wait()
        end = time.monotonic() + _ORPHANS_SECONDS
        while self.members.pids():
            if time.monotonic() > end or time.monotonic() > self.deadline:
                self._end_members()
                return None
            time.sleep(_POLL_SECONDS)
        return time.time() - since

    def await_end(self, meanwhile: Callable[[], None] = lambda: None) -> int:
        """The exit code."""
        while not self.has_ended:
            meanwhile()
            time.sleep(_POLL_SECONDS)
        return self.process.returncode

    def left_behind(self) -> list[int]:
        """Processes that still exist a while after the run's end. They are killed."""
        end = time.monotonic() + _LEFT_SECONDS
        while (left := self.members.pids()) and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
        self._end_members()
        return sorted(left)

    def end(self) -> None:
        """Clean up: leave no process, and no orders."""
        if self._process is not None and self._process.poll() is None:
            self.learn_marks()
            self._process.kill()
            self._process.wait()
        self._end_members()
        shutil.rmtree(self.orders, ignore_errors=True)

    def _end_members(self) -> None:
        end = time.monotonic() + _LEFT_SECONDS
        while self.members.pids() and time.monotonic() < end:
            self.members.kill()
            time.sleep(_POLL_SECONDS)

    def last_line(self) -> str:
        lines = self.output.read_text(errors="replace").strip().splitlines() if self.output.exists() else []
        return lines[-1] if lines else ""


class _EventTail:
    """The events of a running run; each read adds what is new."""

    def __init__(self, root: Path) -> None:
        self._path = root / EVENTS
        self._events: list[dict[str, Any]] = []
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        with suppress(OSError), open(self._path, "rb") as file:
            file.seek(self._offset)
            complete, end, _ = file.read().rpartition(b"\n")  # the last line may be half written
            self._offset += len(complete + end)
            for line in complete.splitlines():
                with suppress(ValueError):  # the controller was killed while writing this line
                    self._events.append(json.loads(line))
        return self._events


def _private(path: str, flags: int) -> int:
    """An opener: nobody else may read what a run says."""
    return os.open(path, flags, 0o600)

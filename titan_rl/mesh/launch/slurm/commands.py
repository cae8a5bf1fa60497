"""Slurm's own commands. What they say is read as plain text: the form of its JSON has changed between releases."""

import asyncio
import getpass
import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from titan_rl.config.load import ConfigError

_SECONDS = 30.0
_PERIOD = 1.0
"""Between two looks at the queue, whatever the number of hosts: its server is everybody's."""
_OTHERS = ("SLURM_", "SBATCH_", "TITAN_RL_", "HYPERACTOR_")
_KEPT = ("SLURM_CONF",)


class SlurmError(RuntimeError):
    """Slurm refused, in its own words."""


@dataclass(frozen=True)
class JobState:
    state: str
    """As Slurm calls it: PENDING, RUNNING, COMPLETING, ..."""
    node: str
    """Empty before it has one."""

    @property
    def is_waiting(self) -> bool:
        return self.state in ("PENDING", "CONFIGURING", "REQUEUED", "SUSPENDED", "STOPPED")

    @property
    def is_running(self) -> bool:
        return self.state == "RUNNING"


def check_commands(feature: str) -> None:
    """Check for Slurm's commands on PATH. ``feature``: for messages. Errors: ConfigError."""
    for name in ("sbatch", "squeue", "scancel"):
        if shutil.which(name) is None:
            raise ConfigError(
                f"{feature} needs Slurm, and there is no {name} on PATH: go to a machine that submits jobs"
            )


def job_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Of a new job: without what this process has as a part of another job, or of a run."""
    return {key: value for key, value in environment.items() if key in _KEPT or not key.startswith(_OTHERS)}


def submit(script: Path, environment: Mapping[str, str]) -> int:
    """The number of the new job. Errors: SlurmError."""
    output = _ask("sbatch", "--parsable", str(script), environment=environment)
    return int(output.split(";")[0])


def cancel(*what: str) -> None:
    """Jobs, by number or by scancel's options. Errors: SlurmError."""
    _ask("scancel", *what)


def cancel_named(name: str) -> None:
    """All of this user's of that name. Errors: SlurmError."""
    cancel(f"--user={getpass.getuser()}", f"--name={name}")


def list_jobs() -> dict[int, JobState]:
    """Those of this user that Slurm still knows. Errors: SlurmError."""
    output = _ask("squeue", "--noheader", "--states=all", f"--user={getpass.getuser()}", "--format=%A|%T|%N")
    return parse_jobs(output)


def parse_jobs(output: str) -> dict[int, JobState]:
    """Of lines of ``number|state|node``."""
    rows = [line.strip().split("|") for line in output.splitlines() if line.count("|") == 2]
    return {int(number): JobState(state, node) for number, state, node in rows if number.isdecimal()}


def _ask(*command: str, environment: Mapping[str, str] = os.environ) -> str:
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SlurmError(f"{command[0]}: {error}") from None
    if done.returncode:
        raise SlurmError(" ".join(done.stderr.split()) or f"{command[0]} ended with {done.returncode}")
    return done.stdout


class Queue:
    """Looked at for all hosts at once."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._begun = float("-inf")
        self._jobs: dict[int, JobState] = {}

    async def look(self) -> dict[int, JobState]:
        """The jobs as they are after this was asked. Errors: SlurmError."""
        requested_at = time.monotonic()
        async with self._lock:
            if self._begun <= requested_at:
                await asyncio.sleep(self._begun + _PERIOD - requested_at)
                begun = time.monotonic()
                self._jobs = await asyncio.to_thread(list_jobs)
                self._begun = begun
        return self._jobs

"""Finding a run's processes by a mark in their environment, so that none is left behind, whoever lost track of it."""

import os
import signal
import uuid
from contextlib import suppress
from pathlib import Path

MARK = "TITAN_RL_MESH"


def new_mark() -> dict[str, str]:
    """Environment of all processes of one mesh; they hand it on to what they start."""
    return {MARK: uuid.uuid4().hex}


def running(mark: dict[str, str]) -> list[int]:
    """Ids of the processes that carry the mark and are not dead yet."""
    wanted = f"{MARK}={mark[MARK]}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # gone meanwhile, or somebody else's
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z" and wanted in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
    return found


def kill(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

"""A run's processes: watched, and found by a mark in their environment, so that none is left behind."""

import asyncio
import os
import signal
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

MARK = "TITAN_RL_MESH"


def new_mark() -> dict[str, str]:
    """Environment of all processes of one mesh; they hand it on to what they start."""
    return {MARK: uuid.uuid4().hex}


def running(mark: dict[str, str]) -> list[int]:
    """Ids of the processes that carry the mark and are not dead."""
    wanted = f"{MARK}={mark[MARK]}".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended meanwhile, or belongs to another user
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z" and wanted in (process / "environ").read_bytes().split(b"\0"):
                found.append(int(process.name))
    return found


def watch(pid: int, ended: Callable[[], None]) -> None:
    """Have ``ended`` called as soon as a process is gone, for whatever reason: the kernel tells. In an event loop."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        ended()
        return
    loop = asyncio.get_running_loop()

    def on_end() -> None:
        loop.remove_reader(descriptor)
        os.close(descriptor)
        ended()

    loop.add_reader(descriptor, on_end)


def is_stopped(pid: int) -> bool:
    """By a signal, such as SIGSTOP."""
    with suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] in "Tt"
    return False


def kill(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

"""A run's processes: watched, and found by a mark in their environment, so that none is left behind."""

import asyncio
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol

MARK = "TITAN_RL_MESH"
GONE = "gone"
_TRACKER = b"multiprocessing.resource_tracker"
_TRACKER_SECONDS = 1.0
"""How long before the end of its time even a tracker is killed."""


def new_mark() -> dict[str, str]:
    """Environment of all processes of one mesh; they hand it on to what they start."""
    return {MARK: uuid.uuid4().hex}


def running(mark: dict[str, str]) -> list[int]:
    """Ids of the processes that carry the mark and are not dead."""
    entry = f"{MARK}={mark[MARK]}".encode()
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended meanwhile, or belongs to another user
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z" and entry in (process / "environ").read_bytes().split(b"\0"):
                pids.append(int(process.name))
    return pids


def watch(pid: int, ended: Callable[[], None]) -> None:
    """Call ``ended`` as soon as a process is gone (pidfd), in the running event loop."""
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


def parents(pid: int) -> Iterator[int]:
    """Ancestors of a process, nearest first, as far as visible."""
    while pid > 1:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return
        if pid:
            yield pid


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped, such as by SIGSTOP."""
    with suppress(OSError), open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] in "Tt"
    return False


def is_gone(pid: int) -> bool:
    """Whether a process is dead, reaped or not; False for 0."""
    return pid > 0 and process_state(pid) == GONE


def process_state(pid: int) -> str:
    """State as in /proc: R, S, D are alive, T is stopped, by a signal or a debugger; ``gone`` if it is dead."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:  # looked at often
            state = file.read(1 << 10).rpartition(b")")[2].split()[0].decode()
    except OSError:
        return GONE
    return GONE if state in "ZX" else state.upper()


def memory_bytes(pid: int) -> int:
    """Resident bytes of a process, shared pages included; 0 if it is dead."""
    with suppress(OSError, ValueError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def kill(pids: Iterable[int]) -> None:
    send(pids, signal.SIGKILL)


def send(pids: Iterable[int], number: int) -> None:
    """Send a signal to the processes that exist."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def ending(mark: dict[str, str], seconds: float, sparing: Iterable[int] = ()) -> Iterator[None]:
    """Kill the processes that carry the mark, but not this one, and not those to spare: to be iterated, with a pause
    each time.

    Over when none is left, or after ``seconds``. Python's resource trackers come last: they end by themselves once
    those that they work for have, and remove what these left in shared memory. One that is stopped is woken for that.
    """
    deadline, spared = time.monotonic() + seconds, {os.getpid(), *sparing}
    while (remaining := set(running(mark)) - spared) and time.monotonic() < deadline:
        is_late = time.monotonic() > deadline - _TRACKER_SECONDS
        trackers = set() if is_late else set(filter(_is_tracker, remaining))
        send(trackers, signal.SIGCONT)
        kill(remaining - trackers)
        yield


def _is_tracker(pid: int) -> bool:
    with suppress(OSError):
        return _TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


class ProcessTable(Protocol):
    """Process table of one host."""

    def watch(self, pid: int, ended: Callable[[], None]) -> None:
        """As ``processes.watch``."""
        ...

    def signal(self, pids: Iterable[int], number: int) -> None:
        """Those that are gone are passed over."""
        ...

    def is_stopped(self, pid: int) -> bool:
        """As far as is known here."""
        ...

    def is_gone(self, pid: int) -> bool:
        """As far as is known here."""
        ...


class LocalProcesses:
    """Process table of this host."""

    def watch(self, pid: int, ended: Callable[[], None]) -> None:
        watch(pid, ended)

    def signal(self, pids: Iterable[int], number: int) -> None:
        send(pids, number)

    def is_stopped(self, pid: int) -> bool:
        return is_stopped(pid)

    def is_gone(self, pid: int) -> bool:
        return is_gone(pid)


LOCAL = LocalProcesses()

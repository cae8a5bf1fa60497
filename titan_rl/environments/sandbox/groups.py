"""Control group (cgroup v2) of a sandbox box: the kernel's bounds on its memory and processes.

    cgroup that this process is in, or one above it that it may divide
      └─ titan_rl.NAMESPACE.PID.START.NUMBER    one for each box: bubblewrap, the zygote, the program that runs

The zygote watches all the same. A group ends what grows between two of its looks, and counts what is no process's. It
has no part in processor time: boxes would then share the cores by group, and a program that takes long would no longer
give way to short ones in other boxes.
"""

import atexit
import errno
import itertools
import os
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

from titan_rl.environments.sandbox.program import Limits

_CONTROLLERS = frozenset({"memory", "pids"})
_NAME = re.compile(r"titan_rl\.(?P<namespace>\d+)\.(?P<pid>\d+)\.(?P<start>\d+)\.\d+")
_ENTER = 'echo 0 > "$0/cgroup.procs" && exec "$@"'
_TRIAL_LIMITS = Limits()
_REMOVE_SECONDS, _PAUSE_SECONDS = 0.2, 0.005
_LAST_SECONDS = 2.0


@dataclass(frozen=True)
class CgroupRoot:
    """Parent folder of this process's groups."""

    folder: Path | None
    """None: nowhere."""
    reason: str = ""

    def __str__(self) -> str:
        if self.folder is None:
            return f"a watcher alone, every 20 ms (no control groups: {self.reason})"
        return f"the kernel (cgroup v2 at {self.folder}), and a watcher every 20 ms"


class Bounds(Protocol):
    """Bounds that a group keeps, in bytes and processes."""

    @property
    def memory(self) -> int: ...
    @property
    def disk(self) -> int: ...
    @property
    def processes(self) -> int: ...


class Group:
    """Control group of one box. Errors: OSError where the kernel refuses."""

    def __init__(self, root: Path):
        _remove_left()
        self.folder = root / f"titan_rl.{_namespace()}.{os.getpid()}.{_start_of(os.getpid())}.{next(_numbers)}"
        self.folder.mkdir(mode=0o700)
        _made.add(self.folder)
        self._box: tuple[int, int] | None = None
        self._bounds: tuple[int, int] | None = None
        self._ended = 0

    def entry_command(self, command: list[str]) -> list[str]:
        """Command that enters the group before it runs."""
        return ["/bin/sh", "-c", _ENTER, str(self.folder), *command]

    def take(self, pid: int) -> None:
        """Move a process into the group, whose children are then made in it."""
        _write(self.folder / "cgroup.procs", str(pid))

    def bound(self, limits: Bounds) -> None:
        """Bound memory (files included) and processes of a program, on top of the empty box."""
        if self._box is None:
            self._box = int(_read(self.folder / "memory.current")), int(_read(self.folder / "pids.current"))
            with suppress(FileNotFoundError):  # a kernel that does not swap
                _write(self.folder / "memory.swap.max", "0")
        memory, processes = self._box
        bounds = memory + limits.memory + limits.disk, processes + limits.processes
        if bounds != self._bounds:
            for name, most in zip(("memory.max", "pids.max"), bounds, strict=True):
                _write(self.folder / name, str(most))
            self._bounds = bounds

    def has_ended_any(self) -> bool:
        """Whether the kernel has killed a process for its memory since the last call."""
        counts = dict(line.split() for line in _read(self.folder / "memory.events").splitlines())
        before, self._ended = self._ended, int(counts["oom_kill"])
        return self._ended > before

    def close(self) -> None:
        """Kill all in the group and remove it; a slow end is cleaned up later."""
        _remove(self.folder, _REMOVE_SECONDS)


_numbers = itertools.count()
_made: set[Path] = set()
"""And not removed yet."""
_closed: set[Path] = set()
"""And not removed, since something in them has not ended yet."""


def new_group() -> Group | None:
    """New group; None where control groups are unavailable. Errors: OSError."""
    folder = cgroup_root().folder
    return None if folder is None else Group(folder)


@cache
def cgroup_root() -> CgroupRoot:
    """Find the parent folder for groups, by trial; groups of dead processes are removed there."""
    reasons = []
    for folder in candidates(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text()):
        try:
            try_out(folder)
        except OSError as error:
            reasons.append(f"{folder}: {error.strerror or error}")
            continue
        sweep(folder)
        atexit.register(_leave, os.getpid())
        return CgroupRoot(folder)
    return CgroupRoot(None, reasons[0] if reasons else "no cgroup v2 is mounted here")


def candidates(mounts: str, membership: str) -> list[Path]:
    """Folders of this process's group and its parents, by ``/proc/self/mountinfo`` and ``/proc/self/cgroup``."""
    own = next((line.removeprefix("0::") for line in membership.splitlines() if line.startswith("0::")), None)
    if own is None or "/.." in own:  # outside of what this process's namespace shows
        return []
    for line in mounts.splitlines():
        mount, _, kind = line.partition(" - ")
        root, point = mount.split()[3:5]
        if kind.split()[0] == "cgroup2" and Path(own).is_relative_to(root):
            top = Path(re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), point))
            folder = top / Path(own).relative_to(root)
            return [folder, *(above for above in folder.parents if above.is_relative_to(top))]
    return []


def try_out(folder: Path) -> None:
    """Make a group there, bound it, put a process in, and remove it. Errors: OSError for whatever does not work.

    A group with processes of its own cannot be divided, and nobody's processes are moved elsewhere for that.
    """
    if missing := _CONTROLLERS - set(_read(folder / "cgroup.controllers").split()):
        raise OSError(f"it has no controller of {' and '.join(sorted(missing))}")
    if _CONTROLLERS - set(_read(folder / "cgroup.subtree_control").split()):
        try:
            _write(folder / "cgroup.subtree_control", " ".join(f"+{name}" for name in sorted(_CONTROLLERS)))
        except OSError as error:
            busy = "it has processes of its own, so that it cannot be divided"
            raise OSError(busy if error.errno == errno.EBUSY else error.strerror) from error
    group = Group(folder)
    try:
        group.bound(_TRIAL_LIMITS)
        group.has_ended_any()
        if not _read(group.folder / "pids.max").strip().isdigit():
            raise OSError("a group there keeps no bound")
        completed = subprocess.run(group.entry_command(["/bin/sh", "-c", ":"]), capture_output=True, text=True)
        if completed.returncode:
            raise OSError(completed.stderr.strip() or "no process can be put into a group there")
    finally:
        group.close()
    if group.folder.exists():
        raise OSError("a group that was made there cannot be removed")


def sweep(folder: Path) -> None:
    """Remove groups of processes that are gone, of this process's namespace, with whatever is in them."""
    for group in _groups(folder):
        match = _NAME.fullmatch(group.name)
        is_known = match is not None and int(match["namespace"]) == _namespace()
        if match and is_known and _start_of(int(match["pid"])) != int(match["start"]):
            _remove(group, _REMOVE_SECONDS)


def sweep_own_root() -> None:
    """Remove groups of dead processes below this process's own root, if it has one."""
    if cgroup_root.cache_info().currsize and (folder := cgroup_root().folder) is not None:
        sweep(folder)


def _groups(folder: Path) -> Iterator[Path]:
    with suppress(OSError):
        yield from [group for group in folder.iterdir() if group.name.startswith("titan_rl.")]


def _leave(pid: int) -> None:
    """At the end of the process that made them, and not of a fork of it."""
    if os.getpid() == pid:
        for folder in list(_made):
            _remove(folder, _LAST_SECONDS)


def _remove_left() -> None:
    """Those that were closed, when what was in them took long to end."""
    for folder in list(_closed):
        _remove(folder, 0.0)


def _remove(folder: Path, seconds: float) -> None:
    """With whatever is in it."""
    _closed.add(folder)
    end = time.monotonic() + seconds
    with suppress(OSError):  # Linux 5.14 has it; a box ends with bubblewrap as well
        _write(folder / "cgroup.kill", "1")
    while True:
        try:
            folder.rmdir()
        except FileNotFoundError:
            pass
        except OSError:
            if time.monotonic() < end:
                time.sleep(_PAUSE_SECONDS)
                continue
            return
        _made.discard(folder)
        _closed.discard(folder)
        return


def _namespace() -> int:
    """Of processes' numbers: another one's are not known here."""
    return os.stat("/proc/self/ns/pid").st_ino


def _start_of(pid: int) -> int | None:
    """When a process began, as the kernel counts; None: it is gone."""
    with suppress(OSError):
        return int(_read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()[19])
    return None


def _read(path: Path) -> str:
    return path.read_text()


def _write(path: Path, text: str) -> None:
    """At once, as the kernel takes it."""
    number = os.open(path, os.O_WRONLY)
    try:
        os.write(number, text.encode())
    finally:
        os.close(number)

"""Isolation of a box: file system of interpreter and libraries alone, no network, own processes."""

import os
import shutil
import sys
from pathlib import Path

from titan_rl.environments.sandbox.program import SandboxFailed

_LIBRARIES = ("/usr/lib", "/usr/lib64", "/lib", "/lib64")
_DEVICES = ("/dev/null", "/dev/random", "/dev/urandom")
"""Not /dev/zero: mapped and shared, it is memory that belongs to no process."""
_SCRIPTS = Path(__file__).with_name("inside")
_INSIDE = "/inside"
_ALONE = "-B -E -s -S"
"""No variables, no site-packages, no compiled files."""


def python_folder() -> Path:
    """Where the interpreter is in a box; whose folder it is here, nobody may enter there."""
    base = Path(sys.base_prefix).resolve()
    return base if base == Path("/usr") else Path("/python")


def command(control: int, seccomp: int) -> list[str]:
    """Command that starts a box for programs.

    ``control``, ``seccomp``: descriptors of its connection and filter. Errors: SandboxFailed.
    """
    folders = [
        *("--perms", "0755", "--dir", "/usr"),  # which root's bubblewrap would make for root alone
        *(flag for path in _LIBRARIES for flag in mounted(Path(path))),
        *("--tmpfs", "/tmp"),
    ]
    return box_command("zygote.py", control, seccomp, folders)


def box_command(script: str, control: int, seccomp: int, folders: list[str]) -> list[str]:
    """Command that starts a script of ours. ``folders``: flags of what it sees besides. Errors: SandboxFailed."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise SandboxFailed("bubblewrap is not installed")
    base, home = Path(sys.base_prefix).resolve(), python_folder()
    is_root = os.geteuid() == 0
    walls = (
        "--unshare-ipc --unshare-pid --unshare-net --unshare-uts --unshare-cgroup-try --die-with-parent --new-session"
    )
    # root's processes are bounded by no limit on their number, so it becomes nobody inside, where all is mounted
    user = "--cap-drop ALL --cap-add CAP_SETUID --cap-add CAP_SETGID" if is_root else "--unshare-user --cap-drop ALL"
    return [
        *(bwrap, *walls.split(), *user.split()),
        *("--hostname", "box"),  # the host's own is nobody's business
        *("--proc", "/proc", "--tmpfs", "/dev", "--symlink", "/tmp", "/dev/shm"),
        *folders,
        *("--ro-bind", str(base), str(home), "--setenv", "LD_LIBRARY_PATH", f"{home}/lib"),
        *(flag for path in _DEVICES for flag in ("--dev-bind", path, path)),
        *("--ro-bind", str(_SCRIPTS), _INSIDE),
        *("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/"),
        *("--", f"{home}/bin/python{sys.version_info.major}.{sys.version_info.minor}", *_ALONE.split()),
        *(f"{_INSIDE}/{script}", str(control), str(seccomp), "drop" if is_root else "keep"),
    ]


def mounted(path: Path) -> list[str]:
    """As it is here: Debian's /lib is a link."""
    if path.is_symlink():
        return ["--symlink", os.readlink(path), str(path)]
    return ["--ro-bind", str(path), str(path)] if path.is_dir() else []

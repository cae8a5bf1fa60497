"""The box's walls: a file system of the interpreter and its libraries alone, no network, nobody's processes."""

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


def command(control: int, seccomp: int) -> list[str]:
    """Starts a box; the descriptors are those of its connection and of the filter. Errors: SandboxFailed."""
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise SandboxFailed("bubblewrap is not installed")
    base = Path(sys.base_prefix).resolve()
    home = base if base == Path("/usr") else Path("/python")  # whose folder it is here, nobody may enter there
    is_root = os.geteuid() == 0
    walls = (
        "--unshare-ipc --unshare-pid --unshare-net --unshare-uts --unshare-cgroup-try --die-with-parent --new-session"
    )
    # root's processes are bounded by no limit on their number, so it becomes nobody inside, where all is mounted
    user = "--cap-drop ALL --cap-add CAP_SETUID --cap-add CAP_SETGID" if is_root else "--unshare-user --cap-drop ALL"
    return [
        *(bwrap, *walls.split(), *user.split()),
        *("--hostname", "box"),  # the host's own is nobody's business
        *("--perms", "0755", "--dir", "/usr"),  # which root's bubblewrap would make for root alone
        *(flag for path in _LIBRARIES for flag in _mounted(Path(path))),
        *("--ro-bind", str(base), str(home), "--setenv", "LD_LIBRARY_PATH", f"{home}/lib"),
        *("--proc", "/proc", "--tmpfs", "/dev", "--symlink", "/tmp", "/dev/shm"),
        *(flag for path in _DEVICES for flag in ("--dev-bind", path, path)),
        *("--tmpfs", "/tmp", "--ro-bind", str(_SCRIPTS), _INSIDE),
        *("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/"),
        *("--", f"{home}/bin/python{sys.version_info.major}.{sys.version_info.minor}", *_ALONE.split()),
        *(f"{_INSIDE}/zygote.py", str(control), str(seccomp), "drop" if is_root else "keep"),
    ]


def _mounted(path: Path) -> list[str]:
    """As it is here: Debian's /lib is a link."""
    if path.is_symlink():
        return ["--symlink", os.readlink(path), str(path)]
    return ["--ro-bind", str(path), str(path)] if path.is_dir() else []

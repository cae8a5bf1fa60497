"""Which host this process is on, and at which of its addresses the run's other hosts reach it.

Who starts a host may say both in its environment. Two processes are on one host if they can open each other's files
through /proc: the same kernel and the same process namespace. Hostnames do not tell that: containers share them.
"""

import os
from pathlib import Path

HOST_ID, HOST_ADDRESS = "TITAN_RL_HOST_ID", "TITAN_RL_HOST_ADDRESS"
_LOOPBACK = "127.0.0.1"


def host_id() -> str:
    """Equal for processes of one host."""
    return os.environ.get(HOST_ID) or f"{_boot()}.{os.stat('/proc/self/ns/pid').st_ino}"


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def has_address() -> bool:
    """Whether this host was told one, since there are others that may want to reach it."""
    return bool(os.environ.get(HOST_ADDRESS))


def host_address() -> str:
    """Of the one interface that this process may listen at. Loopback, unless the host was told another."""
    return os.environ.get(HOST_ADDRESS) or _LOOPBACK

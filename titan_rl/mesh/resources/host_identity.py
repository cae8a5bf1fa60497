"""Identity of a host: equal for two processes that can map each other's memory.

A name does not tell: containers of one machine may share it, and two machines may have the same.
"""

import os
from functools import cache
from pathlib import Path

HOST_ID = "TITAN_RL_HOST_ID"
"""Environment variable: an identity of one's own choice, to have several hosts on one machine."""


def host_identity() -> str:
    """Of this process's host: what it was told, or the kernel since it booted and the namespace in which /proc shows
    processes."""
    return os.environ.get(HOST_ID) or _seen()


@cache
def _seen() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"

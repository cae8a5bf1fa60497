"""Which host a process is on: two processes that can open each other's memory have the same one, and no others.

A name does not tell: containers of one machine may share it, and two machines may have the same.
"""

import os
from functools import cache
from pathlib import Path


@cache
def host_identity() -> str:
    """Of this process's host: the kernel since it booted, and the namespace in which /proc shows processes."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/pid')}"

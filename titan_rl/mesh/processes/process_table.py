"""Operations on processes by id: by the kernel on this host, by its agent elsewhere.

An id means nothing without its host: the process that has it here is another one.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

from titan_rl.mesh.processes import processes


class ProcessTable(Protocol):
    """Of one host."""

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
    """Of this host."""

    def watch(self, pid: int, ended: Callable[[], None]) -> None:
        processes.watch(pid, ended)

    def signal(self, pids: Iterable[int], number: int) -> None:
        processes.send(pids, number)

    def is_stopped(self, pid: int) -> bool:
        return processes.is_stopped(pid)

    def is_gone(self, pid: int) -> bool:
        return processes.is_gone(pid)


LOCAL = LocalProcesses()

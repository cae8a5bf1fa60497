"""Processes of another host, by its agent. What is known here of them is as old as the last beat."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from titan_rl.mesh.processes.background import BackgroundTasks

if TYPE_CHECKING:
    from titan_rl.mesh.hosts.agent import HostAgent


class RemoteProcesses:
    """Process table of a remote host (``processes.ProcessTable``)."""

    def __init__(self, agent: "HostAgent"):
        self._agent, self._background = agent, BackgroundTasks()
        self._ended: dict[int, Callable[[], None]] = {}
        self.stopped: frozenset[int] = frozenset()
        """As of the last beat."""
        self.is_lost = False
        """Whether the host is: then so is all that ran there."""

    def watch(self, pid: int, ended: Callable[[], None]) -> None:
        if self.is_lost:
            return ended()
        self._ended[pid] = ended
        self._background.start(self._wait(pid))

    async def _wait(self, pid: int) -> None:
        with suppress(Exception):  # the agent is gone: its host is lost, or is about to be
            await self._agent.gone.call_one(pid)
            self._end(pid)

    def _end(self, pid: int) -> None:
        if (ended := self._ended.pop(pid, None)) is not None:
            ended()

    def signal(self, pids: Iterable[int], number: int) -> None:
        """It is on its way when this returns. On a host that is lost, nothing lives any more."""
        pids = list(pids)
        if self.is_lost:
            for pid in pids:
                self._end(pid)
        else:
            self._background.start(self._send(pids, number))

    async def _send(self, pids: list[int], number: int) -> None:
        with suppress(Exception):  # as above
            await self._agent.signal.call_one(pids, int(number))

    def is_stopped(self, pid: int) -> bool:
        return pid in self.stopped

    def is_gone(self, pid: int) -> bool:
        return self.is_lost

"""Standby: a process with its imports done, which replaces a dead one."""

import asyncio
from collections.abc import Callable, Coroutine
from enum import Enum
from typing import Any

from titan_rl.config.sections.schema import Config
from titan_rl.mesh.processes.background import retrieve_exception
from titan_rl.mesh.supervision.actor_process import ActorDied, ActorProcess, ActorProcesses
from titan_rl.mesh.supervision.calls import call
from titan_rl.mesh.supervision.remote_call import PreparedEndpoints

_MAX_LOST = 3
"""Standbys in a row that died while they waited, after which no other is made unless somebody asks for one again."""


class State(Enum):
    """State of a standby."""

    NONE = "none was asked for, or the last one was taken"
    QUEUED = "the standby of another kind is prepared first"
    PREPARING = "its process starts, and does its imports"
    READY = "it waits"
    LOST = "it died, or could not be prepared"


class _Candidate:
    """One process on its way to become the standby. Who takes it may still wait for ``preparing``."""

    def __init__(self, prepare: Callable[["_Candidate"], Coroutine[Any, Any, ActorProcess]]):
        self.state = State.QUEUED
        self.preparing = asyncio.ensure_future(prepare(self))


class Standby:
    """Standby of one kind: at most one process with imports done."""

    def __init__(self, processes: ActorProcesses, config: Config, kind: str, *spawn_arguments: Any):
        """``spawn_arguments``: what follows the name in ``ActorProcesses.spawn``."""
        self.processes, self.config, self.kind = processes, config, kind
        self._spawn_arguments = spawn_arguments
        self._candidate: _Candidate | None = None
        self._num_lost = 0
        """Since one was asked for, or taken."""

    @property
    def state(self) -> State:
        return State.NONE if self._candidate is None else self._candidate.state

    def make(self) -> None:
        """Begin to prepare a standby, if configured and missing."""
        self._num_lost = 0
        self._make()

    def _make(self) -> None:
        if not self.config.recovery.has_standbys or self.state not in (State.NONE, State.LOST):
            return
        self._candidate = candidate = _Candidate(self._prepare)
        candidate.preparing.add_done_callback(retrieve_exception)  # the one who takes it meets it too

    async def _prepare(self, candidate: _Candidate) -> ActorProcess:
        try:
            async with self.processes.preparing:  # one kind after the other: the first that is asked for is ready first
                candidate.state = State.PREPARING
                process = await self._spawn_and_import()
        except BaseException:  # cancelled included: in any case there is none
            candidate.state = State.LOST
            raise
        candidate.state = State.READY
        self.processes.record_event("standby_waits", of=self.kind, pid=process.pid)
        process.deaths.register("standby", lambda process: self._replace(candidate, process))
        return process

    async def _spawn_and_import(self) -> ActorProcess:
        process = await self.processes.spawn(f"standby {self.kind}", *self._spawn_arguments)
        seconds, what = self.config.mesh.start_timeout, f"preparing a standby {self.kind}"
        await call(process, PreparedEndpoints.prepare(), seconds=seconds, what=what)
        return process

    def _replace(self, candidate: _Candidate, process: ActorProcess) -> None:
        """Another one is made, if this one was still waiting, and not too many died so."""
        candidate.state = State.LOST
        if self._candidate is candidate:
            self.processes.forget(process)
            self._num_lost += 1
            if self._num_lost < _MAX_LOST:
                self._make()

    async def take(self, name: str, on: int | None = None) -> ActorProcess:
        """Take the standby under a new name, or spawn a process. ``on``: the number of the host that it must be
        on. Errors: ActorDied; DeadlineError; NoHosts if that host is lost, and does not come back."""
        candidate, self._candidate = self._candidate, None
        process = None if candidate is None else await self._result_of(candidate)
        if candidate is None or process is None:
            return await self._spawn(name, on)
        if on is not None and process.host.is_remote and process.host.number != on:
            self._put_back(candidate, process)
            return await self._spawn(name, on)
        process.name = name
        return process

    async def _spawn(self, name: str, on: int | None) -> ActorProcess:
        return await self.processes.spawn(name, *self._spawn_arguments, on=on)

    def _put_back(self, candidate: _Candidate, process: ActorProcess) -> None:
        """It is on another host than the one that is wanted: it goes on waiting, unless another was made meanwhile."""
        if self._candidate is None:
            self._candidate = candidate
            return
        process.is_stopping = True
        process.kill()
        self.processes.forget(process)

    async def _result_of(self, candidate: _Candidate) -> ActorProcess | None:
        """None if it is dead, or would be ready no sooner than a fresh process."""
        if candidate.state is State.QUEUED:
            candidate.preparing.cancel()
            return None
        try:
            process = await candidate.preparing
        except ActorDied as error:
            for dead in error.processes:
                self.processes.forget(dead)
            return None
        if process.is_dead:
            self.processes.forget(process)
            return None
        return process

    def stop(self) -> None:
        """Stop preparing; no other follows one that the run's end takes while it waits."""
        candidate, self._candidate = self._candidate, None
        if candidate is not None:
            candidate.preparing.cancel()

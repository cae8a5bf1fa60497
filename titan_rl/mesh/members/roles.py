"""Frozen roles in their own processes: queried before a step's updates, and replaced on death.

What they find stays with them until they are asked again; the trainer's ranks read it there. A rank that replaces
another reads its weights from the directory: there is no other state, so nothing has to be caught up with.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from titan_rl.mesh.channel.batches import RowsHandle
from titan_rl.mesh.hosts.host_path import HostPath
from titan_rl.mesh.members.endpoints import RoleEndpoints
from titan_rl.mesh.members.run_context import RunContext
from titan_rl.mesh.resources.devices import Seat
from titan_rl.mesh.supervision.actor_process import ActorDied, ActorFault, ActorProcess
from titan_rl.mesh.supervision.calls import call_each
from titan_rl.mesh.supervision.peers import PeerNotifier
from titan_rl.mesh.supervision.remote_call import RemoteCall
from titan_rl.mesh.supervision.rendezvous import rendezvous
from titan_rl.mesh.supervision.run_files import spread

T = TypeVar("T")
_MAX_REPAIRS = 5
"""How often a role may be repaired within one call."""


class RoleProcesses:
    """Ranks of one frozen role. Errors of all calls: ActorFault if they die too often; whatever an actor raises."""

    def __init__(
        self,
        role: str,
        actor: type,
        run: RunContext,
        world_size: int,
        environment: dict[str, str],
        seats: Sequence[Seat] = (),
    ):
        """``seats``: each rank's GPU; none on a CPU."""
        self.role, self.processes, self.config, self.world_size = role, run.processes, run.config, world_size
        self.scratch, self.log, self._seats = run.scratch, run.log, seats
        self.ranks: list[ActorProcess] = []
        self._spawn_arguments = environment, actor, role, run.model_path, run.kept_policy
        self._num_rendezvous = 0
        self._lock = asyncio.Lock()
        self._peers = PeerNotifier(lambda: self.ranks)

    async def start(self) -> None:
        self.ranks = list(await asyncio.gather(*(self._spawn(rank) for rank in range(self.world_size))))
        await self._repaired(self._join)

    async def _spawn(self, rank: int) -> ActorProcess:
        name, on = f"{self.role} rank {rank}", next((seat.host for seat in self._seats[rank : rank + 1]), None)
        return self._peers.watch(await self.processes.spawn(name, *self._spawn_arguments, on=on))

    async def _join(self) -> None:
        self._num_rendezvous += 1
        meeting = await rendezvous(self.ranks, self.scratch / f"{self.role}{self._num_rendezvous}")
        devices = [[seat.device for seat in self._seats[rank : rank + 1]] for rank in range(self.world_size)]
        joins = [
            (process, RoleEndpoints.join(self.config, rank, self.world_size, meeting, *devices[rank]))
            for rank, process in enumerate(self.ranks)
        ]
        what = f"joining the ranks of the {self.role}"
        await call_each(joins, seconds=self.config.mesh.start_timeout, what=what, one_fails_all=True)

    async def begin_anew(self) -> None:
        """Join all ranks again with the current settings."""
        await self._repaired(self._join)

    async def call(self, request: RemoteCall[T]) -> list[T]:
        """Answers by rank; dead ranks are replaced and the call is repeated."""
        seconds, what = self.config.mesh.step_timeout, f"{self.role} {request.endpoint}"

        async def ask() -> list[T]:
            calls = [(process, request) for process in self.ranks]
            return await call_each(calls, seconds=seconds, what=what, one_fails_all=True)

        return await self._repaired(ask)

    async def _repaired(self, work: Callable[[], Awaitable[T]]) -> T:
        async with self._lock:
            for _ in range(_MAX_REPAIRS):
                try:
                    await self._replace_dead()
                    return await work()
                except ActorDied as error:
                    self.log(str(error))
                    if error.__cause__ is not None:
                        raise ActorFault(str(error)) from error.__cause__
            raise ActorFault(f"the {self.role} was repaired {_MAX_REPAIRS} times without an answer")

    async def _replace_dead(self) -> None:
        dead = [rank for rank, process in enumerate(self.ranks) if process.is_dead]
        for rank in dead:
            self.processes.forget(self.ranks[rank])
            self.ranks[rank] = await self._spawn(rank)
        if dead:
            await self._join()
            self.log(f"{self.role} rank {', '.join(map(str, dead))}: replaced")


class Roles:
    """Roles with processes of their own."""

    def __init__(self, roles: Sequence[RoleProcesses] = ()):
        self.roles = {role.role: role for role in roles}

    async def start(self) -> None:
        await asyncio.gather(*(role.start() for role in self.roles.values()))

    async def begin_anew(self) -> None:
        """As ``RoleProcesses.begin_anew``."""
        await asyncio.gather(*(role.begin_anew() for role in self.roles.values()))

    async def compute_outputs(self, batches: list[RowsHandle]) -> list[list[RowsHandle]]:
        """Outputs of all roles for staged rows (``batches[group]``), by rank with outputs and by group."""
        answers = await asyncio.gather(
            *(role.call(RoleEndpoints.compute_outputs(batches)) for role in self.roles.values())
        )
        return [handles for ranks in answers for handles in ranks if handles is not None]

    async def load_role(self, role: str, path: HostPath) -> None:
        """Load other weights into a role with its own processes."""
        if role in self.roles:
            await spread(self.roles[role].ranks, path)
            await self.roles[role].call(RoleEndpoints.load_role(path))

    async def digests(self) -> dict[str, list[str]]:
        """Checksums of each role's models, by rank."""
        digests: dict[str, list[str]] = {}
        for role in self.roles.values():
            ranks = await role.call(RoleEndpoints.digests())
            digests |= {name: [rank[name] for rank in ranks] for name in ranks[0]}
        return digests

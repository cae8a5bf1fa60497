"""Snapshots of the trainer's ranks: who else holds their memory, and the way back to one common step.

Every rank puts its state aside in memory of its own (trainer/state/snapshot.py), which another process on its host
keeps, or one on another host copies. After a death the survivors load their own snapshot and the new rank loads what
was kept, all of one step."""

import asyncio
import itertools
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from monarch.actor import ActorError

from titan_rl.compat.monarch.actors import SupervisionError, know_faults_of
from titan_rl.mesh.channel.memory.region import RegionHandle
from titan_rl.mesh.channel.snapshots.copier import SnapshotCopier
from titan_rl.mesh.control.generators import Generators
from titan_rl.mesh.hosts.hosts import Host
from titan_rl.mesh.members.endpoints import TrainerEndpoints
from titan_rl.mesh.members.trainers import Trainers
from titan_rl.mesh.processes.deadlines import DeadlineError, within
from titan_rl.mesh.supervision.actor_process import ActorDied, ActorProcess
from titan_rl.mesh.supervision.calls import call_all, call_each
from titan_rl.mesh.supervision.remote_call import RemoteCall, SidecarEndpoints

R = TypeVar("R")
_ASK_SECONDS = 20.0


@dataclass(frozen=True)
class RestorableSteps:
    """Steps that can be restored, by rank."""

    own: list[list[int]]
    """Of each rank that has snapshots in its own memory."""
    kept: dict[int, tuple[list[int], RegionHandle | None]]
    """Of each other rank: the steps that are left of it, and where they are."""

    def newest(self, at_most: int) -> int | None:
        """The newest step that every rank has."""
        steps = set.intersection(*map(set, self.own), *(set(steps) for steps, _ in self.kept.values()))
        return max((step for step in steps if step <= at_most), default=None)


def keeper_order(host: Host, peers: list[ActorProcess], others: list[ActorProcess]) -> list[ActorProcess]:
    """Candidate keepers of a rank's snapshots, best first.

    A lost host takes all on it; a lost rank may take its peers, which wait for it in collectives, but no generator. The
    order is kept otherwise.
    """
    candidates = [(process, is_peer) for is_peer in (False, True) for process in (peers if is_peer else others)]
    return [process for process, _ in sorted(candidates, key=lambda one: (one[0].host is host, one[1]))]


def can_map(host: Host, other: Host) -> bool:
    """Whether their processes can open each other's memory: of this machine all can, of another those that share it."""
    return host is other or not (host.is_remote or other.is_remote)


class TrainerSnapshots:
    """Keepers of all ranks' snapshots. Errors of all calls: ActorDied; whatever an actor raises."""

    def __init__(self, trainers: Trainers, generators: Generators, seconds: float):
        """``generators``: their leaders are keepers where they can be, and else peers. ``seconds``: of any call."""
        self.trainers, self.generators, self.seconds = trainers, generators, seconds
        self._handles: list[RegionHandle] = []
        """Where each rank's snapshots are."""
        self._keepers: list[ActorProcess | None] = []
        """Of each rank's snapshots, beside itself."""
        self._fresh: set[int] = set()
        """Ranks whose process has no snapshots of its own yet."""
        self._hosts: list[Host] = []
        """Where each rank's snapshots were taken, though it may be dead by now."""
        self._copiers: dict[ActorProcess, SnapshotCopier] = {}
        """Of keepers on other hosts than a rank's: actors beside theirs."""
        self._numbers = itertools.count()
        self._placing = asyncio.Lock()

    async def place_keepers(self) -> None:
        """Choose a keeper for every rank without one."""
        async with self._placing:
            for rank, handle in enumerate(self._handles):
                if (keeper := self._keepers[rank]) is not None and not keeper.is_dead:
                    continue
                self._keepers[rank] = keeper = self._choose_keeper(rank)
                if keeper is not None:
                    with suppress(ActorDied):  # its owner notices; without a keeper a checkpoint has to do
                        await self._ask(keeper, rank, SidecarEndpoints.keep(handle))

    async def _ask(self, keeper: ActorProcess, rank: int, request: RemoteCall[R]) -> R:
        """The process's sidecar, which maps, or on another host its copier. Errors: ActorDied."""
        if can_map(keeper.host, self._hosts[rank]):
            return await keeper.ask_sidecar(request)
        if keeper not in self._copiers:
            self._copiers = {process: each for process, each in self._copiers.items() if not process.is_dead}
            know_faults_of(name := f"copier{next(self._numbers)}")
            self._copiers[keeper] = keeper.procs.spawn(name, SnapshotCopier)
        try:
            asking = request.at(self._copiers[keeper])
            return await within(_ASK_SECONDS, f"{request.endpoint} at {keeper.name}", asking)
        except (SupervisionError, ActorError, DeadlineError) as error:
            raise ActorDied([keeper], f"its copier was asked for {request.endpoint}") from error

    def _choose_keeper(self, rank: int) -> ActorProcess | None:
        ranks, count = self.trainers.ranks, self.trainers.world_size
        peers = [ranks[(rank + i) % count] for i in range(1, count)]
        able = keeper_order(ranks[rank].host, peers, self.generators.leaders)
        return next((process for process in able if not process.is_dead), None)

    # the way back

    async def find(self) -> RestorableSteps:
        """Restorable steps, while some ranks are dead."""
        self._fresh |= set(self.trainers.dead)
        kept = {rank: await self._kept(rank) for rank in self._fresh}
        own = [process for rank, process in enumerate(self.trainers.ranks) if rank not in self._fresh]
        steps = await call_all(
            own, TrainerEndpoints.snapshot_steps(), seconds=self.seconds, what="asking for snapshots"
        )
        return RestorableSteps(steps, kept)

    async def _kept(self, rank: int) -> tuple[list[int], RegionHandle | None]:
        keeper = self._keepers[rank] if self._keepers else None
        if keeper is None or keeper.is_dead:
            return [], None
        try:
            return await self._ask(keeper, rank, SidecarEndpoints.kept(rank))
        except ActorDied:
            return [], None

    async def restore(self, steps: RestorableSteps, step: int) -> None:
        """Restore every rank's state after a step, once all have joined again."""
        handles = {rank: handle for rank, (_, handle) in steps.kept.items()}
        restores = [
            (process, TrainerEndpoints.restore(step, handles.get(rank)))
            for rank, process in enumerate(self.trainers.ranks)
        ]
        await call_each(restores, seconds=self.seconds, what="restoring a snapshot")

    # after the trainer was repaired (trainer_repair.Follower)

    async def reopen(self) -> None:
        """Open new snapshot regions on all ranks, each with a keeper."""
        handles = await self.trainers.call(TrainerEndpoints.open_snapshots(), what="opening snapshots")
        async with self._placing:
            self._handles, self._keepers, self._fresh = handles, [None] * self.trainers.world_size, set()
            self._hosts = [process.host for process in self.trainers.ranks]
        await self.place_keepers()

    async def resume(self, step: int) -> None:
        """Take the snapshot of ``step`` on every rank."""
        await self.trainers.call(TrainerEndpoints.take_snapshot(step), what=f"taking the snapshot of step {step}")

"""Snapshots of the trainer's ranks: replicas of them in other processes, and the way back to one common step.

Every rank puts its state aside in its own memory (trainer/snapshot.py); another process copies that, and holds the
replica. After a death the survivors load their own snapshot and the new rank loads the replica, all of one step.
"""

import asyncio
from contextlib import suppress
from dataclasses import dataclass

from titan_rl.mesh.channel.region import RegionHandle
from titan_rl.mesh.generators import Generators
from titan_rl.mesh.supervision.actor_process import ActorDied, ActorProcess
from titan_rl.mesh.supervision.calls import call_all, call_each
from titan_rl.mesh.trainers import Trainers


@dataclass(frozen=True)
class Found:
    """Which steps can be restored."""

    own: list[list[int]]
    """Of each rank that has snapshots in its own memory."""
    replicas: dict[int, tuple[list[int], RegionHandle | None]]
    """Of each other rank: the steps in its replica, and where that is."""

    def newest(self, at_most: int) -> int | None:
        """The newest step that every rank has."""
        steps = set.intersection(*map(set, self.own), *(set(steps) for steps, _ in self.replicas.values()))
        return max((step for step in steps if step <= at_most), default=None)


class TrainerSnapshots:
    """Owns who holds the replica of which rank. Errors of all calls: ActorDied; whatever an actor raises."""

    def __init__(self, trainers: Trainers, generators: Generators, seconds: float):
        """``generators``: their leaders hold replicas where no peer can. ``seconds``: of any call."""
        self.trainers, self.generators, self.seconds = trainers, generators, seconds
        self._handles: list[RegionHandle] = []
        """Where each rank's snapshots are."""
        self._holders: list[ActorProcess | None] = []
        """Of each rank's replica."""
        self._fresh: set[int] = set()
        """Ranks whose process has no snapshots of its own yet."""
        self._placing = asyncio.Lock()

    async def place_replicas(self) -> None:
        """For every rank of whose snapshots there is no replica (any more)."""
        async with self._placing:
            for rank, handle in enumerate(self._handles):
                if (holder := self._holders[rank]) is not None and not holder.is_dead:
                    continue
                self._holders[rank] = holder = self._choose_holder(rank)
                if holder is not None:
                    with suppress(ActorDied):  # its owner notices; without a replica a checkpoint has to do
                        await holder.ask_sidecar("replicate", handle)

    def _choose_holder(self, rank: int) -> ActorProcess | None:
        """On another host if there is one; a peer before a generator."""
        ranks, count = self.trainers.ranks, self.trainers.world_size
        peers = [ranks[(rank + i) % count] for i in range(1, count)]
        able = [process for process in peers + self.generators.leaders if not process.is_dead]
        elsewhere = [process for process in able if process.host is not ranks[rank].host]
        return next(iter(elsewhere + able), None)

    # the way back

    async def find(self) -> Found:
        """What there is, while some ranks are dead; replicas follow their rank no more."""
        self._fresh |= set(self.trainers.dead)
        replicas = {rank: await self._replica(rank) for rank in self._fresh}
        own = [process for rank, process in enumerate(self.trainers.ranks) if rank not in self._fresh]
        steps = await call_all(own, "snapshot_steps", seconds=self.seconds, what="asking for snapshots")
        return Found(steps, replicas)

    async def _replica(self, rank: int) -> tuple[list[int], RegionHandle | None]:
        holder = self._holders[rank] if self._holders else None
        if holder is None or holder.is_dead:
            return [], None
        try:
            return await holder.ask_sidecar("replica", rank)
        except ActorDied:
            return [], None

    async def restore(self, found: Found, step: int) -> None:
        """Every rank's state after a step, once all have joined anew: its own, or from its replica."""
        handles = {rank: handle for rank, (_, handle) in found.replicas.items()}
        restores = [(process, (step, handles.get(rank))) for rank, process in enumerate(self.trainers.ranks)]
        await call_each(restores, "restore", seconds=self.seconds, what="restoring a snapshot")

    # after the trainer was repaired (trainer_mesh.Follower)

    async def reopen(self) -> None:
        """Have every rank take snapshots in a new region, with a replica elsewhere."""
        handles = await self.trainers.call("open_snapshots", what="opening snapshots")
        async with self._placing:
            self._handles, self._holders, self._fresh = handles, [None] * self.trainers.world_size, set()
        await self.place_replicas()

    async def resume(self, step: int) -> None:
        """Every rank begins to put its state aside, which is that after ``step``."""
        await self.trainers.call("take_snapshot", step, what=f"taking the snapshot of step {step}")

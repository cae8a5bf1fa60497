"""The trainer's ranks: started together, and mended one by one.

When a rank dies the others keep their process and their memory. A standby that has its imports behind it takes the
dead one's place, all join a new process group, and each loads its state of the newest step that everybody has:
survivors from their own snapshot, the new one from what its keeper kept.
"""

import asyncio
from contextlib import suppress
from pathlib import Path

from titan_rl.config.schema import Config
from titan_rl.mesh.supervision.actor_process import Cell, CellDied, Cells
from titan_rl.mesh.supervision.calls import call, call_all, call_each
from titan_rl.mesh.supervision.standby import Standby


class Trainers:
    """Owns the ranks and their standby. Errors of all calls: CellDied; whatever an actor raises."""

    def __init__(
        self,
        actor: type,
        cells: Cells,
        config: Config,
        model_path: str,
        world_size: int,
        environment: dict[str, str],
        scratch: Path,
    ):
        self.cells, self.config, self.world_size, self.scratch = cells, config, world_size, scratch
        self.standby = Standby(cells, config, "trainer", environment, actor, config, model_path)
        self.ranks: list[Cell] = []
        self._keepers: list[Cell | None] = []
        self._handles: list = []
        """Where each rank's snapshots are."""
        self._keeping = asyncio.Lock()
        self._fresh: set[int] = set()
        """Ranks whose process has no snapshots of its own yet."""
        self._num_meetings = 0

    async def start(self) -> None:
        names = [f"trainer rank {rank}" for rank in range(self.world_size)]
        self.ranks = list(await asyncio.gather(*(self.standby.take(name) for name in names)))
        await self._join()

    async def _join(self) -> None:
        """All ranks meet in a new process group and build their part of the model, with the weights of the file."""
        self._num_meetings += 1
        meeting_file = str(self.scratch / f"trainer{self._num_meetings}")
        joins = [(cell, (rank, self.world_size, meeting_file)) for rank, cell in enumerate(self.ranks)]
        await call_each(joins, "join", seconds=self.config.mesh.start_timeout, what="joining the trainer's ranks")

    @property
    def is_whole(self) -> bool:
        return not any(cell.is_dead for cell in self.ranks)

    async def call(self, endpoint: str, *arguments, what: str) -> list:
        """Every rank's answer. Who raises is ended: CellDied, from what it raised."""
        calls = [(cell, arguments) for cell in self.ranks]
        seconds = self.config.mesh.step_timeout
        return await call_each(calls, endpoint, seconds=seconds, what=what, one_fails_all=True)

    async def protect(self, others: list[Cell]) -> None:
        """Have every rank's snapshots kept by another process: a peer, or one of these others."""
        handles = await self.call("open_snapshots", what="opening snapshots")
        async with self._keeping:
            self._handles, self._keepers, self._fresh = handles, [None] * self.world_size, set()
        await self.find_keepers(others)

    async def find_keepers(self, others: list[Cell]) -> None:
        """For every rank whose snapshots nobody keeps (any more)."""
        async with self._keeping:
            for rank, handle in enumerate(self._handles):
                if (keeper := self._keepers[rank]) is not None and not keeper.is_dead:
                    continue
                self._keepers[rank] = keeper = self._choose_keeper(rank, others)
                if keeper is not None:
                    with suppress(CellDied):  # its death is met elsewhere; without a keeper a disk has to do
                        await keeper.ask_steward("keep", handle)

    def _choose_keeper(self, rank: int, others: list[Cell]) -> Cell | None:
        """A peer before others, but another host before either."""
        peers = [self.ranks[(rank + i) % self.world_size] for i in range(1, self.world_size)]
        able = [cell for cell in peers + others if not cell.is_dead]
        elsewhere = [cell for cell in able if cell.host is not self.ranks[rank].host]
        return next(iter(elsewhere + able), None)

    async def mend(self, step: int) -> int | None:
        """Replace the dead; all ranks are then at the newest step up to this one that everybody had: given back.

        None: somebody's state is nowhere, so all have the weights of the file and must be given a checkpoint.
        """
        dead = {rank for rank, cell in enumerate(self.ranks) if cell.is_dead}
        self._fresh |= dead
        kept = {rank: await self._kept(rank) for rank in self._fresh}
        own = await call_all(
            [cell for rank, cell in enumerate(self.ranks) if rank not in self._fresh],
            "snapshot_steps",
            seconds=self.config.mesh.step_timeout,
            what="asking for snapshots",
        )
        for rank in dead:
            self.cells.forget(self.ranks[rank])
            self.ranks[rank] = await self._replacement(rank)
        await self._join()
        steps = set.intersection(*(set(s) for s in own), *(set(s) for s, _ in kept.values()))
        newest = max((s for s in steps if s <= step), default=None)
        if newest is not None:
            restores = [(cell, (newest, kept[r][1] if r in kept else None)) for r, cell in enumerate(self.ranks)]
            await call_each(restores, "restore", seconds=self.config.mesh.step_timeout, what="restoring a snapshot")
        return newest

    async def _replacement(self, rank: int) -> Cell:
        """With its imports done: its peers wait for it in ``join``, where a death costs them theirs."""
        name = f"trainer rank {rank}"
        cell = await self.standby.take(name)
        await call(cell, "prepare", seconds=self.config.mesh.start_timeout, what=f"preparing {name}")
        return cell

    async def _kept(self, rank: int) -> tuple[list[int], object]:
        keeper = self._keepers[rank] if self._keepers else None
        if keeper is None or keeper.is_dead:
            return [], None
        try:
            return await keeper.ask_steward("kept", rank)
        except CellDied:
            return [], None

    def stop(self) -> None:
        self.standby.stop()

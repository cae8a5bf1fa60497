"""Weights from the trainer's ranks to the generators': planned once, and from then on a version number for each rank.

``publish`` is what the trainer waits for; ``deliver`` goes on beside its next step. A replica that comes later is
brought up to the version that is live before it gets any work.
"""

import asyncio
import dataclasses
from collections.abc import Callable

from titan_rl.data.types import EngineStatistics
from titan_rl.mesh.channel.plan import Interner, Plan
from titan_rl.mesh.channel.transports import RDMA, Place, Transport, choose_transport, describe
from titan_rl.mesh.channel.weights import ReaderSetup
from titan_rl.mesh.supervision.actor_process import Cell, CellDied, last_line
from titan_rl.mesh.supervision.calls import call, call_all, call_each


class WeightSync:
    """Owns the plan, and knows which version is live. Errors of all calls: CellDied; whatever an actor raises."""

    def __init__(self, ranks: list[Cell], replicas: list, setting: str, seconds: float):
        """``ranks``: the trainer's. ``replicas``: each with ``number`` and ``ranks``. ``seconds``: of any call."""
        self.ranks, self.setting, self.seconds = ranks, setting, seconds
        self.version: int | None = None
        self._replicas = replicas
        self._lock = asyncio.Lock()

    async def connect(self) -> None:
        """Ask both sides what they hold and need, plan, open the regions, connect the replicas. Errors: PlanError."""
        first = self._replicas[0].ranks
        self._sources, held, needs = await asyncio.gather(
            self._call_all(self.ranks, "place"), self._call_all(self.ranks, "holdings"), self._call_all(first, "needs")
        )
        interner = Interner()
        self.plan = Plan([interner.again(units) for units in held], [interner.again(units) for units in needs])
        places = await asyncio.gather(*(self._call_all(replica.ranks, "place") for replica in self._replicas))
        pairs = [self._transports(r, there) for r, there in zip(self._replicas, places, strict=True)]
        self.transports = describe([t for replica in pairs for reader in replica for t in reader.values()])
        self._over_rdma = {
            holder
            for replica in pairs
            for reader in replica
            for holder, transport in reader.items()
            if transport in RDMA
        }
        await self._open()
        await asyncio.gather(*(self._connect(r, t) for r, t in zip(self._replicas, pairs, strict=True)))

    async def _call_all(self, cells: list[Cell], endpoint: str, *arguments) -> list:
        return await call_all(cells, endpoint, *arguments, seconds=self.seconds, what="connecting generators")

    def _transports(self, replica, places: list[Place]) -> list[dict[int, Transport]]:
        """For each rank of a replica: how it reads from each of the trainer ranks that it reads from."""
        return [
            {
                holder: choose_transport(self.setting, self._sources[holder], place)
                for holder in self.plan.reads(reader, replica.number).holders
            }
            for reader, place in enumerate(places)
        ]

    async def _open(self) -> None:
        opens = [(cell, (self.plan.slot(rank), rank in self._over_rdma)) for rank, cell in enumerate(self.ranks)]
        self.regions = await call_each(opens, "open_region", seconds=self.seconds, what="opening the trainer's regions")

    async def _connect(self, replica, transports: list[dict[int, Transport]]) -> None:
        """Each rank is told what it has to know, and no more."""
        setups = []
        for reader, chosen in enumerate(transports):
            plan = self.plan.reads(reader, replica.number)
            regions = [self.regions[holder] for holder in plan.holders]
            setups.append(ReaderSetup(plan, regions, [chosen[holder] for holder in plan.holders]))
        calls = [(cell, (setup,)) for cell, setup in zip(replica.ranks, setups, strict=True)]
        await call_each(calls, "connect", seconds=self.seconds, what=f"connecting generator {replica.number}")

    async def reopen(self, ranks: list[Cell], replicas: list) -> None:
        """The trainer's ranks are others, or have begun anew; the plan is the same."""
        self.ranks = ranks
        async with self._lock:
            await self._open()
            for replica in replicas:
                await self._connect(replica, self._transports(replica, await self._call_all(replica.ranks, "place")))

    async def bring_up(self, replica) -> None:
        """Connect a replica that came later, and have it use the version that is live."""
        async with self._lock:
            await self._connect(replica, self._transports(replica, await self._call_all(replica.ranks, "place")))
            if self.version is not None:
                await self._deliver_to(replica, self.version)

    async def publish(self, version: int) -> None:
        """Every trainer rank begins to lay its shards down. The version before must be delivered."""
        what = f"publishing weights version {version}"
        await call_all(self.ranks, "publish", version, seconds=self.seconds, what=what)

    async def deliver(self, version: int, replicas: list, failed: Callable[[int, str], None]) -> list[EngineStatistics]:
        """These replicas take the version; statistics of the version before, of those that did.

        ``failed`` is told of each one that lives and could not; of the dead somebody else knows.
        """
        async with self._lock:
            done = await asyncio.gather(*(self._deliver_to(r, version) for r in replicas), return_exceptions=True)
            self.version = version
        for replica, result in zip(replicas, done, strict=True):
            if isinstance(result, Exception) and not isinstance(result, CellDied):
                failed(replica.number, f"failed weights version {version}: {last_line(result)}")
            elif isinstance(result, BaseException) and not isinstance(result, Exception):
                raise result
        return [result for result in done if isinstance(result, EngineStatistics)]

    async def _deliver_to(self, replica, version: int) -> EngineStatistics:
        what = f"updating generator {replica.number} to version {version}"
        # the reader's own deadline comes first, and says which rank it waited for
        await call_all(replica.ranks, "fetch", version, 0.9 * self.seconds, seconds=self.seconds, what=what)
        statistics = await call(replica.ranks[0], "apply", version, seconds=self.seconds, what=what)
        return dataclasses.replace(statistics, generator=replica.number)

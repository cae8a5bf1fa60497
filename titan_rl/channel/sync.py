"""Weights from the trainer mesh to the generator meshes: planned once, and from then on a version number for each rank.

``publish`` is what the trainer waits for; ``deliver`` goes on beside its next step. A replica that fails an update is
taken out of routing, and never asked again.
"""

import asyncio
from collections.abc import Callable

from titan_rl.channel.plan import Interner, Plan
from titan_rl.channel.transports import RDMA, choose_transport, describe
from titan_rl.channel.weights import ReaderSetup
from titan_rl.mesh.calls import call_all, gather
from titan_rl.mesh.router import Router
from titan_rl.types import EngineStatistics


class WeightSync:
    """Owns the plan. ``trainer`` and each of ``generators``, a replica, are actor meshes along ``ranks``."""

    def __init__(self, trainer, generators: list, router: Router, say: Callable[[str], None]):
        self.trainer, self.generators, self.router, self.say = trainer, generators, router, say
        self._leaders = [generator.slice(ranks=0) for generator in generators]

    async def connect(self, setting: str) -> None:
        """Ask both sides what they hold and need, plan, and open the regions. Errors: PlanError."""
        sources, held, places, needs = await gather(
            call_all(self.trainer.place),
            call_all(self.trainer.holdings),
            gather(*(call_all(generator.place) for generator in self.generators)),
            call_all(self.generators[0].needs),
        )
        interner = Interner()
        self.plan = Plan([interner.again(units) for units in held], [interner.again(units) for units in needs])
        pairs = {
            (replica, reader, holder): choose_transport(setting, sources[holder], place)
            for replica, readers in enumerate(places)
            for reader, place in enumerate(readers)
            for holder in self.plan.reads(reader, replica).holders
        }
        over_rdma = {holder for (_, _, holder), transport in pairs.items() if transport in RDMA}
        self.regions = await gather(
            *(
                self.trainer.slice(ranks=rank).open_region.call_one(self.plan.slot(rank), rank in over_rdma)
                for rank in range(len(held))
            )
        )
        await gather(
            *(
                generator.slice(ranks=reader).connect.call_one(self._setup(replica, reader, pairs))
                for replica, generator in enumerate(self.generators)
                for reader in range(self.plan.num_readers)
            )
        )
        self.transports = describe(list(pairs.values()))

    def _setup(self, replica: int, reader: int, pairs: dict) -> ReaderSetup:
        """Only what this reader has to know."""
        plan = self.plan.reads(reader, replica)
        transports = [pairs[replica, reader, holder] for holder in plan.holders]
        return ReaderSetup(plan, [self.regions[holder] for holder in plan.holders], transports)

    async def publish(self, version: int) -> None:
        """Every trainer rank begins to lay its shards down. The version before must be delivered."""
        await call_all(self.trainer.publish, version)

    async def deliver(self, version: int, timeout: float) -> list[EngineStatistics]:
        """Every replica takes the version; statistics of the version before, of those that did.

        Errors: NoReplicaLeft if none did.
        """
        replicas = self.router.healthy
        done = await asyncio.gather(
            *(self._deliver_to(replica, version, timeout) for replica in replicas), return_exceptions=True
        )
        for replica, result in zip(replicas, done, strict=True):
            if isinstance(result, Exception):
                self.say(f"generator {replica} failed weights version {version} and gets no more work: {result}")
                self.router.take_out(replica, f"failed weights version {version}: {_last_line(result)}")
            elif isinstance(result, BaseException):
                raise result
        return [result for result in done if isinstance(result, EngineStatistics)]

    async def _deliver_to(self, replica: int, version: int, timeout: float) -> EngineStatistics:
        await call_all(self.generators[replica].fetch, version, timeout)
        [statistics] = await call_all(self._leaders[replica].apply, version)
        return statistics


def _last_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[-1][:300] if str(error).strip() else type(error).__name__

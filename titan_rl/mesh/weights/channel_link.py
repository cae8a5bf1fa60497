"""The weight channel between the trainer's ranks and the replicas: planned once, then a version number for each rank.

Here nothing is repaired: a rank that dies is an error to the caller (weight_sync.py survives it). A replica that comes
later is brought up to the version that is live before it gets any work.
"""

import asyncio
import dataclasses
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from titan_rl.data.types import EngineStatistics
from titan_rl.mesh.channel.memory.region import RegionHandle
from titan_rl.mesh.channel.plan import DRAFTER, Interner, Plan, adapted_weights
from titan_rl.mesh.channel.reader import ReaderSetup
from titan_rl.mesh.channel.relay.gathering import Route
from titan_rl.mesh.channel.transports import (
    RDMA,
    Place,
    Setting,
    Transport,
    choose_transport,
    describe,
    from_host,
    staged_on_host,
)
from titan_rl.mesh.members.endpoints import GeneratorEndpoints, TrainerEndpoints
from titan_rl.mesh.members.replica import Replica
from titan_rl.mesh.members.trainers import Trainers
from titan_rl.mesh.supervision.actor_process import ActorDied, ActorProcess, last_line
from titan_rl.mesh.supervision.calls import call, call_all, call_each
from titan_rl.mesh.supervision.remote_call import RemoteCall
from titan_rl.mesh.telemetry.step_record import StepRecord
from titan_rl.mesh.weights.routes import WeightRoutes, is_relay

R = TypeVar("R")


class WeightLink:
    """Link between trainer and generators: plan, open regions, published and live version.

    Errors of all calls: ActorDied; whatever an actor raises.
    """

    def __init__(
        self,
        trainers: Trainers,
        setting: Setting,
        seconds: float,
        record: StepRecord | None = None,
        record_event: Callable[..., None] = lambda kind, **fields: None,
        adapter_scale: float | None = None,
    ):
        """``seconds``: of any call. ``record``: who took how long. ``record_event(kind,
        **fields)`` hears who was to hand a version on and did not. ``adapter_scale``: of adapters, if they are sent in
        place of the weights."""
        self.trainers, self.seconds = trainers, seconds
        self.setting: Setting = setting
        self._record, self._record_event = record or StepRecord(), record_event
        self._adapter_scale = adapter_scale
        self.routes = WeightRoutes(setting)
        self.epoch = 0
        """Grows whenever the trainer's regions are opened: what is published in an earlier one is refused."""
        self.plan: Plan | None = None
        """None until ``connect``."""
        self.regions: list[RegionHandle] = []
        """Of each rank of the policy."""
        self.transports = ""
        """For the log: which ones are used, and by how many pairs of ranks."""
        self.version: int | None = None
        """The one that is live."""
        self.published: int | None = None
        """The one that the trainer's regions hold last."""
        self._staged: set[int] = set()
        """Versions that the trainer's regions hold or are about to: those of before a repair are gone."""
        self._on_host: set[int] = set()
        """Ranks that stage their weights in their host's memory, since some reader reaches nothing else."""
        self._over_rdma: set[int] = set()
        self._over_tcp: set[int] = set()
        """Ranks that some reader reaches so."""
        self._sources: list[Place] = []
        """Of each rank of the policy."""
        self._opened_by: list[ActorProcess] = []
        """The trainer's ranks of this epoch."""
        self._connected: list[Replica] = []
        self._lock = asyncio.Lock()
        """Held while replicas are connected or take a version."""

    async def connect(self, replicas: list[Replica]) -> None:
        """Plan the transfer, open the regions and connect the replicas. Errors: PlanError."""
        ranks, first = self.trainers.of_policy, replicas[0].ranks
        self._sources, holdings_by_rank = await asyncio.gather(
            self._call_all(ranks, TrainerEndpoints.place()), self._call_all(ranks, TrainerEndpoints.holdings())
        )
        adapters = adapted_weights(holdings_by_rank) if self._adapter_scale is not None else None
        names = (
            unit + held.name for units in holdings_by_rank for unit, holdings in units.items() for held in holdings
        )
        drafter = any(name.startswith(DRAFTER) for name in names)
        needs = await self._call_all(first, GeneratorEndpoints.needs(adapters, drafter=drafter))
        interner = Interner()
        self.plan = Plan(
            [interner.again(units) for units in holdings_by_rank], [interner.again(units) for units in needs]
        )
        places = await asyncio.gather(
            *(self._call_all(replica.ranks, GeneratorEndpoints.place()) for replica in replicas)
        )
        pairs = [self._transports(r, there) for r, there in zip(replicas, places, strict=True)]
        self._on_host = staged_on_host(_used(pairs))
        pairs = [[self._reachable(chosen) for chosen in replica] for replica in pairs]
        used = _used(pairs)
        self.transports = describe([transport for _, transport in used])
        self._over_rdma = {holder for holder, transport in used if transport in RDMA}
        self._over_tcp = {holder for holder, transport in used if transport == "tcp"}
        await self._open()
        connections = zip(replicas, places, pairs, strict=True)
        await asyncio.gather(*(self._connect_replica(*replica) for replica in connections))
        self._connected = list(replicas)
        if (count := self.routes.num_hosts) > 1:
            self.transports += f", handed on between {count} hosts"

    @property
    def is_broken(self) -> bool:
        """Whether a repair of the trainer has not come to its end, so that there is no version to take."""
        return any(rank.is_dead for rank in self._opened_by) or (self.version is not None and not self._staged)

    async def _call_all(self, processes: list[ActorProcess], request: RemoteCall[R]) -> list[R]:
        return await call_all(processes, request, seconds=self.seconds, what="connecting generators")

    def _transports(self, replica: Replica, places: list[Place]) -> list[dict[int, Transport]]:
        """For each rank of a replica: how it reads from each of the trainer ranks that it reads from."""
        plan = self._planned()
        return [
            self._reachable(
                {
                    holder: choose_transport(self.setting, self._sources[holder], place)
                    for holder in plan.reads(reader, replica.number).holders
                }
            )
            for reader, place in enumerate(places)
        ]

    def _reachable(self, chosen: dict[int, Transport]) -> dict[int, Transport]:
        """With what each trainer rank's place makes of it."""
        return {rank: from_host(way) if rank in self._on_host else way for rank, way in chosen.items()}

    def _planned(self) -> Plan:
        assert self.plan is not None
        return self.plan

    async def _open(self) -> None:
        self.epoch, self._staged = self.epoch + 1, set()
        self._opened_by = list(self.trainers.ranks)
        opens = [(process, self._opening(rank)) for rank, process in enumerate(self.trainers.of_policy)]
        self.regions = await call_each(opens, seconds=self.seconds, what="opening the trainer's regions")

    def _opening(self, rank: int) -> RemoteCall[RegionHandle]:
        over_rdma, on_host, over_tcp = (rank in ranks for ranks in (self._over_rdma, self._on_host, self._over_tcp))
        return TrainerEndpoints.open_region(self._planned().slot(rank), over_rdma, on_host, over_tcp, self.epoch)

    async def _connect(self, replica: Replica) -> None:
        places = await self._call_all(replica.ranks, GeneratorEndpoints.place())
        await self._connect_replica(replica, places, self._transports(replica, places))

    async def _connect_replica(
        self, replica: Replica, places: list[Place], transports: list[dict[int, Transport]]
    ) -> None:
        """Each rank is told what it has to know, and no more."""
        calls = [
            (process, GeneratorEndpoints.connect(self._setup(process, reader, replica.number, chosen)))
            for reader, (process, chosen) in enumerate(zip(replica.ranks, transports, strict=True))
        ]
        what = f"connecting generator {replica.number}"
        relays = await call_each(calls, seconds=self.seconds, what=what)
        self.routes.connected(replica, places, relays)

    def _setup(self, process: ActorProcess, reader: int, replica: int, chosen: dict[int, Transport]) -> ReaderSetup:
        plan = self._planned().reads(reader, replica)
        transports: list[Transport] = [chosen[holder] for holder in plan.holders]
        relay = process.name if is_relay(transports) else ""
        regions = [self.regions[holder] for holder in plan.holders]
        return ReaderSetup(plan, regions, transports, self.epoch, relay, self._adapter_scale)

    def undisturbed(self) -> asyncio.Lock:
        """A context in which no replica connects or takes a version."""
        return self._lock

    async def bring_up(self, replica: Replica) -> None:
        """Connect a replica that came later, and have it use the version that is live. Nothing before ``connect``.

        Errors: besides, RuntimeError while a repair of the trainer has not come to its end."""
        if self.plan is None:
            return
        async with self._lock:
            await self._connect(replica)
            if self.version is not None:
                await self._fetch_and_apply(replica, self._newest_there(), self.routes.alone(replica, self.epoch))
                self.routes.hold([*self.routes.holders, replica])
            self._connected.append(replica)

    def _newest_there(self) -> int:
        """The live version, or behind a repair of the trainer, which has withdrawn it, the one that is to be."""
        assert self.version is not None, "there is something to sample"
        if self.is_broken:
            raise RuntimeError("the trainer is being repaired, and no version is there")
        return self.version if self.version in self._staged else max(self._staged)

    async def update(self, replica: Replica) -> EngineStatistics:
        """Have a connected replica that slept use the version that is live."""
        async with self._lock:
            return await self._fetch_and_apply(replica, self._newest_there(), self.routes.alone(replica, self.epoch))

    # after the trainer was repaired (trainer_repair.Follower)

    async def reopen(self) -> None:
        """Reopen the regions after a repair of the trainer, with the same plan."""
        if self.plan is None:
            return
        async with self._lock:
            self.routes.hold([])
            await self._open()
            self._connected = [replica for replica in self._connected if not replica.is_dead]
            for replica in self._connected:
                with suppress(ActorDied):  # its own owner replaces it, and the new one is brought up
                    await self._connect(replica)

    async def resume(self, step: int) -> None:
        """Publish the withdrawn version again.

        If the run is a step further by now, the weights of that version are gone: those of ``step`` come in their
        place, under their own number.
        """
        if self.published is not None:
            await self.stage(step)

    # versions

    async def stage(self, version: int) -> None:
        """Begin to stage a version on all trainer ranks. The one before must be live."""
        what = f"publishing weights version {version}"
        ranks = self.trainers.of_policy
        with self._record.span("publish", *(rank.name for rank in ranks)):
            await call_all(ranks, TrainerEndpoints.stage(version, self.epoch), seconds=self.seconds, what=what)
        self.published, self._staged = version, self._staged & {self.version} | {version}

    async def announce(
        self, version: int, healthy: Callable[[], list[Replica]], failed: Callable[[int, str], None]
    ) -> list[EngineStatistics]:
        """Have healthy replicas fetch and apply a staged version.

        Gives statistics of the version before, of those that did.

        ``healthy`` names them, and is asked only when nobody else is brought up: who is meanwhile, is so to the version
        before, and would get work under it if it were left out here. ``failed`` is told of each one that lives and
        could not; the dead are known to their owner.
        """
        async with self._lock:
            replicas = healthy()
            routes = self.routes.together(replicas, self.epoch)
            works = (self._fetch_and_apply(r, version, route) for r, route in zip(replicas, routes, strict=True))
            done = await asyncio.gather(*works, return_exceptions=True)
            self.version = version
            took = [r for r, result in zip(replicas, done, strict=True) if isinstance(result, EngineStatistics)]
            self.routes.hold(took)
        for replica, result in zip(replicas, done, strict=True):
            if isinstance(result, Exception) and not isinstance(result, ActorDied):
                failed(replica.number, f"failed weights version {version}: {last_line(result)}")
            elif isinstance(result, BaseException) and not isinstance(result, Exception):
                raise result
        return [result for result in done if isinstance(result, EngineStatistics)]

    async def _fetch_and_apply(self, replica: Replica, version: int, routes: list[Route]) -> EngineStatistics:
        what = f"updating generator {replica.number} to version {version}"
        # the reader's own deadline comes first, and says which rank it waited for
        fetches = [
            (process, GeneratorEndpoints.fetch(version, 0.9 * self.seconds, route))
            for process, route in zip(replica.ranks, routes, strict=True)
        ]
        with self._record.span("fetch", f"generator {replica.number}"):
            fetched = await call_each(fetches, seconds=self.seconds, what=what)
        for fallback in (reason for one in fetched for reason in one.fallbacks):
            self._record_event("not_handed_on", to=f"generator {replica.number}", version=version, why=fallback)
        applying = GeneratorEndpoints.apply(version)
        statistics = await call(replica.ranks[0], applying, seconds=self.seconds, what=what)
        self._record.note(f"generator {replica.number}", statistics.spans)
        return dataclasses.replace(
            statistics,
            generator=replica.number,
            bytes_from_trainers=sum(one.bytes_from_trainers for one in fetched),
            bytes_from_generators=sum(one.bytes_from_generators for one in fetched),
        )


def _used(pairs: list[list[dict[int, Transport]]]) -> list[tuple[int, Transport]]:
    """(trainer rank, transport) of ``pairs[replica][reader]``."""
    return [pair for replica in pairs for reader in replica for pair in reader.items()]

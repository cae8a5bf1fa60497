"""The replicas: each is a vLLM engine of one rank or several. One that dies is replaced while the others go on.

Their number may change during the run: a new one is brought up to the live version before it gets any work, and one
that is taken away ends its groups first.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from titan_rl.config.sections.placement import most_samples
from titan_rl.config.sections.precision import invariant_parts
from titan_rl.mesh.members.endpoints import GeneratorEndpoints
from titan_rl.mesh.members.replica import Replica
from titan_rl.mesh.members.router import Replacements, Router
from titan_rl.mesh.members.run_context import RunContext
from titan_rl.mesh.processes.background import BackgroundTasks
from titan_rl.mesh.resources.devices import HELPER, Devices, EngineSeats
from titan_rl.mesh.supervision.actor_process import ActorProcess, last_line
from titan_rl.mesh.supervision.calls import call_each, started
from titan_rl.mesh.supervision.standby import Standby
from titan_rl.mesh.weights.channel_link import WeightLink


class StartupGate:
    """Gate that admits engine startups while it is open. Shutting it waits for those inside."""

    def __init__(self) -> None:
        self._open, self._empty = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._empty.set()
        self._num_inside = 0

    @asynccontextmanager
    async def inside(self) -> AsyncIterator[None]:
        """Wait until the gate is open; the ``with`` block runs inside."""
        await self._open.wait()
        self._num_inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._num_inside -= 1
            if not self._num_inside:
                self._empty.set()

    def open(self) -> None:
        self._open.set()

    async def shut(self) -> None:
        """Admit nobody else, and wait until all inside have left."""
        self._open.clear()
        await self._empty.wait()


_MAX_BRING_UPS = 5
_PAUSE_SECONDS = 1.0
_MAX_SPARES_LOST = 3


def _rank_names(number: int | str, count: int) -> list[str]:
    return [f"generator {number}" + (f" rank {rank}" if count > 1 else "") for rank in range(count)]


class Generators:
    """Owner of the replicas and their spares."""

    def __init__(
        self,
        actor: type,
        run: RunContext,
        max_tokens: int,
        environment: dict[str, str],
        link: WeightLink,
        devices: Devices | None = None,
        helper_environment: dict[str, str] | None = None,
    ):
        """``link``: where weights come from, once it is connected. ``max_tokens``: of a prompt with its answer.
        ``devices``: where a run's processes are on GPUs; None on a CPU. ``helper_environment``: of
        engines on the trainer's devices (helpers.py); None where there are to be none."""
        config = run.config
        self.processes, self.config, self.scratch, self.link, self.log = (
            run.processes,
            config,
            run.scratch,
            link,
            run.log,
        )
        helpers = config.placement.helper_numbers(config.generator.replicas)
        self.helpers = range(0) if helper_environment is None else helpers
        """Numbers of engines on the trainer's devices."""
        most = self._most_samples if self.helpers else None
        self.router = Router("generator", range(config.generator.replicas), most)
        self.replicas: dict[int, Replica] = {}
        table = None if devices is None else devices.table
        self._seats = EngineSeats(None if table is None else table.engines())
        self._helper_seats = EngineSeats(None if table is None else table.engines(HELPER))
        parts = invariant_parts(config.titan, config.generator.tensor_parallel)
        modes = config.algorithm.routing == "replay", parts, config.model.images

        def arguments(its_environment: dict[str, str], *, is_helper: bool) -> tuple[Any, ...]:
            settings = config.generator if devices is None else devices.of_engine(config.generator, is_helper=is_helper)
            sleeps = is_helper or config.placement.mode == "colocated"
            return its_environment, actor, settings, run.model_path, max_tokens, sleeps, *modes

        self.standby = Standby(run.processes, config, "generator", *arguments(environment, is_helper=False))
        self._helper_arguments = arguments(helper_environment or {}, is_helper=True)
        self._spares: list[Replica] = []
        self._num_spares_coming = self._num_spares_lost = 0
        self._replacements = Replacements(self.router, run.log)
        self._background = BackgroundTasks()
        self._on_change: list[Callable[[], object]] = []
        self._num_engines = 0
        self.startup_gate, self.helper_gate = StartupGate(), StartupGate()
        """Open while engines may be started (colocation.py), and helpers (helpers.py)."""

    def _most_samples(self, number: int) -> int:
        return most_samples(
            self.config.generator.max_num_seqs, self.config.rollout.group_size, is_helper=number in self.helpers
        )

    @property
    def healthy(self) -> list[Replica]:
        """Replicas in rotation."""
        return [self.replicas[number] for number in self.router.healthy if number in self.replicas]

    @property
    def num_replicas(self) -> int:
        """Number of replicas, those out of rotation included, and helpers not."""
        return len(self._scaled())

    def _scaled(self) -> list[int]:
        return [number for number in self.router.members if number not in self.helpers]

    @property
    def leaders(self) -> list[ActorProcess]:
        return [replica.ranks[0] for replica in self.replicas.values()]

    def on_change(self, callback: Callable[[], object]) -> None:
        """Register a callback for each added or removed replica."""
        self._on_change.append(callback)

    def _notify_of_change(self) -> None:
        for callback in self._on_change:
            callback()

    async def start(self) -> None:
        async with self.startup_gate.inside():
            starts = (started(partial(self._start_one, number), self.log) for number in self.router.members)
            replicas = await asyncio.gather(*starts)
            for replica in replicas:
                self._take_in(replica)

    async def start_helpers(self) -> None:
        """Start engines on the trainer's devices, which it must have left. Errors: those of a start."""
        for number in self.helpers:
            self.router.add(number)
        await asyncio.gather(*map(self._bring, self.helpers))

    async def _start_one(self, number: int | str) -> Replica:
        self._num_engines += 1
        file = f"generator{self._num_engines}"
        names = _rank_names(number, self.config.generator.tensor_parallel)
        seats = self._seats_for(number).take(self.processes.is_there)
        replica = Replica(-1 if isinstance(number, str) else number, seats=seats)
        devices = (tuple(seat.device for seat in replica.seats),) if replica.seats else ()
        what = f"starting generator {number}"
        try:
            await self._man(replica, names)
            rendezvous_file = replica.ranks[0].host.folder(self.scratch) / file
            starts = [
                (process, GeneratorEndpoints.start(rank, str(rendezvous_file), *devices))
                for rank, process in enumerate(replica.ranks)
            ]
            await call_each(starts, seconds=self.config.mesh.start_timeout, what=what)
        except BaseException:  # also when cancelled: nobody else knows of it yet, so nobody else would end it
            self._end(replica)
            raise
        return replica

    def _seats_for(self, number: int | str) -> EngineSeats:
        return self._helper_seats if number in self.helpers else self._seats

    async def _man(self, replica: Replica, names: list[str]) -> None:
        """Its ranks' processes, all on one machine."""
        if replica.number in self.helpers:
            spawns = (self.processes.spawn(name, *self._helper_arguments) for name in names)
            replica.ranks += await asyncio.gather(*spawns)
            return
        on = replica.seats[0].host if replica.seats else None
        if on is None and len(names) > 1 and self.processes.remote is not None:
            replica.ranks.append(await self.standby.take(names[0]))
            on = replica.ranks[0].host.number
        remaining = names[len(replica.ranks) :]
        replica.ranks += await asyncio.gather(*(self.standby.take(name, on) for name in remaining))

    def _take_in(self, replica: Replica) -> None:
        self.replicas[replica.number] = replica
        for rank in replica.ranks:
            rank.deaths.register("generator", lambda rank: self._begin_replacing(replica, rank))
            rank.deaths.register("snapshots", lambda rank: self._notify_of_change())
        if dead := [rank for rank in replica.ranks if rank.is_dead]:
            self._begin_replacing(replica, dead[0])
        self._notify_of_change()

    def _end(self, replica: Replica) -> None:
        replica.kill()
        for rank in replica.ranks:
            self.processes.forget(rank)
        self._seats_for(replica.number).give_back(replica.seats)
        replica.seats = ()

    # faults

    def _begin_replacing(self, replica: Replica, rank: ActorProcess) -> None:
        """An engine cannot go on without one of its ranks: the others are ended, and it is replaced."""
        number = replica.number
        if self.replicas.get(number) is not replica:
            return
        self.router.take_out(number, f"{rank.name} {rank.why}")
        del self.replicas[number]
        self._end(replica)
        self.log(f"{rank.name} {rank.why}: its groups are sampled elsewhere, and it is replaced")
        self._replacements.begin(number, lambda: self._bring(number))

    def _replace_spare(self, replica: Replica, rank: ActorProcess) -> None:
        """Another one, if this one was still waiting, and not too many died so since an engine was replaced."""
        if replica not in self._spares:
            return
        self._spares.remove(replica)
        self._end(replica)
        self._num_spares_lost += 1
        if self._num_spares_lost < _MAX_SPARES_LOST:
            self.log(f"{rank.name} {rank.why}: another is started")
            self.prepare()
        else:
            self.log(
                f"{rank.name} {rank.why}, as {self._num_spares_lost - 1} before it: no further spare is started for now"
            )

    def fail(self, number: int, reason: str) -> None:
        """Replace a live replica that failed, as if it had died."""
        replica = self.replicas.get(number)
        if replica is not None:
            self.router.take_out(number, reason)
            replica.ranks[0].why = reason
            replica.kill()

    async def _bring(self, number: int) -> None:
        """A replica of that number, at the live version before it gets any work; again after a trainer's repair that
        has come between. Errors: those of a start while the trainer is whole."""
        while True:
            epoch = self.link.epoch
            try:
                return await self._bring_once(number)
            except Exception as error:
                if not self.link.is_broken and self.link.epoch == epoch:
                    raise
                self.log(f"generator {number} is started again after the trainer's repair: {last_line(error)}")
            while self.link.is_broken:  # outside of the gate, which a repair may have to shut
                await asyncio.sleep(_PAUSE_SECONDS)

    async def _bring_once(self, number: int) -> None:
        async with (self.helper_gate if number in self.helpers else self.startup_gate).inside():
            replica = await self._next_engine(number)
            try:
                await self._bring_up(replica)
            except BaseException:  # also when cancelled: nobody else knows of it yet, so nobody else would end it
                self._end(replica)
                raise
            self._welcome(number, replica)
        self.prepare()

    def _welcome(self, number: int, replica: Replica) -> None:
        if number not in self.router.members:  # it was taken away again
            self._end(replica)
            return
        self._take_in(replica)
        if not replica.is_dead:
            self.router.put_in(number)
            self.log(f"generator {number} serves")
            self.processes.record_event("generator_serves", number=number)

    async def _next_engine(self, number: int) -> Replica:
        """A spare that waits, or an engine that is started now."""
        if not self._spares or number in self.helpers:
            return await self._start_one(number)
        replica, self._num_spares_lost = self._spares.pop(), 0
        replica.number = number
        for rank, name in zip(replica.ranks, _rank_names(number, len(replica.ranks)), strict=True):
            rank.name = name
        return replica

    async def _bring_up(self, replica: Replica) -> None:
        """To the version that is live. A trainer that is being repaired withdraws that, and publishes it again."""
        for attempt in range(1, _MAX_BRING_UPS + 1):
            try:
                return await self.link.bring_up(replica)
            except Exception:  # the trainer's side may be at fault, which its own owner repairs
                if attempt == _MAX_BRING_UPS or replica.is_dead:
                    raise
                await asyncio.sleep(_PAUSE_SECONDS)

    def prepare(self) -> None:
        """Start missing spares (``recovery.warm_spares``) and the standby.

        A spare pulls the live version when its turn comes.
        """
        self.standby.make()

        async def spare() -> None:
            try:
                replica = await self._start_one("spare")
            finally:
                self._num_spares_coming -= 1
            self._spares.append(replica)
            for rank in replica.ranks:
                rank.deaths.register("spare", lambda rank: self._replace_spare(replica, rank))
            self.processes.record_event("spare_waits", pid=replica.ranks[0].pid)

        for _ in range(self.config.recovery.warm_spares - len(self._spares) - self._num_spares_coming):
            self._num_spares_coming += 1
            self._background.start(spare())

    # more and fewer

    def scale(self, count: int) -> None:
        """Begin to scale to ``count`` replicas; surplus ones finish their groups first."""
        members, most = self._scaled(), self._seats.count
        if most is not None and count > (most := most - self.config.recovery.warm_spares):
            self.log(f"scale: requested {count} generators, the placement has GPUs for {most}: running {most}")
            count = most
        for _ in range(count - len(members)):
            number = max(*self.router.members, *self.helpers, -1) + 1
            self.router.add(number)
            self._replacements.begin(number, lambda number=number: self._bring(number))
        for number in members[count:]:
            self.router.remove(number)
            replica = self.replicas.pop(number, None)  # none: it is being replaced, which ends by itself
            if replica is not None:
                self._background.start(self._dismiss(replica))

    async def _dismiss(self, replica: Replica) -> None:
        """Its groups end first; those that take too long are sampled elsewhere."""
        if replica.groups:
            await asyncio.wait(
                {asyncio.ensure_future(replica.idle.wait())}, timeout=self.config.verifier.episode_timeout
            )
        for rank in replica.ranks:
            rank.is_stopping = True
        self._end(replica)
        self.log(f"generator {replica.number} was removed")
        self.processes.record_event("generator_gone", number=replica.number)

    def stop(self) -> None:
        self._replacements.stop()
        self.standby.stop()
        self._background.cancel()
        self.replicas, self._spares = {}, []  # no other is started for one that ends now

"""Helper generators: engines on the trainer's devices, ``[placement] helper_generators``.

    the trainer works                                  the trainer waits, and groups wait for an engine
    helpers sleep, and what they sample  ──lend──▶     its moments lie on the host; helpers wake up with the live
    waits, with its tokens               ◀──take──     version, go on where they were, and take groups

A call to the trainer takes the devices back at once; only a helper that is being replaced then comes up first. They are
lent when the trainer has waited for as long as lending and taking them takes, so that at most as much time is lost
again as has passed anyway (the rule of rent or buy: Karlin et al., "Competitive snoopy caching", Algorithmica 1988).

A group that sleeps moves to an engine that runs it at once, and begins again there, if that repeats less work than the
trainer is expected to do until it waits again, which is what it did last time. So a run whose trainer need not wait
does not wait for its helpers. Who dies is replaced as under colocation, a helper in its next turn.
"""

import asyncio
import dataclasses
import time
from math import inf

from titan_rl.data.types import EngineStatistics
from titan_rl.mesh.control.colocation import NoColocation, fall_asleep
from titan_rl.mesh.control.generators import Generators
from titan_rl.mesh.members.endpoints import GeneratorEndpoints, TrainerEndpoints
from titan_rl.mesh.members.replica import HeldGroup, Replica
from titan_rl.mesh.members.trainers import Trainers
from titan_rl.mesh.processes.deadlines import unless
from titan_rl.mesh.supervision.actor_process import ActorDied, last_line
from titan_rl.mesh.supervision.calls import call
from titan_rl.mesh.telemetry.step_record import StepRecord
from titan_rl.mesh.weights.channel_link import WeightLink

_LOOK_SECONDS = 0.05
"""Between two looks whether the trainer waits."""


class HelperTurns(NoColocation):
    """Owner of the turns that the trainer and its helpers take on the trainer's devices."""

    def __init__(
        self, trainers: Trainers, generators: Generators, link: WeightLink, seconds: float, record: StepRecord
    ):
        """``seconds``: of any call. ``record``: how long the turn took to change."""
        super().__init__()
        self.trainers, self.generators, self.link, self.seconds = trainers, generators, link, seconds
        self._record = record
        self._lock = asyncio.Lock()
        """Held while the turn changes."""
        self._are_lent = self._is_offloaded = False
        self._waits_since: float | None = None
        """When the trainer had nothing more to do; None: it works."""
        self._seconds_to_lend = self._seconds_to_take = 0.0
        """The least so far; 0: never yet."""
        self._lent_since = self._asleep_since = 0.0
        self._seconds_worked = 0.0
        """From when helpers fell asleep until the trainer waited, the last time."""
        self._statistics: dict[int, EngineStatistics] = {}

    async def begin(self) -> None:
        await self.generators.helper_gate.shut()

    async def start(self) -> None:
        """Start the helpers once all others are up; they are connected, and sleep from the trainer's next call on."""
        async with self._lock:
            await self._leave()
            await unless(self._deaths(), self.generators.start_helpers())
            if dead := [rank for rank in self.trainers.ranks if rank.died.done()]:  # whom helpers would wait for
                raise ActorDied(dead, "helper generators started")

    async def take(self, *, dead: bool = False) -> None:
        self._waits_since = None
        async with self._lock:
            if self._are_lent:
                await self.generators.helper_gate.shut()
            start = time.monotonic()
            if self._are_lent:
                await self._put_to_sleep()
            if self._is_offloaded and not dead:
                with self._record.span("take the device back", *self._ranks()):
                    await self.trainers.call(TrainerEndpoints.onload(), what="taking the device back")
                self._is_offloaded = False
                self._seconds_to_take = min(self._seconds_to_take or inf, time.monotonic() - start)

    async def _put_to_sleep(self) -> None:
        helpers = self._helpers()
        for replica in helpers:
            self.generators.router.rest(replica.number)
        async with self.link.undisturbed():
            await asyncio.gather(*(self._sleep(replica) for replica in helpers))
        self._are_lent, self._asleep_since = False, time.monotonic()
        for held in (held for replica in helpers for held in replica.groups):
            held.seconds += self._asleep_since - max(self._lent_since, held.began)

    async def _sleep(self, replica: Replica) -> None:
        """With what it did for the step's account. One that fails is replaced."""
        if not await fall_asleep(self.generators, replica, self.seconds, self._record):
            return
        request, what = GeneratorEndpoints.take_statistics(), f"taking statistics of generator {replica.number}"
        try:
            statistics = await call(replica.ranks[0], request, seconds=self.seconds, what=what)
            statistics = dataclasses.replace(statistics, generator=replica.number)
            earlier = self._statistics.get(replica.number)
            self._statistics[replica.number] = statistics if earlier is None else earlier.plus(statistics)
        except ActorDied:
            pass  # its owner replaces it
        except Exception as error:  # an engine that gives none is broken
            self.generators.fail(replica.number, f"gave no statistics: {last_line(error)}")

    def take_statistics(self) -> list[EngineStatistics]:
        taken, self._statistics = self._statistics, {}
        return list(taken.values())

    def release(self) -> None:
        self._waits_since = time.monotonic()

    async def watch(self) -> None:
        await asyncio.gather(self._keep_groups(), self._lend_where_it_pays())

    async def _keep_groups(self) -> None:
        """Again and again, begin the deadlines of groups that sleep anew, and move one of them where that pays."""
        router = self.generators.router
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            resting = [replica for replica in self._helpers() if router.is_resting(replica.number)]
            asleep = [held for replica in resting for held in replica.groups]
            for held in asleep:
                held.deadline.restart()
            if not self._are_lent and self._waits_since is None:
                self._move_one(asleep)

    def _move_one(self, asleep: list[HeldGroup]) -> None:
        """The one that came first, of those that may move."""
        seconds_left = self._seconds_worked - (time.monotonic() - self._asleep_since)
        for held in sorted(asleep, key=lambda held: held.began):
            if held.moved is None or held.moved.done() or held.seconds > seconds_left:
                continue
            if self.generators.router.runs_at_once(held.samples, self.generators.config.generator.max_num_seqs):
                return held.moved.set_result(None)

    async def _lend_where_it_pays(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            if self._pays():
                try:
                    await self._lend()
                except Exception as error:  # the run goes on without, and its trainer's owner repairs what died
                    self._waits_since = None
                    self.generators.log(f"the trainer's devices were not lent to helpers: {last_line(error)}")

    def _pays(self) -> bool:
        if self._are_lent or self._waits_since is None or self.link.version != self.link.published:
            return False
        router = self.generators.router
        is_wanted = router.is_crowded or any(replica.groups for replica in self._helpers())
        is_there = not all(map(router.is_given_up, self.generators.helpers))
        waited = time.monotonic() - self._waits_since
        return is_wanted and is_there and waited >= self._seconds_to_lend + self._seconds_to_take

    async def _lend(self) -> None:
        async with self._lock:
            if self._waits_since is None:  # meanwhile
                return
            self._seconds_worked = self._waits_since - self._asleep_since
            start, helpers = time.monotonic(), self._helpers()
            await self._leave()
            woke = await unless(self._deaths(), self._wake_all(helpers))  # or they wait for whoever never answers
            if woke and helpers:
                self._seconds_to_lend = min(self._seconds_to_lend or inf, time.monotonic() - start)

    async def _leave(self) -> None:
        """Errors: ActorDied."""
        self._is_offloaded = True
        with self._record.span("leave the device", *self._ranks()):
            await self.trainers.call(TrainerEndpoints.offload(), what="leaving the device")
        self._are_lent, self._lent_since = True, time.monotonic()
        self.generators.helper_gate.open()

    async def _wake_all(self, helpers: list[Replica]) -> bool:
        return all(await asyncio.gather(*map(self._wake, helpers)))

    async def _wake(self, replica: Replica) -> bool:
        """Whether it woke; one that does not is replaced."""
        try:
            await self.link.update(replica)
        except ActorDied:
            return False
        except Exception as error:  # as of an update that fails
            self.generators.fail(replica.number, f"did not wake up: {last_line(error)}")
            return False
        self.generators.router.resume(replica.number)
        return True

    def _helpers(self) -> list[Replica]:
        replicas = self.generators.replicas
        return [replicas[number] for number in self.generators.helpers if number in replicas]

    def _deaths(self) -> set[asyncio.Future[float]]:
        return {rank.died for rank in self.trainers.ranks}

    def _ranks(self) -> list[str]:
        return [rank.name for rank in self.trainers.ranks]

"""Whose turn it is on devices that trainer and generators share: ``[placement] mode = "colocated"``.

    the trainer's turn                                     the generators' turn
    generators hold neither weights nor KV    ──offload──▶  the trainer's moments and gradients lie on the host,
    nor their copy of a version               ◀──sleep───   and it holds no activations

The turn changes when somebody asks for it: a call to the trainer that computes takes it, a version that goes out gives
it back, since a version is what engines wake up with. Groups that sleep in them have the last one go out again once the
trainer has been idle for a while. An engine is started and brought up in one turn of the
generators, which lasts until that is done. Who dies in whichever turn is replaced in it, or in the next one:

    a trainer rank, in its own turn             in it; the others of the trainer are there
    a trainer rank, in the generators' turn     it takes the turn; what was being sampled is put off, and goes on
    a generator, in its own turn                in it
    a generator, asleep or falling asleep       in its next turn, with the version that the others wake up with
"""

import asyncio
import time
from math import inf

from titan_rl.data.types import EngineStatistics
from titan_rl.mesh.control.generators import Generators
from titan_rl.mesh.members.endpoints import GeneratorEndpoints, TrainerEndpoints
from titan_rl.mesh.members.replica import Replica
from titan_rl.mesh.members.trainers import Trainers
from titan_rl.mesh.supervision.actor_process import ActorDied, last_line
from titan_rl.mesh.supervision.calls import call
from titan_rl.mesh.telemetry.step_record import StepRecord
from titan_rl.mesh.weights.channel_link import WeightLink

_END_SECONDS = 5.0
"""How long the death of a process that was killed is waited for."""
_LOOK_SECONDS = 0.5
"""Between two looks whether groups wait for an idle trainer."""
_IDLE_SECONDS = 2.0
"""How long a trainer is idle before the last version goes out again."""


class NoColocation:
    """No colocation: all actors always own their devices."""

    def __init__(self) -> None:
        self.interrupted = asyncio.Event()
        """Set when generators are to have their turn back: a repair of the trainer took it, or groups wait for it."""

    @property
    def is_with_trainer(self) -> bool:
        return False

    async def begin(self) -> None:
        """Close the startup gate before anything starts."""

    async def take(self, *, dead: bool = False) -> None:
        """Give the devices to the trainer. ``dead``: a rank is dead, and nothing is onloaded. Errors: ActorDied."""

    async def give(self) -> None:
        """Give the devices to the generators. Errors: ActorDied."""

    async def start(self) -> None:
        """Start what works on the trainer's devices while that waits; all others are up. Errors: those of a start."""

    def release(self) -> None:
        """Note that the trainer has nothing more to do."""

    def take_statistics(self) -> list[EngineStatistics]:
        """Statistics of engines that take no announced version."""
        return []

    async def watch(self) -> None:
        """Change turns beside what the run does, for as long as it lasts."""


async def fall_asleep(generators: Generators, replica: Replica, seconds: float, record: StepRecord) -> bool:
    """Have a replica release its memory; False for one that cannot, which is ended."""
    try:
        with record.span("fall asleep", f"generator {replica.number}"):
            what = f"generator {replica.number} fell asleep"
            await call(replica.ranks[0], GeneratorEndpoints.sleep(), seconds=seconds, what=what)
        return True
    except ActorDied:
        pass  # its owner replaces it
    except Exception as error:  # it may hold what the trainer needs
        generators.fail(replica.number, f"did not fall asleep: {last_line(error)}")
    deaths = {rank.died for rank in replica.ranks}
    await asyncio.wait(deaths, timeout=_END_SECONDS)  # until then its memory is taken
    return False


class Colocation(NoColocation):
    """Colocation of trainer and generators: exactly one side owns the devices, first the trainer."""

    def __init__(
        self,
        trainers: Trainers,
        generators: Generators,
        link: WeightLink,
        seconds: float,
        record: StepRecord | None = None,
    ):
        """``seconds``: of any call. ``record``: how long the turn took to change."""
        super().__init__()
        self._record = record or StepRecord()
        self.trainers, self.generators, self.link, self.seconds = trainers, generators, link, seconds
        self._is_trainers = True
        self._idle_since = inf
        """When the trainer had nothing more to do; inf: it works."""
        self._lock = asyncio.Lock()
        """Held while the turn changes."""

    @property
    def is_with_trainer(self) -> bool:
        return self._is_trainers

    async def begin(self) -> None:
        """Close the startup gate before anything starts."""
        await self.generators.startup_gate.shut()

    async def take(self, *, dead: bool = False) -> None:
        self._idle_since = inf
        async with self._lock:
            if not self._is_trainers:
                await self.generators.startup_gate.shut()
                async with self.link.undisturbed():
                    replicas = self.generators.replicas.values()
                    sleeps = (fall_asleep(self.generators, each, self.seconds, self._record) for each in replicas)
                    await asyncio.gather(*sleeps)
                self._is_trainers = True
        if not dead:
            with self._record.span("take the device back", *self._ranks()):
                await self.trainers.call(TrainerEndpoints.onload(), what="taking the device back")

    def _ranks(self) -> list[str]:
        return [rank.name for rank in getattr(self.trainers, "ranks", ())]

    async def give(self) -> None:
        async with self._lock:
            if self._is_trainers:
                with self._record.span("leave the device", *self._ranks()):
                    await self.trainers.call(TrainerEndpoints.offload(), what="leaving the device")
                self._is_trainers = False
                self.generators.startup_gate.open()

    def release(self) -> None:
        self._idle_since = time.monotonic()

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            sleeps_in_one = self._is_trainers and any(each.groups for each in self.generators.replicas.values())
            if sleeps_in_one and time.monotonic() - self._idle_since > _IDLE_SECONDS:
                self._idle_since = inf
                self.interrupted.set()

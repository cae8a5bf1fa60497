"""Weights from the trainer to the generators, whatever dies meanwhile.

``publish`` is what the trainer waits for; ``deliver`` goes on beside its next step. The channel itself is
weight_link.py's; this adds that a dead trainer rank is repaired and the work done again, and that a replica which fails
an update is replaced.
"""

import asyncio

from titan_rl.data.types import EngineStatistics
from titan_rl.mesh.control.colocation import Apart
from titan_rl.mesh.control.dispatcher import Dispatcher
from titan_rl.mesh.control.generators import Generators
from titan_rl.mesh.control.trainer_repair import TrainerMesh
from titan_rl.mesh.processes.background import retrieve_exception
from titan_rl.mesh.telemetry.stragglers import Stragglers
from titan_rl.mesh.weights.channel_link import WeightLink


class WeightSync:
    """Takes versions from the trainer to the generators. Errors of all calls: ActorFault; whatever an actor raises."""

    def __init__(
        self,
        trainer: TrainerMesh,
        link: WeightLink,
        generators: Generators,
        dispatcher: Dispatcher,
        stragglers: Stragglers,
        turns: Apart,
    ):
        """``link`` is among what follows a repair of ``trainer``. With every version the step times of generators and
        of verifiers (from ``dispatcher``) are noted in ``stragglers``."""
        self.trainer, self.link, self.generators = trainer, link, generators
        self._dispatcher, self._stragglers, self.turns = dispatcher, stragglers, turns
        self._num_deliveries = 0
        """Under way."""

    @property
    def transports(self) -> str:
        """For the log: ``shared_memory (4 pairs)``."""
        return self.link.transports

    async def connect(self) -> None:
        """All replicas that there are to the trainer's ranks. Errors: PlanError; ActorDied."""
        await self.link.connect([replica for _, replica in sorted(self.generators.replicas.items())])

    async def publish(self, version: int) -> None:
        """The trainer's part of a new version; the one before must be delivered."""
        await self.trainer.ask(lambda: self.link.publish(version))

    async def deliver(self, version: int) -> list[EngineStatistics]:
        """Have every replica take a published version; each engine's statistics of the version before.

        After a repair it may be a later one, which the trainer is at by then (``WeightLink.resume``).
        """
        self._num_deliveries += 1
        try:
            return await self._deliver(version)
        finally:
            self._num_deliveries -= 1

    async def wake(self) -> None:
        """Have generators take the last version again if they sleep and none is on its way: somebody wants to sample,
        or a repair of the trainer came between. Errors: as those of ``deliver``."""
        if self.turns.is_trainers and not self._num_deliveries and self.link.published is not None:
            await self.deliver(self.link.published)

    async def _deliver(self, version: int) -> list[EngineStatistics]:
        trainers = self.trainer.trainers
        while True:
            deaths = {rank.died for rank in trainers.ranks}
            work = asyncio.ensure_future(self._hand_over(version))
            work.add_done_callback(retrieve_exception)  # it explains nothing if a trainer rank died
            await asyncio.wait({work, *deaths}, return_when=asyncio.FIRST_COMPLETED)
            if work.done() and trainers.is_complete:
                self._note_step_times(work.result())
                return work.result()
            work.cancel()  # it may wait for a rank that will never finish this version
            await asyncio.wait({work})
            await self.trainer.wait_until_complete()
            version = self._published()

    def _published(self) -> int:
        assert self.link.published is not None  # or nothing would be delivered
        return self.link.published

    async def _hand_over(self, version: int) -> list[EngineStatistics]:
        await self.turns.give()
        return await self.link.deliver(version, lambda: self.generators.healthy, self._update_failed)

    def _update_failed(self, number: int, reason: str) -> None:
        if not self.trainer.trainers.is_complete:
            return  # that is why, and it is delivered again
        self.generators.fail(number, reason)

    def _note_step_times(self, statistics: list[EngineStatistics]) -> None:
        of_engines = {f"generator {each.generator}": each for each in statistics if each.num_steps}
        self._stragglers.note(
            "generator",
            {name: each.seconds_busy for name, each in of_engines.items()},
            {name: each.num_steps for name, each in of_engines.items()},
        )
        scoring = self._dispatcher.take_scoring_seconds()
        self._stragglers.note(
            "verifier",
            {name: sum(seconds) for name, seconds in scoring.items()},
            {name: len(seconds) for name, seconds in scoring.items()},
        )

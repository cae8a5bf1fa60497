"""Weights from the trainer to the generators, whatever dies meanwhile. Four verbs, one for each stage of a version.

    verb      file                                what happens                                  process
    --------  ----------------------------------  --------------------------------------------  -----------------
              trainer/step/learner.py             the optimizer has stepped                     trainer rank
              controller/loop/controller.py       a step has ended: ``send``                    controller
    stage     mesh/control/weight_sync.py         once the version before is live               controller
              mesh/control/trainer_repair.py      again, if a trainer rank dies                 controller
              mesh/weights/channel_link.py        one call to each rank (supervision/calls.py)  controller
              actors/trainer.py                   the endpoint; the next update waits           trainer rank
              mesh/channel/writer.py              which slot, which copies                      trainer rank
              mesh/channel/memory/slots.py        casts, copies, sums, then stamps it           trainer rank, thread
    announce  mesh/control/weight_sync.py         beside the trainer's next step                controller
              mesh/control/colocation.py          generators get the devices back               controller
              mesh/weights/channel_link.py        to each replica, in two calls a version       controller
              mesh/weights/routes.py              which rank reads from which                   controller
    fetch     actors/generator.py                 the endpoint; the engine goes on              generator rank
              mesh/channel/reader.py              waits for the stamp, reads, proves checksums  generator rank
              mesh/channel/relay/gathering.py     from the trainers, or from another replica    generator rank
              mesh/channel/sources.py             shared memory, CUDA IPC, RDMA or TCP          generator rank
    apply     generator/engine.py                 between two steps of all ranks (lockstep.py)  generator rank
              generator/weights/vllm_backend.py   into vLLM's parameters                        generator rank
              controller/loop/controller.py       admits what waits for it, reports the step    controller

What lies where is worked out once, when replicas connect (mesh/channel/plan.py, mesh/channel/memory/region.py). A
trainer rank that dies is repaired, and the stage begun again; a replica that fails an update is replaced.
"""

import asyncio
import time
from collections.abc import Callable

from titan_rl.data.types import EngineStatistics
from titan_rl.mesh.control.colocation import NoColocation
from titan_rl.mesh.control.generators import Generators
from titan_rl.mesh.control.trainer_repair import TrainerMesh
from titan_rl.mesh.members.verifiers import Verifiers
from titan_rl.mesh.processes.background import BackgroundTasks, retrieve_exception
from titan_rl.mesh.telemetry.stragglers import Stragglers
from titan_rl.mesh.weights.channel_link import WeightLink

OnLive = Callable[[list[EngineStatistics], float], None]
"""Called with what each engine did under the version before, and the seconds from ``send`` to the last generator."""


class WeightSync:
    """Owns the version on its way, of which there is one at most. Errors of all calls: ActorFault; an actor's own."""

    def __init__(
        self,
        trainer: TrainerMesh,
        link: WeightLink,
        generators: Generators,
        verifiers: Verifiers,
        stragglers: Stragglers,
    ):
        """``link`` is among what follows a repair of ``trainer``. With every version the step times of generators and
        verifiers are noted in ``stragglers``."""
        self.trainer, self.link, self.generators = trainer, link, generators
        self._verifiers, self._stragglers = verifiers, stragglers
        self.pending: asyncio.Task[None] | None = None
        """Ends when the version on its way is live; waiters look at it, ``until_live`` alone ends it."""
        self._num_announced = 0
        """Versions that generators are taking."""
        self._background = BackgroundTasks()

    @property
    def colocation(self) -> NoColocation:
        return self.trainer.colocation

    @property
    def transports(self) -> str:
        """For the log: ``shared_memory (4 pairs)``."""
        return self.link.transports

    async def connect(self) -> None:
        """Connect all replicas to the trainer's ranks. Errors: PlanError; ActorDied."""
        await self.link.connect([replica for _, replica in sorted(self.generators.replicas.items())])

    async def send(self, version: int, on_live: OnLive) -> None:
        """Stage a version; generators fetch it in the background."""
        start = time.perf_counter()

        async def announce() -> None:
            statistics = await self.announce(version)
            on_live(statistics, time.perf_counter() - start)

        await self.stage(version)
        self.pending = asyncio.create_task(announce())

    async def until_live(self) -> None:
        """Wait until the pending version is live. Errors: those of its delivery."""
        if self.pending is not None:
            await self.pending
            self.pending = None

    async def stage(self, version: int) -> None:
        """Begin to stage a version on all trainer ranks; the one before must be live."""
        await self.trainer.ask(lambda: self.link.stage(version))

    async def announce(self, version: int) -> list[EngineStatistics]:
        """Have every replica fetch and apply a staged version; each engine's statistics of the version before.

        A trainer rank that dies meanwhile is repaired first. After that it may be a later version, which the trainer is
        at by then (``WeightLink.resume``).
        """
        trainers = self.trainer.trainers
        self._num_announced += 1
        try:
            while True:
                deaths = {rank.died for rank in trainers.ranks}
                work = asyncio.ensure_future(self._announce(version))
                work.add_done_callback(retrieve_exception)  # it explains nothing if a trainer rank died
                await asyncio.wait({work, *deaths}, return_when=asyncio.FIRST_COMPLETED)
                if work.done() and trainers.is_complete:
                    statistics = [*work.result(), *self.colocation.take_statistics()]
                    self._note_step_times(statistics)
                    return statistics
                work.cancel()  # it may wait for a rank that will never finish this version
                await asyncio.wait({work})
                await self.trainer.wait_until_complete()
                assert self.link.published is not None  # or nothing would be announced
                version = self.link.published
        finally:
            self._num_announced -= 1

    async def _announce(self, version: int) -> list[EngineStatistics]:
        """With all trainer ranks alive."""
        await self.colocation.give()
        return await self.link.announce(version, lambda: self.generators.healthy, self._update_failed)

    def _update_failed(self, number: int, reason: str) -> None:
        if not self.trainer.trainers.is_complete:
            return  # that is why, and it is announced again
        self.generators.fail(number, reason)

    async def wake(self) -> None:
        """Have generators take the last version again if they sleep and none is on its way: somebody wants to sample,
        or a repair of the trainer came between. Errors: as those of ``announce``."""
        if self.colocation.is_with_trainer and not self._num_announced and self.link.published is not None:
            await self.announce(self.link.published)

    async def watch(self) -> None:
        """For as long as the run lasts: generators wake again whose turn a repair has interrupted."""
        while True:
            await self.colocation.interrupted.wait()
            self.colocation.interrupted.clear()
            self._background.start(self.wake())

    def _note_step_times(self, statistics: list[EngineStatistics]) -> None:
        of_engines = {f"generator {each.generator}": each for each in statistics if each.num_steps}
        self._stragglers.note(
            "generator",
            {name: each.seconds_busy for name, each in of_engines.items()},
            {name: each.num_steps for name, each in of_engines.items()},
        )
        scoring = self._verifiers.take_scoring_seconds()
        self._stragglers.note(
            "verifier",
            {name: sum(seconds) for name, seconds in scoring.items()},
            {name: len(seconds) for name, seconds in scoring.items()},
        )

    def cancel(self) -> None:
        """Cancel the pending version."""
        if self.pending is not None:
            self.pending.cancel()

    def stop(self) -> None:
        self._background.cancel()

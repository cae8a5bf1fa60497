"""The version of the weights that is on its way: published by the trainer, live once every generator has it.

Generators take it beside the trainer's next work, if there is any. At most one version is on its way.
"""

import asyncio
import time
from collections.abc import Callable

from titan_rl.controller.loop.admission import Admission
from titan_rl.data.types import EngineStatistics
from titan_rl.mesh.control.weight_sync import WeightSync

Delivered = Callable[[list[EngineStatistics], float], None]
"""Called with what each engine did under the version before, and the seconds from publication to the last generator."""


class Publishing:
    """Owns the delivery under way; a version that is live lets more groups be admitted."""

    def __init__(self, weights: WeightSync, admission: Admission):
        self.weights, self.admission = weights, admission
        self.pending: asyncio.Task[None] | None = None
        """The delivery under way; waiters look at it, ``delivered`` alone ends it."""

    async def publish(self, version: int, then: Delivered = lambda statistics, seconds: None) -> None:
        """The trainer's part; the delivery goes on by itself and calls ``then``. Errors: an actor's fault."""
        start = time.perf_counter()
        await self.weights.publish(version)
        self.pending = asyncio.create_task(self._deliver(version, start, then))

    async def _deliver(self, version: int, start: float, then: Delivered) -> None:
        statistics = await self.weights.deliver(version)
        self.admission.advance(version)
        then(statistics, time.perf_counter() - start)

    async def delivered(self) -> None:
        """Until the last published version is live. Errors: what kept it from being so."""
        if self.pending is not None:
            await self.pending
            self.pending = None

    def cancel(self) -> None:
        if self.pending is not None:
            self.pending.cancel()

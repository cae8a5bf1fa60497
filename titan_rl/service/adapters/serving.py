"""Which weights the generators serve, and whose turn it is to sample.

Generators hold one version, with the adapter merged into it, as in any run: what is sampled is what is trained, to the
bit. Requests for the weights that are served go at once; those for others wait until these have ended, and are then
served together.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from titan_rl.data.types import Completion, Request
from titan_rl.mesh.meshes import Meshes
from titan_rl.service.adapters.training import AdapterTraining

_PATIENCE_SECONDS = 2.0
"""After which a request for other weights has those that come later wait behind it."""
Source = Path | None
"""PEFT directory of an adapter; None: the base model."""


class ServedWeights:
    """Owner of the version that generators serve. Errors of ``complete``: RequestFailed; NoneLeft; DeadlineError."""

    def __init__(self, meshes: Callable[[], Meshes], training: AdapterTraining) -> None:
        self._meshes, self._training = meshes, training
        self._version = -1
        self._served: Source = None
        self._num_sampling = 0
        self._waiting: dict[Source, float] = {}
        """Since when requests for other weights wait, the first of each."""
        self._change = asyncio.Condition()

    async def start(self) -> None:
        """Have generators take the base model's weights."""
        await self._switch(None)

    async def complete(self, source: Source, request: Request) -> list[Completion]:
        """Completions of a request under some weights."""
        async with self._turn(source):
            return await self._meshes().dispatcher.complete(request)

    @asynccontextmanager
    async def _turn(self, source: Source) -> AsyncIterator[None]:
        async with self._change:
            if not self._goes_at_once(source):
                self._waiting.setdefault(source, asyncio.get_running_loop().time())
                await self._change.wait_for(lambda: self._is_next(source))
                if source in self._waiting:
                    await self._begin_turn(source)
            self._num_sampling += 1
        try:
            yield
        finally:
            async with self._change:
                self._num_sampling -= 1
                self._change.notify_all()

    def _goes_at_once(self, source: Source) -> bool:
        if source != self._served:
            return False
        now = asyncio.get_running_loop().time()
        return all(now - since < _PATIENCE_SECONDS for since in self._waiting.values())

    def _is_next(self, source: Source) -> bool:
        """Whether these weights are served, or nobody samples and they have been waited for the longest."""
        if source == self._served and source not in self._waiting:
            return True
        return not self._num_sampling and source in self._waiting and min(self._waiting, key=self._since) == source

    def _since(self, source: Source) -> float:
        return self._waiting[source]

    async def _begin_turn(self, source: Source) -> None:
        try:
            if self._served != source:
                await self._switch(source)
        finally:
            self._waiting.pop(source, None)
            self._change.notify_all()

    async def _switch(self, source: Source) -> None:
        meshes, version = self._meshes(), self._version + 1
        meshes.trainer.step_done = version  # what a repair stages again

        async def stage() -> None:
            await self._training.show(source)
            await meshes.weights.link.stage(version)

        await meshes.trainer.ask(stage)
        await meshes.weights.announce(version)
        self._version, self._served = version, source

"""Which weights the generators serve, and whose turn it is to sample.

Generators hold one version, with the adapter merged into it, as in any run: what is sampled is what is trained, to the
bit. Requests for the weights that are served go at once; those for others wait until these have ended, and are then
served together.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from titan_rl.data.types import Completion, Request
from titan_rl.mesh.meshes import Meshes
from titan_rl.service.adapters.training import AdapterTraining

_PATIENCE_SECONDS = 2.0
"""After which a request for other weights has those that come later wait behind it."""
_BEGUN = -1.0
"""In the place of the time since when requests wait: their turn has come."""
Source = Path | None
"""PEFT directory of an adapter; None: the base model."""
_NOTHING = Path()
"""Stands for no weights at all, while they change."""


@dataclass
class _Waiting:
    """Requests that wait for some weights."""

    since: float
    count: int = 0


class ServedWeights:
    """Owner of the version that generators serve. Errors of ``complete``: RequestFailed; NoneLeft; DeadlineError."""

    def __init__(self, meshes: Meshes, training: AdapterTraining) -> None:
        self._meshes, self._training = meshes, training
        self._version = -1
        self._served: Source = _NOTHING
        self._num_sampling = 0
        self._waiting: dict[Source, _Waiting] = {}
        self._change = asyncio.Condition()

    async def start(self) -> None:
        """Have generators take the base model's weights."""
        await self._switch(None)

    async def complete(self, source: Source, request: Request) -> list[Completion]:
        """Completions of a request under some weights."""
        async with self._turn(source):
            return await self._meshes.dispatcher.complete(request)

    @asynccontextmanager
    async def _turn(self, source: Source) -> AsyncIterator[None]:
        async with self._change:
            if not self._goes_at_once(source):
                await self._wait(source)
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
        return all(now - each.since < _PATIENCE_SECONDS for each in self._waiting.values())

    async def _wait(self, source: Source) -> None:
        """Until the weights' turn has come, which the first who waits for them begins; the lock is held."""
        waiting = self._waiting.setdefault(source, _Waiting(asyncio.get_running_loop().time()))
        waiting.count += 1
        try:
            await self._change.wait_for(lambda: waiting.since == _BEGUN or self._is_next(source))
            if waiting.since != _BEGUN and self._served != source:
                await self._switch(source)
            waiting.since = _BEGUN
        finally:  # also when cancelled: nobody may wait for a turn that no request takes
            waiting.count -= 1
            is_over = not waiting.count or waiting.since == _BEGUN
            if is_over and self._waiting.get(source) is waiting:
                del self._waiting[source]
            self._change.notify_all()
        if self._served != source:  # others came before this one had the lock
            await self._wait(source)

    def _is_next(self, source: Source) -> bool:
        """Whether nobody samples, and these weights have been waited for the longest."""
        return not self._num_sampling and min(self._waiting, key=lambda each: self._waiting[each].since) == source

    async def _switch(self, source: Source) -> None:
        self._version += 1  # a number is of one version, also where staging it failed
        meshes, version, self._served = self._meshes, self._version, _NOTHING
        meshes.trainer.step_done = version  # what a repair stages again

        async def stage() -> None:
            await self._training.show(source)
            await meshes.weights.link.stage(version)

        await meshes.trainer.ask(stage)
        await meshes.weights.announce(version)
        self._served = source

"""Generator that a group's requests go to, as its verifier has it, and another if it dies or sleeps.

    ask ─▶ generator ─▶ completions
              ├─ dies ─▶ the request waits ─▶ move ─▶ the same request at another
              └─ sleeps ─▶ move ─▶ the same request at another; this one samples it no further

Answers, environments, sandboxes and agents of the group stay, and do not hear of it.
"""

import asyncio
import dataclasses
import time
from collections.abc import Awaitable
from math import inf
from typing import Any, TypeVar
from uuid import uuid4

from monarch.actor import ActorError

from titan_rl.compat.monarch.actors import SupervisionError
from titan_rl.data.types import Completion, Request, RequestRefused
from titan_rl.mesh.processes.background import retrieve_exception
from titan_rl.mesh.processes.deadlines import DeadlineError, within
from titan_rl.mesh.supervision.remote_call import actor_of

T = TypeVar("T")

_NEWS_SECONDS = 2.0
"""How long a failed request waits for the news that its generator has died."""


async def _result_of(answer: Awaitable[T]) -> T:
    """Its result: what Monarch gives is awaitable, and no coroutine."""
    return await answer


class ReplicaFailed(RuntimeError):
    """Failure of a replica; another may sample the group."""

    @property
    def is_request_refused(self) -> bool:
        """Whether the generator rejected the request as invalid."""
        return isinstance(self.__cause__, ActorError) and isinstance(self.__cause__.exception, RequestRefused)


class AskedGenerator:
    """Owner of what a group under way asks."""

    def __init__(self, reference: bytes, patience: float):
        """``patience``: seconds for each answer, and for another generator to come."""
        self._generator: Any = actor_of(reference)
        """None while there is none."""
        self._patience, self._since = patience, 0.0
        self._is_over = False
        self._aborts: set[asyncio.Future[None]] = set()
        """Under way."""
        self._change: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def move(self, reference: bytes | None) -> None:
        """Send requests under way and later ones to another generator; None: it is still to come."""
        self._generator, self._since = None if reference is None else actor_of(reference), time.monotonic()
        self._notify()

    def end(self) -> None:
        """Fail all requests, since nobody waits for the group any more."""
        self._is_over = True
        self._notify()

    def _notify(self) -> None:
        self._change.set_result(None)
        self._change = asyncio.get_running_loop().create_future()

    async def ask(self, request: Request) -> list[Completion]:
        """Completions of a request. Errors: ReplicaFailed."""
        request = dataclasses.replace(request, id=uuid4().hex)
        while True:
            generator = await self._present()
            work = asyncio.ensure_future(self._answer(generator, request))
            work.add_done_callback(retrieve_exception)
            try:
                while not work.done() and self._generator is generator and not self._is_over:
                    await asyncio.wait({work, self._change}, return_when=asyncio.FIRST_COMPLETED)
                if work.done():
                    return work.result()
            except (ActorError, SupervisionError, DeadlineError) as error:
                failure = ReplicaFailed()
                failure.__cause__ = error
                if failure.is_request_refused or not await self._is_moved_from(generator):
                    raise failure from error
            finally:
                if not work.done() and self._generator is not None and not self._is_over:  # or else that one is dead
                    self._abort(generator, request.id)
                work.cancel()

    def _abort(self, generator: Any, request_id: str) -> None:
        """Have a generator sample no further what nobody waits for."""
        aborted = asyncio.ensure_future(_result_of(generator.abort.call_one(request_id)))
        self._aborts.add(aborted)  # or it would be collected before its end
        aborted.add_done_callback(self._aborts.discard)
        aborted.add_done_callback(retrieve_exception)

    async def _answer(self, generator: Any, request: Request) -> list[Completion]:
        """Errors: DeadlineError if a generator that is awake takes too long; those of the call."""
        call = asyncio.ensure_future(_result_of(generator.generate.call_one(request)))
        call.add_done_callback(retrieve_exception)
        left = self._patience
        try:
            while not call.done() and left > 0:
                await asyncio.wait({call}, timeout=left)
                if not call.done():
                    left = self._patience - await self._seconds_awake(generator)
            if call.done():
                return call.result()
            raise DeadlineError(f"an answer of the generator did not end within {self._patience:g} s")
        finally:
            call.cancel()

    async def _seconds_awake(self, generator: Any) -> float:
        """Infinite of one that does not answer."""
        try:
            return await within(_NEWS_SECONDS, "an answer", generator.seconds_awake.call_one())
        except DeadlineError:
            return inf

    async def _present(self) -> Any:
        """Generator, once there is one. Errors: ReplicaFailed."""
        while self._generator is None and not self._is_over:
            if (left := self._since + self._patience - time.monotonic()) <= 0:
                break
            await asyncio.wait({self._change}, timeout=left)
        if self._generator is None or self._is_over:
            raise ReplicaFailed("no other generator came") from TimeoutError("no other generator came in time")
        return self._generator

    async def _is_moved_from(self, generator: Any) -> bool:
        """Whether requests go elsewhere, which is waited for a moment."""
        if self._generator is generator and not self._is_over:
            await asyncio.wait({self._change}, timeout=_NEWS_SECONDS)
        return self._generator is not generator and not self._is_over

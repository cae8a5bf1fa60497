"""Requests under way and their answers, by ids that a repeated request has again.

A client posts a request, and asks for its answer by the id that it was given. One that it posts twice, since an answer
of ours was lost on the way, is done once.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from titan_rl.config.io.printable import printable
from titan_rl.service.adapters.training import RequestFailed
from titan_rl.service.wire.reading import BadRequest

_MOST_BYTES = 512 << 20
"""Of answers that are kept; of those that were fetched, the oldest are dropped first."""
MOST_UNDER_WAY = 20_000
"""Requests whose answers nobody has fetched."""
_SHOWN = 500


@dataclass(frozen=True)
class Answer:
    """Answer to a request."""

    body: bytes
    content_type: str = "application/json"


class Unknown(KeyError):
    """No request of that id is known, or its answer was dropped."""


class Busy(RuntimeError):
    """There are too many requests; says how to mend it."""


class Failed(RuntimeError):
    """The request has failed; says why."""

    def __init__(self, why: str, *, is_clients: bool) -> None:
        """``is_clients``: whether the request is at fault."""
        super().__init__(printable(why, _SHOWN))
        self.is_clients = is_clients


Work = Callable[[], Coroutine[None, None, Answer]]
Turn = AbstractAsyncContextManager[None]


class Futures:
    """Owner of all requests' futures."""

    def __init__(self, on_failure: Callable[[str, Exception], None]) -> None:
        """``on_failure`` hears what went wrong here, and not at a client's."""
        self._on_failure = on_failure
        self._tasks: OrderedDict[str, asyncio.Task[Answer]] = OrderedDict()
        self._kept: OrderedDict[str, int] = OrderedDict()
        """Bytes of answers that were fetched."""
        self._num_bytes = 0
        """Of all these."""
        self._owners: dict[str, str] = {}
        self._kept_whole: set[asyncio.Task[Answer]] = set()
        """Under way, and not cancelled before the service ends."""

    def begin(self, name: str, owner: str, work: Work, turn: Turn | None = None) -> None:
        """Begin the work of a request, unless it has begun. ``owner``: session whose end drops it. ``turn``: what it
        waits for; once that has come, nobody cancels it: others' work may stand on what it has half done.

        Errors: Busy where too many answers were never fetched."""
        if name in self._tasks:
            return
        if len(self._tasks) - len(self._kept) >= MOST_UNDER_WAY:
            raise Busy(f"{MOST_UNDER_WAY} requests are under way: fetch their answers first")
        self._tasks[name] = asyncio.create_task(self._done(name, work, turn))
        self._owners[name] = owner

    async def _done(self, name: str, work: Work, turn: Turn | None) -> Answer:
        try:
            return await (work() if turn is None else self._done_in_turn(work, turn))
        except (BadRequest, RequestFailed) as error:
            raise Failed(str(error), is_clients=True) from None
        except asyncio.CancelledError:
            raise Failed("it was cancelled", is_clients=False) from None
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            self._on_failure(f"request {name}: {why}", error)
            raise Failed(why, is_clients=False) from error

    async def _done_in_turn(self, work: Work, turn: Turn) -> Answer:
        task = asyncio.current_task()
        assert task is not None, "a coroutine that runs is some task's"
        async with turn:
            self._kept_whole.add(task)
            try:
                return await work()
            finally:
                self._kept_whole.discard(task)

    async def result(self, name: str, seconds: float) -> Answer | None:
        """Answer of a request; None if it is not there within the time. Errors: Failed; Unknown."""
        if name not in self._tasks:
            raise Unknown(name)
        task = self._tasks[name]
        await asyncio.wait({task}, timeout=seconds)
        if not task.done():
            return None
        if task.cancelled():
            raise Failed("it was cancelled", is_clients=False)
        error = task.exception()
        self._keep(name, 0 if error else len(task.result().body))
        return task.result()

    def _keep(self, name: str, size: int) -> None:
        self._num_bytes += size - self._kept.get(name, 0)
        self._kept[name] = size
        self._kept.move_to_end(name)
        while self._num_bytes > _MOST_BYTES and len(self._kept) > 1:
            self._drop(next(iter(self._kept)))

    def _drop(self, name: str) -> None:
        self._num_bytes -= self._kept.pop(name, 0)
        del self._tasks[name], self._owners[name]

    def cancel(self, name: str) -> None:
        """Cancel a request that nobody waits for, if it can be cancelled still."""
        if name in self._tasks:
            self._cancel(self._tasks[name])

    def _cancel(self, task: asyncio.Task[Answer]) -> None:
        """Not before it has run: it takes its place in the order of its model's requests first."""

        def cancel() -> None:
            if task not in self._kept_whole:
                task.cancel()

        asyncio.get_running_loop().call_soon(cancel)

    async def end_session(self, owner: str) -> None:
        """Drop all requests of a session, once they are cancelled or, where they cannot be, done."""
        names = [name for name, own in self._owners.items() if own == owner]
        tasks = [self._tasks[name] for name in names]
        for name, task in zip(names, tasks, strict=True):
            self._cancel(task)
            self._drop(name)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def stop(self) -> None:
        """Cancel all requests."""
        tasks = {*self._tasks.values(), *self._kept_whole}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

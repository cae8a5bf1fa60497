"""Thread for a blocking third-party object, from which all its calls come.

A call that does not end in time cannot be ended. Its thread is left to itself, as a daemon, and lets go of the object
if it ever comes back; how many such calls there may be in a process is counted.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from titan_rl.environments.interfaces.environment import EnvironmentFailed
from titan_rl.mesh.processes.background import retrieve_exception

MAX_LATE = 16
"""Timed-out calls that a process may have."""
_late: list[Future] = []


def num_late() -> int:
    """Number of timed-out calls of this process that have not returned."""
    _late[:] = [result for result in _late if not result.done()]
    return len(_late)


class BlockingThread:
    """Daemon thread for all calls to one blocking object.

    Errors of all calls: what the function raises; EnvironmentFailed when it takes too long, or did before.
    """

    def __init__(self, name: str):
        self.name = name
        self._calls: queue.SimpleQueue[tuple[Future, Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Future | None = None

    async def call(self, label: str, function: Callable[[], Any], seconds: float) -> Any:
        """Run the function in the thread; ``seconds``: deadline; ``label``: name of the call in errors."""
        self._start()
        result = self._submit(function)
        waiting = asyncio.wrap_future(result)
        waiting.add_done_callback(retrieve_exception)  # it may fail after we stopped waiting
        try:
            finished, _ = await asyncio.wait({waiting}, timeout=seconds)
        finally:
            if not result.done():
                _late.append(result)
        if not finished:
            raise EnvironmentFailed(f"{self.name}: {label} did not end within {seconds:g} s")
        return waiting.result()

    def _start(self) -> None:
        if self._is_late:
            raise EnvironmentFailed(f"{self.name}: an earlier call has not ended")
        if self._thread is not None:
            return
        if (count := num_late()) >= MAX_LATE:
            raise EnvironmentFailed(f"{self.name}: {count} calls of episodes before it have not ended")
        self._thread = threading.Thread(target=self._serve, name=self.name, daemon=True)
        self._thread.start()

    @property
    def _is_late(self) -> bool:
        return self._last is not None and not self._last.done()

    def _submit(self, function: Callable[[], Any]) -> Future:
        self._last = Future()
        self._calls.put((self._last, function))
        return self._last

    def _serve(self) -> None:
        while (item := self._calls.get()) is not None:
            result, function = item
            result.set_running_or_notify_cancel()
            try:
                value = function()
            except BaseException as error:  # SystemExit, too, is for the caller to hear of
                result.set_exception(error)
            else:
                result.set_result(value)

    async def end(self, function: Callable[[], Any], seconds: float) -> None:
        """Make a last call and end the thread; not awaited behind a timed-out call."""
        if self._thread is None:
            return
        try:
            if self._is_late:
                self._submit(function)
            else:
                await self.call("its end", function, seconds)
        finally:
            self._calls.put(None)

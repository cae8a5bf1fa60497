"""Work that goes on beside its owner: nobody awaits it, and its owner cancels it in the end."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def retrieve_exception(task: asyncio.Future) -> None:
    """Mark the exception of a finished task as seen: asyncio warns of one that nobody asked for.

    A done-callback for tasks that may fail after their owner has stopped waiting, or whose failure is met elsewhere.
    """
    if not task.cancelled():
        task.exception()


class BackgroundTasks:
    """Background tasks; their exceptions are not reported."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task] = set()  # the event loop itself holds only weak references

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task in the running event loop."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(retrieve_exception)
        return task

    def cancel(self) -> None:
        """Cancel all unfinished tasks."""
        for task in self._tasks:
            task.cancel()

"""Waits with a deadline, which say what they wait for; and for several things at once."""

import asyncio
from collections.abc import Awaitable, Coroutine, Iterable
from typing import Any, TypeVar

from titan_rl.mesh.processes.background import retrieve_exception

T = TypeVar("T")


class DeadlineError(RuntimeError):
    """Missed deadline."""


async def together(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Results of all. Errors: the first failure's, after the others were cancelled and have ended."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


async def unless(others: Iterable[asyncio.Future], work: Coroutine[Any, Any, T]) -> T | None:
    """Result of the work, which is cancelled once one of the others is done; None then."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task, *others}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


async def within(seconds: float, what: str, awaitable: Awaitable[T]) -> T:
    """The awaitable's result. Errors: DeadlineError naming ``what`` after ``seconds``."""

    async def wait() -> T:
        return await awaitable

    work = asyncio.ensure_future(wait())
    work.add_done_callback(retrieve_exception)  # it may fail after we stopped waiting
    try:
        done, _ = await asyncio.wait({work}, timeout=seconds)
    finally:
        if not work.done():
            work.cancel()
    if not done:
        raise DeadlineError(f"{what} did not end within {seconds:g} s")
    return work.result()

"""Waits with a deadline, which say what they wait for."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from titan_rl.mesh.supervision.background import retrieve_exception

T = TypeVar("T")


class DeadlineError(RuntimeError):
    """Something did not happen in time."""


async def within(seconds: float, what: str, awaitable: Awaitable[T]) -> T:
    """The awaitable's result. Errors: DeadlineError naming ``what`` after ``seconds``."""

    async def wait():
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

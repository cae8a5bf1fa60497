"""Every wait has a deadline, and says what it waits for."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


class DeadlineError(RuntimeError):
    """Something did not happen in time."""


async def within(seconds: float, what: str, awaitable: Awaitable[T]) -> T:
    """The awaitable's result. Errors: DeadlineError naming ``what`` after ``seconds``."""

    async def wait():
        return await awaitable

    try:
        return await asyncio.wait_for(wait(), seconds)
    except TimeoutError:
        raise DeadlineError(f"{what} did not end within {seconds:g} s") from None

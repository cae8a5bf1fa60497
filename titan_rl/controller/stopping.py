"""A stop that was asked for: what waits for samples ends at once, what changes the weights ends first."""

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

T = TypeVar("T")


class Stopped(Exception):
    """Somebody asked the run to end."""

    def __init__(self, why: str = ""):
        """``why``: what forced it; empty if it is the user's wish."""
        super().__init__(*([why] if why else []))
        self.why = why


class Lost(Exception):
    """The run has lost what it cannot go on without."""


class StopRequest:
    """Asked for once, by a signal, by a program, or since the run has lost what it cannot go on without."""

    def __init__(self) -> None:
        self._asked = asyncio.Event()
        self.why = ""
        """What forced it; empty if it is the user's wish."""
        self.is_forced = False
        """Whether nothing is worth waiting for."""
        self.driver: asyncio.Task[Any] | None = None
        """Who is cancelled then."""

    @property
    def is_asked(self) -> bool:
        return self._asked.is_set()

    def ask(self, why: str = "") -> None:
        self.why = self.why or why
        self._asked.set()

    def force(self, why: str) -> None:
        """End at once, whatever the run waits for."""
        self.is_forced = True
        self.ask(why)
        if self.driver is not None:
            self.driver.cancel()

    def check(self) -> None:
        """Errors: Stopped, if a stop was asked for."""
        if self.is_asked:
            raise Stopped(self.why)

    async def interrupts(self, awaitable: Awaitable[T]) -> T:
        """The awaitable's result. Errors: Stopped as soon as a stop is asked for; the awaitable is cancelled then."""
        work = asyncio.ensure_future(awaitable)
        stop = asyncio.ensure_future(self._asked.wait())
        try:
            await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
            if not work.done():
                work.cancel()
        if work.cancelled() or not work.done():
            raise Stopped(self.why)
        return work.result()

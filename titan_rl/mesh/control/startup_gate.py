"""Work that may only begin at times, and is let end before they are over."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Door:
    """Open until it is shut."""

    def __init__(self) -> None:
        self._open, self._empty = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._empty.set()
        self._num_inside = 0

    @asynccontextmanager
    async def inside(self) -> AsyncIterator[None]:
        """Waits while it is shut; the block works inside."""
        await self._open.wait()
        self._num_inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._num_inside -= 1
            if not self._num_inside:
                self._empty.set()

    def open(self) -> None:
        self._open.set()

    async def shut(self) -> None:
        """Nobody else comes in; until all who are inside have left."""
        self._open.clear()
        await self._empty.wait()
